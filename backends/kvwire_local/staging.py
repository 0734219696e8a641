"""A ring of shared memory, for payloads that the peer cannot well read in place.

Fragments of a few hundred bytes cost the reader more to look up than to copy, and some
peers cannot read this process at all. Such payloads are gathered here first, from where
the peer reads each in one piece. Room is given in the order of sending, and comes back
in that order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from kvwire.backend import Payload
from kvwire.limits import SPAN_BYTES_MAX
from kvwire.memory.arena import Arena
from kvwire.memory.copy import copy

# What a lane has under way, so that gathering need not wait for the reader; half of a
# third-level cache of today.
STAGING_BYTES: Final = 2 * SPAN_BYTES_MAX


@dataclass(slots=True)
class _Span:
    begin: int
    end: int


class Staging:
    """Manages the ring of one lane."""

    def __init__(self, nbytes: int = STAGING_BYTES) -> None:
        self.arena: Arena | None = None
        self._nbytes = nbytes
        self._rooms: deque[_Span] = deque()
        self._view = memoryview(b"")
        # Where the ring begins in the arena.
        self._base = 0

    def place(self, payload: Payload) -> int | None:
        """Copy a payload into the ring."""
        if payload.nbytes > self._nbytes or self.arena is None:
            if self._rooms:
                return None  # the arena is in use; wait until it can be replaced
            self._make(max(payload.nbytes, self._nbytes))
        begin = self._room_for(payload.nbytes)
        if begin is None:
            return None
        end = begin + payload.nbytes
        copy(payload, self._view[begin:end])
        self._rooms.append(_Span(begin, end))  # bounded: LANE_PAYLOADS_MAX
        return self._base + begin

    def give_back(self) -> None:
        """Free the memory of the payload that was placed first."""
        self._rooms.popleft()

    def close(self) -> None:
        """Unmap it; the peer keeps the pages that it has mapped until it ends."""
        self._view.release()
        self._rooms.clear()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _make(self, nbytes: int) -> None:
        self.close()
        self.arena = Arena(nbytes, name="kvwire-staging")
        self._nbytes = self.arena.nbytes
        memory = self.arena.buffer(self._nbytes)
        self._base = int(memory.ctypes.data) - self.arena.address
        self._view = memory.data

    def _room_for(self, nbytes: int) -> int | None:
        """Return where so many bytes in a row are free."""
        if not self._rooms:
            return 0 if nbytes <= self._nbytes else None
        first, last = self._rooms[0].begin, self._rooms[-1].end
        if last <= first:  # the end and the beginning of the ring are in use
            return last if first - last >= nbytes else None
        if self._nbytes - last >= nbytes:
            return last
        return 0 if first >= nbytes else None
