"""Several incoming transfers as one: the shards of several producers.

A tensor-parallel producer group sends each rank's heads of the same blocks; the
consumer waits for all of them, layer by layer, and gets one outcome.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kvwire.errors import UsageError
from kvwire.incoming import Incoming
from kvwire.kv.outcome import Outcome, join_outcomes


class Joined:
    """What :func:`join` makes; has the methods of an :class:`~kvwire.Incoming`."""

    def __init__(self, parts: tuple[Incoming, ...]) -> None:
        self._parts = parts

    def __await__(self) -> Generator[Any, Any, Outcome]:
        return self._outcome().__await__()

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError: One of them ended without it.

        Cancel safety: safe, it only watches.
        """
        for part in self._parts:
            await part.layer(layer, group)

    async def drained(self) -> None:
        """Wait until nothing of kvwire can touch the blocks any more.

        Cancel safety: safe, it only watches.
        """
        for part in self._parts:
            await part.drained()

    def abort(self, reason: str = "aborted") -> None:
        """End all of them."""
        for part in self._parts:
            part.abort(reason)

    async def _outcome(self) -> Outcome:
        return join_outcomes([await part for part in self._parts])


def join(*parts: Incoming) -> Joined:
    """See several incoming transfers of the same blocks as one.

    Raises:
        UsageError: There is none.
    """
    if not parts:
        raise UsageError("join: pass the Incoming of each producer")
    return Joined(parts)
