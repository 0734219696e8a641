"""Bytes in any pieces, handed on as a link does: a header, then what it announces."""

from __future__ import annotations

from collections.abc import Callable

from kvwire.limits import HEADER_BYTES


class Inlet:
    """Splits a byte stream by asking its owner, at each header, how much follows.

    Holds no more than it was fed: what a header announces is not allocated.
    """

    __slots__ = ("_begin", "_body_bytes", "_end", "_pending", "stopped")

    def __init__(
        self, begin: Callable[[bytes], int | None], end: Callable[[bytes], None]
    ) -> None:
        """Make one."""
        self.stopped = False
        self._begin = begin
        self._end = end
        self._pending = bytearray()
        # Of the body that is due; None while a header is.
        self._body_bytes: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; whatever ``begin`` and ``end`` raise goes through."""
        self._pending += data
        while not self.stopped:
            in_header = self._body_bytes is None
            size = HEADER_BYTES if self._body_bytes is None else self._body_bytes
            if len(self._pending) < size:
                return
            piece = bytes(self._pending[:size])
            del self._pending[:size]
            if in_header:
                self._body_bytes = self._begin(piece)
                self.stopped = self._body_bytes is None
            else:
                self._body_bytes = None
                self._end(piece)
        self._pending.clear()
