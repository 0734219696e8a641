"""Whether engines live: each is asked for its health twice a second.

::

    it answers            ready; it gets requests
    it answers 5xx        it has failed, as vLLM says when its engine has died
    nobody listens        down at once; what it has goes on, as in a graceful stop
    silent for 1 s        slow: others are taken first. An API server that is busy with
                          long prompts is silent for a second or two
    silent for 10 s       given up: what waits for it is tried elsewhere
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus
from typing import Final

from kvwire.directory.base import ended
from kvwire.integrations.vllm.proxy.client import EngineClient, Unanswered
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.limits import PROXY_METRICS_BYTES_MAX

PROBE_S: Final = 0.5
# So many questions a second at most; a fleet of more than 100 engines is asked less
# often.
_PROBES_PER_S: Final = 200
SLOW_S: Final = 1.0
SILENT_S: Final = 10.0


class Prober:
    """Asks the engines of a fleet for their health."""

    def __init__(self, fleet: EngineFleet, client: EngineClient) -> None:
        self._fleet = fleet
        self._client = client
        # One for each engine, with when it was asked. bounded: MEMBERS_MAX
        self._asked: dict[VllmEngine, tuple[float, asyncio.Task[None]]] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Ask at once: there may be a new engine."""
        self._woken.set()

    async def run(self) -> None:
        """Ask again and again until this is cancelled.

        Cancel safety: safe, no question is left.
        """
        try:
            while True:
                self._sweep()
                pause_s = max(PROBE_S, len(self._asked) / _PROBES_PER_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), pause_s)
                self._woken.clear()
        finally:
            for _, task in self._asked.values():
                await ended(task)

    def _sweep(self) -> None:
        now = self._fleet.clock()
        engines = self._fleet.engines
        for engine in self._asked.keys() - set(engines):
            self._asked.pop(engine)[1].cancel()
        for engine in engines:
            began, task = self._asked.get(engine, (now, None))
            if task is None or (task.done() and now - began >= PROBE_S):
                self._asked[engine] = now, asyncio.create_task(self._ask(engine))
            elif not task.done() and now - began > SLOW_S:
                engine.slow = True

    async def _ask(self, engine: VllmEngine) -> None:
        try:
            async with (
                asyncio.timeout(SILENT_S),
                self._client.ask(f"{engine.url}/health") as said,
            ):
                await said.body(PROXY_METRICS_BYTES_MAX)
        except (Unanswered, TimeoutError) as exc:
            if isinstance(exc, Unanswered) and not exc.silent:
                engine.refusing = True
                return
            engine.slow = True
            engine.give_up()
            return
        engine.slow = engine.refusing = False
        if said.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._fleet.down(engine)
        else:
            engine.ready = True
