"""Watches a directory, and reports new and lost engines to a fleet."""

from __future__ import annotations

import logging
from contextlib import aclosing

from kvwire.directory import Change, ChangeKind, Directory, Selector
from kvwire.directory.limits import MEMBERS_MAX
from kvwire.errors import UsageError
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.members import AllowedHosts, read_member

logger: logging.Logger = logging.getLogger("kvwire.vllm")


class Discovery:
    """Reports a directory's engines to a fleet."""

    def __init__(
        self,
        directory: Directory,
        fleet: EngineFleet,
        allowed: AllowedHosts,
        selector: Selector | str = "",
    ) -> None:
        self._directory = directory
        self._fleet = fleet
        self._allowed = allowed
        self._selector = selector
        # Keys of the records whose faults were logged. bounded: MEMBERS_MAX
        self._logged: set[str] = set()
        self.refused: int = 0  # the number of unusable records

    @property
    def ignored(self) -> int:
        """The number of entries that were not valid records, or not allowed."""
        return self._directory.ignored + self.refused

    async def watch(self) -> None:
        """Watch the directory until cancelled; while it is down, wait until it is back.

        Cancel safety: safe, it only reads.
        """
        async with aclosing(self._directory.watch(self._selector)) as changes:
            async for change in changes:
                self._take(change)

    async def close(self) -> None:
        """Close the directory. Never raises.

        Cancel safety: safe, call it again.
        """
        await self._directory.close()

    def _take(self, change: Change) -> None:
        key = change.record.key
        # The directory may also hold a store, or a peer other than vLLM.
        if change.kind is ChangeKind.LEFT or "http" not in change.record.labels:
            self._logged.discard(key)
            self._fleet.left(key)
            return
        try:
            member = read_member(change.record, self._allowed)
        except UsageError as exc:
            self.refused += 1
            if key not in self._logged and len(self._logged) < MEMBERS_MAX:
                logger.warning("ignored a record in %s: %s", self._directory, exc)
                self._logged.add(key)
            self._fleet.left(key)
            return
        self._fleet.joined(key, member)
