"""Several incoming transfers as one: the shards of several producers.

A tensor-parallel producer group sends each rank's heads of the same blocks; the
consumer waits for all of them, layer by layer, and gets one outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.outcome import Outcome, join_outcomes
from kvwire.transfers.incoming import Incoming


class Joined:
    """What :func:`join` makes; has the methods of an :class:`~kvwire.Incoming`."""

    def __init__(self, parts: tuple[Incoming, ...]) -> None:
        self._parts = parts

    def __await__(self) -> Generator[Any, Any, Outcome]:
        return self._outcome().__await__()

    def done(self) -> bool:
        """Whether the outcome is known, which is when every part's is."""
        return all(part.done() for part in self._parts)

    @property
    def is_drained(self) -> bool:
        """Whether nothing of kvwire can touch the blocks any more."""
        return all(part.is_drained for part in self._parts)

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Whether a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
        """
        return all(part.layer_landed(layer, group) for part in self._parts)

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError, ConnectionClosed, ProfileMismatch: One of them ended without
                it, for this reason; the others are not waited for.

        Cancel safety: safe, it only watches.
        """
        gates = [
            asyncio.ensure_future(part.layer(layer, group)) for part in self._parts
        ]
        try:
            await asyncio.gather(*gates)
        finally:
            for gate in gates:
                gate.cancel()
            await asyncio.gather(*gates, return_exceptions=True)

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
        UsageError: There is none, or their block lists differ.
    """
    if not parts:
        raise UsageError("join: pass the Incoming of each producer")
    for part in parts[1:]:
        _require_same_lists(parts[0], part)
    return Joined(parts)


def _require_same_lists(first: Incoming, other: Incoming) -> None:
    if first.lists.keys() != other.lists.keys():
        raise UsageError(
            f"join: {first.id!r} has the groups {', '.join(first.lists)}, "
            f"{other.id!r} has {', '.join(other.lists)}"
        )
    for group, ids in first.lists.items():
        if not np.array_equal(ids, other.lists[group]):
            raise UsageError(
                f"join: the block lists of {first.id!r} and {other.id!r} differ in "
                f"group {group!r}"
            )
