"""Which chunks of one movement have come."""

from __future__ import annotations


class ChunkSet:
    """Stores chunk numbers in no memory while they come in order.

    A bitmap would be as long as the peer's number of bytes says, before one of them has
    come. Here all below ``_next`` have come, and each number kept beyond it was paid
    for with the payload of a whole chunk.
    """

    __slots__ = ("_beyond", "_holes", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._beyond: set[int] = set()
        self._holes: set[int] = set()

    def note(self, number: int) -> bool:
        """Note a chunk; False if it had come before."""
        if number in self._holes:
            self._holes.remove(number)
            return True
        if number < self._next or number in self._beyond:
            return False
        if number > self._next:
            # Not more than there are chunks of CHUNK_BYTES_MIN in REQUEST_BYTES_MAX.
            self._beyond.add(number)  # bounded: REQUEST_BYTES_MAX, CHUNK_BYTES_MIN
            return True
        self._next += 1
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        return True

    def forget(self, number: int) -> None:
        """Remove a chunk that got lost with its lane: it may come again."""
        if number in self._beyond:
            self._beyond.remove(number)
        else:
            self._holes.add(number)  # bounded: LANE_PAYLOADS_MAX, LANES_MAX
