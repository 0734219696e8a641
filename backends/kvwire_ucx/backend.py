"""The entry point of the backend ``ucx``: a context, and one worker per lane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import ClassVar, Final

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Finding,
)
from kvwire.backend.lane import Lane, LaneContext
from kvwire.limits import CLOSE_TIMEOUT_S
from kvwire_ucx import diagnosis
from kvwire_ucx.context import Context
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.settings import OLD, parse
from kvwire_ucx.worker import Worker

_log: Final = logging.getLogger("kvwire.ucx")


class UcxBackend(Backend):
    """Moves payload over UCX, beside another transport's control link.

    A context is created with the first lane, one for each set of settings: in practice
    there is one, since a communicator has one configuration.
    """

    scheme: ClassVar[str] = "ucx"
    capabilities: ClassVar[Capabilities] = Capabilities(links=False, lanes=True)

    def __init__(self) -> None:
        self._contexts: dict[tuple[frozenset[tuple[str, str]], bool], Context] = {}
        self._lanes: set[UcxLane] = set()

    @classmethod
    def check_settings(cls, given: Mapping[str, str]) -> None:
        """Check the settings that are known here; UCX checks its own later."""
        parse(given, OLD)

    @classmethod
    def rank(cls) -> int:
        """Return a rank before TCP if a network card moves the bytes, else after it."""
        return diagnosis.rank()

    @classmethod
    def availability(cls) -> Availability:
        """Return whether UCX can run here; loads the library, once."""
        return diagnosis.availability()

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        return diagnosis.findings()

    def open_lane(self, context: LaneContext) -> Lane:
        loop = asyncio.get_running_loop()
        found = self._context(context)
        found.check_open()
        worker = Worker(found, loop)
        try:
            lane = UcxLane(worker, context, self._lanes.discard)
        except BaseException:
            worker.close()
            raise
        self._lanes.add(lane)  # bounded: LANES_MAX for each connection
        return lane

    async def aclose(self) -> None:
        """Free the contexts, once UCX has finished the operations of all lanes.

        Cancel safety: safe.
        """
        for lane in list(self._lanes):
            lane.abort()
        contexts = self._contexts
        self._contexts = {}
        endings = [lane.ended for lane in self._lanes]
        if endings:
            await asyncio.wait(endings, timeout=CLOSE_TIMEOUT_S)
        if self._lanes:
            # Freeing a context that lanes still use would abort the process.
            left = len(self._lanes)
            _log.error("%d lanes have not ended, so UCX is not shut down", left)
            return
        for context in contexts.values():
            context.close()

    def _context(self, lane: LaneContext) -> Context:
        # "user" allows neither: no windows, and no distrust of those who get payload.
        keys_end = lane.windows != "user"
        key = (frozenset(lane.settings.items()), keys_end)
        if key not in self._contexts:
            self._contexts[key] = Context(lane.settings, keys_end=keys_end)
        return self._contexts[key]
