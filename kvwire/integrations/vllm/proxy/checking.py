"""Checks engines' metrics in the background, and keeps the findings about each engine.

No request waits for these checks. While an engine is new or has a finding, its
``/metrics`` is read at most once a second; otherwise once in 15 s, if it got requests
since the last time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kvwire.aio import end_task, start_task
from kvwire.backend import Finding
from kvwire.integrations.vllm.announce import PREFILL
from kvwire.integrations.vllm.proxy.client import (
    PROBE_S,
    SILENT_S,
    EngineClient,
    EngineFailed,
)
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.integrations.vllm.proxy.limits import PROXY_METRICS_BYTES_MAX
from kvwire.integrations.vllm.proxy.policy import IN_SEQUENCE
from kvwire.integrations.vllm.proxy.sharing import EngineReading, judge, read_metrics

logger: logging.Logger = logging.getLogger("kvwire.vllm")

SOON_S: Final = 1.0
LATER_S: Final = 15.0
# How many engines are read at once: each answer has about 200 KB.
_AT_ONCE: Final = 32
# An engine is new until it has answered this many requests.
_NEW: Final = 20


async def read_engine(client: EngineClient, engine: VllmEngine) -> EngineReading:
    """Read an engine's ``/metrics``.

    Cancel safety: safe, the request is cancelled.

    Raises:
        EngineFailed: It could not be reached, or did not answer in time.
    """
    try:
        async with (
            asyncio.timeout(SILENT_S),
            client.ask(engine, "/metrics") as response,
        ):
            text = await response.body(PROXY_METRICS_BYTES_MAX)
    except TimeoutError:
        raise EngineFailed(engine, "it does not answer", silent=True) from None
    if response.is_error:
        return EngineReading()
    try:
        return read_metrics(text.decode(errors="replace"))
    except ValueError as exc:
        raise EngineFailed(engine, f"its /metrics cannot be read: {exc}") from None


async def read_block_tokens(client: EngineClient, engine: VllmEngine) -> int:
    """Return how many tokens a block of an engine's cache has; 0 if it does not say.

    Cancel safety: safe, the request is cancelled.
    """
    if not engine.block_tokens:
        with suppress(EngineFailed):
            engine.block_tokens = (await read_engine(client, engine)).block_tokens
    return engine.block_tokens


class SharingCheck:
    """Reads engines' metrics, and keeps the findings about each engine."""

    def __init__(self, fleet: EngineFleet, client: EngineClient, order: str) -> None:
        self._fleet = fleet
        self._client = client
        self._in_sequence = order == IN_SEQUENCE
        # bounded: _AT_ONCE
        self._reading: dict[VllmEngine, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Check repeatedly until cancelled.

        Cancel safety: safe, open requests are cancelled.
        """
        try:
            while True:
                self._sweep()
                await asyncio.sleep(PROBE_S)
        finally:
            for task in self._reading.values():
                await end_task(task)

    def _sweep(self) -> None:
        now = self._fleet.clock()
        self._reading = {
            e: task for e, task in self._reading.items() if not task.done()
        }
        engines = self._fleet.engines
        # If all engines have one role, each answers alone and nothing is shared.
        shares = any(e.does(PREFILL) for e in engines)
        versions: dict[str, set[str]] = {}  # by model
        for engine in engines if shares else ():
            if (reading := engine.shared.reading) and reading.version:
                versions.setdefault(engine.model, set()).add(reading.version)
        for engine in engines:
            if not shares:
                engine.shared.findings = ()
                continue
            room = len(self._reading) < _AT_ONCE
            if room and engine not in self._reading and _is_due(engine, now):
                self._reading[engine] = start_task(self._read(engine))
            self._judge(engine, versions.get(engine.model, set()))

    async def _read(self, engine: VllmEngine) -> None:
        shared = engine.shared
        shared.read_at = self._fleet.clock()
        answered = engine.answered
        try:
            reading = await read_engine(self._client, engine)
        except EngineFailed:
            return  # it is read again
        shared.answered = answered
        shared.take(reading)
        # It may have restarted since the last reading.
        engine.block_tokens = reading.block_tokens

    def _judge(self, engine: VllmEngine, versions: set[str]) -> None:
        shared = engine.shared
        found = list(judge(shared, engine.role, in_sequence=self._in_sequence))
        if (reading := shared.reading) and reading.version:
            found += _versions(reading.version, versions)
        before = {one.name for one in shared.findings}
        after = {one.name for one in found}
        for one in found:
            if one.name not in before:
                logger.warning("%s: %s -> %s", engine.url, one.text, one.remedy)
        for name in sorted(before - after):
            logger.info("%s: the finding about %s is gone", engine.url, name)
        shared.findings = tuple(found)


def _is_due(engine: VllmEngine, now: float) -> bool:
    shared = engine.shared
    if not engine.ready or engine.is_down(now) or engine.answered == shared.answered:
        return False
    soon = engine.answered <= _NEW or shared.findings
    return now - shared.read_at >= (SOON_S if soon else LATER_S)


def _versions(own: str, versions: set[str]) -> Iterator[Finding]:
    if others := sorted(versions - {own}):
        yield Finding(
            name="versions",
            state="warn",
            text=f"it has kvwire {own}, but others that share with it have {others[0]}",
            remedy="install one release of kvwire on all engines",
        )
