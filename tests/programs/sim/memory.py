"""Memory of a simulated process that says who may touch it, and until when.

A link names its memory once, when a frame is posted, and touches it later, when the
frame is delivered: as a NIC does. So memory that was given back too early is over when
the late access comes, and the access fails the seed. What is over is overwritten as
well: its owner reads poison, never by luck the right bytes.

Content is that of :mod:`kvwire_certify.oracle`: each number is a life. So bytes that
are shifted, mixed, stale or of another request compare unequal.
"""

from __future__ import annotations

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

POISON: Final = b"\xdb"


class Lease:
    """A piece of memory, which links may read or write as said until it is over."""

    __slots__ = ("_bytes", "_readable", "_whole", "_writable", "nbytes", "over")

    def __init__(
        self, nbytes: int, *, readable: bool = False, writable: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.over = False
        self._bytes = memoryview(bytearray(nbytes))
        self._readable = readable
        self._writable = writable
        self._whole = self

    def part(self, begin: int, nbytes: int) -> Lease:
        """A part of it, which is over with the whole."""
        part = Lease(nbytes, readable=self._readable, writable=self._writable)
        part._bytes = self._bytes[begin : begin + nbytes]
        part._whole = self
        return part

    def free(self) -> None:
        """From now on no link may touch it."""
        assert not self.over, "memory is given back twice"
        self.over = True
        self._bytes[:] = POISON * self.nbytes

    def load(self, offset: int, nbytes: int) -> bytes:
        """Read as the owner of the memory."""
        return bytes(self._bytes[offset : offset + nbytes])

    def store(self, offset: int, data: bytes) -> None:
        """Write as the owner of the memory."""
        self._bytes[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read as a link."""
        self._check("read", offset, nbytes, allowed=self._readable)
        return self.load(offset, nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """Write as a link."""
        self._check("write", offset, len(data), allowed=self._writable)
        self.store(offset, data)

    def _check(self, verb: str, offset: int, nbytes: int, *, allowed: bool) -> None:
        what = f"a {verb} of {offset}+{nbytes}"
        inside = offset >= 0 and nbytes <= self.nbytes - offset
        demand(inside, "memory-range", f"{what} in memory of {self.nbytes} bytes")
        if nbytes:
            demand(not self._whole.over, "memory-reuse", f"{what}, which is too late")
            demand(allowed, "memory-right", f"{what}, which is not allowed")
