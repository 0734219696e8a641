"""Whether engines live: their health, asked again and again.

An engine is down only if its ``/health`` fails or it cannot be reached: an error that
it answers to a request concerns that request alone. Each engine's health is checked
twice a second, and at once when a request has failed there::

    it answers            up
    it answers 5xx        down: vLLM answers so when its engine has died
    connection refused    down; running requests continue, as in a graceful stop
    no answer for 1 s     slow: other engines are preferred. An API server that is busy
                          with long prompts may not answer for a second or two
    no answer for 10 s    down; its waiting requests are retried on other engines
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvwire.aio import end_task, start_task
from kvwire_vllm.proxy.client import SILENT_S, SLOW_S, EngineClient
from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.fleet import EngineFleet

PROBE_S: Final = 0.5
# The most probes per second; with more than 100 engines, each is probed less often.
_PROBES_PER_S: Final = 200


class Prober:
    """Checks the health of all engines in a fleet."""

    def __init__(self, fleet: EngineFleet, client: EngineClient) -> None:
        self._fleet = fleet
        self._client = client
        # Each engine's last probe, with its time. bounded: MEMBERS_MAX
        self._asked: dict[VllmEngine, tuple[float, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Check repeatedly until cancelled.

        Cancel safety: safe, open checks are cancelled.
        """
        try:
            while True:
                self._sweep()
                pause_s = max(PROBE_S, len(self._asked) / _PROBES_PER_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._fleet.news.wait(), pause_s)
                self._fleet.news.clear()
        finally:
            for _, task in self._asked.values():
                await end_task(task)

    def _sweep(self) -> None:
        now = self._fleet.clock()
        engines = self._fleet.engines
        for engine in self._asked.keys() - set(engines):
            self._asked.pop(engine)[1].cancel()
        for engine in engines:
            began, task = self._asked.get(engine, (now, None))
            if task is None or (task.done() and now - began >= PROBE_S):
                probing = self._client.probe(engine, SILENT_S)
                self._asked[engine] = now, start_task(probing)
            elif not task.done() and now - began > SLOW_S:
                engine.slow = True
