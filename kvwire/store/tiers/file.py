"""A file of a tier: pieces of memory to and from it, one system call for many.

Every system call that moves bytes is a method of its own here, so that a test can make
any of them fail, or end the process in front of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

Views: TypeAlias = list[memoryview]

# What Linux takes in one call.
_VIEWS: Final = 1024


class File:
    """Reads and writes an open file, from any thread and without a loop."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.path = path
        self._fd = os.open(path, flags, 0o600)

    @property
    def nbytes(self) -> int:
        """Return how long it is."""
        return os.fstat(self._fd).st_size

    def read(self, into: Sequence[memoryview], offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on."""
        _move(self.preadv, into, offset)

    def write(self, source: Sequence[memoryview], offset: int) -> None:
        """Write memory to the bytes from ``offset`` on."""
        _move(self.pwritev, source, offset)

    def resize(self, nbytes: int) -> None:
        """Make it so long, with room on the disk for all of it."""
        have = self.nbytes
        if nbytes < have:
            os.ftruncate(self._fd, nbytes)
        elif nbytes > have:
            self.allocate(have, nbytes - have)

    def lock(self) -> bool:
        """Keep others from locking it until it is closed; False if somebody has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close it; nobody uses it any more."""
        os.close(self._fd)

    # --- the system calls -------------------------------------------------------------

    def preadv(self, views: Views, offset: int) -> int:
        """Read into memory; the number of bytes, 0 at the end of the file."""
        return os.preadv(self._fd, views, offset)

    def pwritev(self, views: Views, offset: int) -> int:
        """Write memory; the number of bytes."""
        return os.pwritev(self._fd, views, offset)

    def sync(self) -> None:
        """Return when what was written survives a power cut."""
        os.fsync(self._fd)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Have room on the disk for a part of the file, which is longer after that."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, offset, nbytes)
        else:
            os.ftruncate(self._fd, offset + nbytes)


def _move(
    call: Callable[[Views, int], int], views: Sequence[memoryview], offset: int
) -> None:
    """Call until all is moved; a call may move fewer bytes than it was given."""
    first, begun = 0, 0
    while first < len(views):
        some = list(views[first : first + _VIEWS])
        some[0] = some[0][begun:]
        moved = call(some, offset)
        if not moved:
            raise OSError(errno.EIO, "the file is shorter than it was")
        offset += moved
        begun += moved
        while first < len(views) and begun >= views[first].nbytes:
            begun -= views[first].nbytes
            first += 1
