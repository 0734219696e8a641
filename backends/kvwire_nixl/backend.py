"""The entry point of the backend ``nixl``: one NIXL agent per lane."""

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
from kvwire.errors import BackendUnavailable
from kvwire.extras import install_command
from kvwire.limits import CLOSE_TIMEOUT_S
from kvwire_nixl import library
from kvwire_nixl.lane import NixlLane
from kvwire_nixl.settings import parse

_log: Final = logging.getLogger("kvwire.nixl")

# After TCP, so it is used only on request. Its benefit depends on the plug-in and the
# fabric, which the installation of NIXL does not show.
_RANK: Final = 80


class NixlBackend(Backend):
    """Moves payload by a NIXL agent, beside another transport's control link."""

    scheme: ClassVar[str] = "nixl"
    capabilities: ClassVar[Capabilities] = Capabilities(links=False, lanes=True)

    def __init__(self) -> None:
        self._lanes: set[NixlLane] = set()

    @classmethod
    def check_settings(cls, given: Mapping[str, str]) -> None:
        """Check the settings that are known here; a plug-in checks its own later."""
        parse(given)

    @classmethod
    def rank(cls) -> int:
        return _RANK

    @classmethod
    def availability(cls) -> Availability:
        """Return whether NIXL can run here, without loading it."""
        if not library.installed():
            return Availability(
                available=False,
                reason="NIXL is not installed",
                remedy=install_command("nixl"),
            )
        return Availability(available=True, reason=f"NIXL {library.version()}")

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """Return the version of NIXL and its plug-ins."""
        found = cls.availability()
        if not found.available:
            return (
                Finding(
                    name="NIXL", state="missing", text=found.reason, remedy=found.remedy
                ),
            )
        try:
            plugins = ", ".join(sorted(library.plugins()))
        except BackendUnavailable as exc:
            return (Finding(name="NIXL", state="missing", text=str(exc)),)
        return (
            Finding(name="NIXL", state="ok", text=found.reason),
            Finding(name="plug-ins", state="ok", text=f"found {plugins}"),
        )

    def open_lane(self, context: LaneContext) -> Lane:
        lane = NixlLane(context, self._lanes.discard)
        self._lanes.add(lane)  # bounded: LANES_MAX for each connection
        return lane

    async def aclose(self) -> None:
        """End the lanes, and wait until their reads have ended.

        Cancel safety: safe.
        """
        for lane in list(self._lanes):
            lane.abort()
        endings = [lane.ended for lane in self._lanes]
        if endings:
            await asyncio.wait(endings, timeout=CLOSE_TIMEOUT_S)
        if self._lanes:
            _log.error("%d lanes have reads that have not ended", len(self._lanes))
