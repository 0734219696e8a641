"""Memory of a simulated process, and a shadow that says who may touch which line.

The memory is divided into lines of 64 bytes. For each line the shadow holds the number
of the lease it belongs to, and whether a link may read it or write it now. A link names
its memory once, when a frame is posted, and touches it later, when the frame is
delivered: as a NIC does. So memory that was given back too early belongs to nobody or
to somebody else when the late access comes, and the access fails the seed.

Memory that comes back is overwritten, and handed out again before any other: a reader
of stale memory gets poison or another request's bytes, never by luck the right ones.

Content is that of :mod:`kvwire_certify.oracle`: each number is a life. So bytes that
are shifted, mixed, stale or of another request compare unequal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvwire_certify import oracle
from kvwire_certify.oracle import Wrong


def demand(holds: object, rule: str, message: str) -> None:
    """Fail the seed unless ``holds`` is true."""
    if not holds:
        raise Wrong(rule, message)


# The judge compares a segment chunk by chunk.
content = lru_cache(maxsize=16)(oracle.content)

LINE_BYTES: Final = 64
_POISON: Final = b"\xdb"


@dataclass(slots=True, eq=False)
class Lease:
    """A contiguous piece of memory, from ``lend`` until ``free``.

    Attributes:
        start: Its first byte; always that of a line.
    """

    number: int
    start: int
    nbytes: int
    lines: int


class Memory:
    """All memory of one process that links may touch."""

    def __init__(self) -> None:
        self.leases = 0
        self._last = 0
        self._bytes = bytearray()
        self._owner: list[int] = []
        self._readable = bytearray()
        self._writable = bytearray()
        self._free: dict[int, list[int]] = {}

    def lend(self, nbytes: int, *, readable: bool, writable: bool) -> Lease:
        """Hand out memory that links may read or write, as said."""
        lines = -(-nbytes // LINE_BYTES)
        free = self._free.get(lines)
        start = free.pop() if free else self._grow(lines)
        self._last += 1
        self.leases += 1
        lease = Lease(self._last, start, nbytes, lines)
        self._mark(lease, self._last, readable=readable, writable=writable)
        return lease

    def free(self, lease: Lease) -> None:
        """Take memory back: from now on no link may touch it."""
        self.leases -= 1
        self._mark(lease, 0, readable=False, writable=False)
        length = lease.lines * LINE_BYTES
        self._bytes[lease.start : lease.start + length] = _POISON * length
        self._free.setdefault(lease.lines, []).append(lease.start)

    # --- its owner --------------------------------------------------------------------

    def load(self, lease: Lease, offset: int, nbytes: int) -> bytes:
        """Read as the owner of the memory."""
        begin = lease.start + offset
        return bytes(self._bytes[begin : begin + nbytes])

    def store(self, lease: Lease, offset: int, data: bytes) -> None:
        """Write as the owner of the memory."""
        begin = lease.start + offset
        self._bytes[begin : begin + len(data)] = data

    # --- a link -----------------------------------------------------------------------

    def read(self, lease: Lease, offset: int, nbytes: int) -> bytes:
        self._check("read", self._readable, lease, offset, nbytes)
        return self.load(lease, offset, nbytes)

    def write(self, lease: Lease, offset: int, data: bytes) -> None:
        self._check("write", self._writable, lease, offset, len(data))
        self.store(lease, offset, data)

    # --- inside -----------------------------------------------------------------------

    def _check(
        self, verb: str, allowed: bytearray, lease: Lease, offset: int, nbytes: int
    ) -> None:
        if offset < 0 or nbytes > lease.nbytes - offset:
            raise Wrong(
                "memory-range",
                f"a {verb} of {offset}+{nbytes} in memory of {lease.nbytes} bytes",
            )
        if not nbytes:
            return
        first = (lease.start + offset) // LINE_BYTES
        end = (lease.start + offset + nbytes - 1) // LINE_BYTES + 1
        if self._owner[first:end].count(lease.number) != end - first:
            now = sorted(set(self._owner[first:end]) - {lease.number})
            raise Wrong(
                "memory-reuse",
                f"a late {verb} of {offset}+{nbytes}: lease {lease.number} is over, "
                f"its lines belong to {now}",
            )
        if allowed.count(1, first, end) != end - first:
            raise Wrong(
                "memory-right", f"a {verb} of {offset}+{nbytes}, which is not allowed"
            )

    def _mark(
        self, lease: Lease, owner: int, *, readable: bool, writable: bool
    ) -> None:
        first = lease.start // LINE_BYTES
        end = first + lease.lines
        self._owner[first:end] = [owner] * lease.lines
        self._readable[first:end] = bytes([readable]) * lease.lines
        self._writable[first:end] = bytes([writable]) * lease.lines

    def _grow(self, lines: int) -> int:
        start = len(self._bytes)
        self._bytes += bytes(lines * LINE_BYTES)
        self._owner += [0] * lines
        self._readable += bytes(lines)
        self._writable += bytes(lines)
        return start
