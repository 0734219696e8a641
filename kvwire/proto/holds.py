"""Holds on memory that operations still touch, behind `released` and `drained`.

A link *holds* a buffer once for each operation that may read or write it. The hold
begins when the link gets a frame with the buffer's bytes, and ends when the link
reports that it is done, or has ended. A buffer is *retired* when its owner no longer
uses it: the request is over, or the region is closed. It is *drained* when it is
retired and no hold is left. Only then may the memory be reused: a timeout, a cancel or
an error retires a buffer, but never drains it.

One table serves all connections of a communicator, since many of them may use the
memory of one region.
"""

from __future__ import annotations

from kvwire.types import BufferId


class Holds:
    """Counts the holds on each buffer.

    Attributes:
        drained: Buffers drained since the caller last emptied this list.
        retired: Buffers that are retired and still held.
    """

    __slots__ = ("_counts", "_last", "drained", "retired")

    def __init__(self) -> None:
        self.drained: list[BufferId] = []
        self._counts: dict[BufferId, int] = {}
        self.retired: set[BufferId] = set()
        self._last = 0

    def __len__(self) -> int:
        """Return the number of buffers that are not drained."""
        return len(self._counts)

    def new(self) -> BufferId:
        """Return a new buffer id; ids are never used twice."""
        self._last = last = self._last + 1
        buffer = BufferId(last)
        self._counts[buffer] = 0  # bounded: REQUESTS_MAX, REGIONS_MAX
        return buffer

    def take(self, buffer: BufferId) -> None:
        """Take a hold: an operation begins to use the buffer."""
        assert buffer not in self.retired, "a retired buffer was handed to a link"
        self._counts[buffer] += 1

    def drop(self, buffer: BufferId) -> None:
        """Drop a hold: that operation has ended."""
        left = self._counts[buffer] - 1
        assert left >= 0, "a hold was dropped twice"
        self._counts[buffer] = left  # bounded: REQUESTS_MAX, REGIONS_MAX
        if not left and buffer in self.retired:
            self.retired.remove(buffer)
            del self._counts[buffer]
            self.drained.append(buffer)  # bounded: REQUESTS_MAX, REGIONS_MAX

    def retire(self, *buffers: BufferId) -> None:
        """Retire buffers that their owner no longer uses; the last hold drains each."""
        for buffer in buffers:
            held = self._counts.get(buffer)
            if held:
                self.retired.add(buffer)  # bounded: REQUESTS_MAX, REGIONS_MAX
            elif held is not None:
                del self._counts[buffer]
                self.drained.append(buffer)  # bounded: REQUESTS_MAX, REGIONS_MAX

    def drop_and_retire(self, buffer: BufferId) -> None:
        """Drop a hold of a buffer, and retire it."""
        left = self._counts[buffer] - 1
        assert left >= 0, "a hold was dropped twice"
        if left:
            self._counts[buffer] = left  # bounded: REQUESTS_MAX, REGIONS_MAX
            self.retired.add(buffer)  # bounded: REQUESTS_MAX, REGIONS_MAX
        else:
            self.retired.discard(buffer)
            del self._counts[buffer]
            self.drained.append(buffer)  # bounded: REQUESTS_MAX, REGIONS_MAX

    def held(self, buffer: BufferId) -> bool:
        """Return whether an operation may touch the buffer now."""
        return self._counts.get(buffer, 0) > 0
