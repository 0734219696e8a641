"""A file of a tier: fragments of memory to and from it, one system call for many.

Every system call that moves bytes is a method of its own here, so that a test can make
any of them fail, or end the process in front of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.fragments import Fragments
from kvwire.memory.iovec import Iovecs

# What Linux moves in one call: 2 GiB less a page.
_CALL_BYTES: Final = 0x7FFF_F000


class File:
    """An open file, for threads: no call is bound to a loop.

    Args:
        path: Where it is.
        create: Whether it is made anew.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        self.path = path
        self._fd = os.open(path, flags, 0o600)

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return os.fstat(self._fd).st_size

    def read(self, into: Fragments, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on.

        Raises:
            OSError: The system call fails, or the file ends before.
        """
        self._move(self.preadv, into, offset)

    def write(self, source: Fragments, offset: int) -> None:
        """Write memory to the bytes from ``offset`` on.

        Raises:
            OSError: The system call fails.
        """
        self._move(self.pwritev, source, offset)

    def resize(self, nbytes: int) -> None:
        """Make it so long, with room on the disk for all of it.

        Raises:
            OSError: There is no room, or the system call fails.
        """
        have = self.nbytes
        if nbytes < have:
            os.ftruncate(self._fd, nbytes)
        elif nbytes > have:
            self.allocate(have, nbytes - have)

    def close(self) -> None:
        """Close it; nobody uses it any more."""
        os.close(self._fd)

    # --- the system calls -------------------------------------------------------------

    def preadv(self, window: tuple[int, int], offset: int) -> int:
        """Read into iovecs; the number of bytes, 0 at the end of the file."""
        return _moved(_PREADV(self._fd, window[0], window[1], offset))

    def pwritev(self, window: tuple[int, int], offset: int) -> int:
        """Write iovecs; the number of bytes."""
        return _moved(_PWRITEV(self._fd, window[0], window[1], offset))

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
        self,
        call: Callable[[tuple[int, int], int], int],
        fragments: Fragments,
        offset: int,
    ) -> None:
        """Call until all is moved; a call may move fewer bytes than it was given."""
        left = Iovecs(fragments)
        end = offset + fragments.nbytes
        while left.rest:
            try:
                moved = call(left.window(_CALL_BYTES), end - left.rest)
            except InterruptedError:
                continue
            if not moved:
                raise OSError(errno.EIO, "the file is shorter than it was")
            left.rest -= moved


def fragments_of(array: npt.NDArray[Any]) -> Fragments:
    """A contiguous array as one fragment."""
    return Fragments(
        np.array([array.ctypes.data], np.uint64),
        np.array([array.nbytes], np.uint64),
        owner=array,
        writable=array.flags.writeable,
    )


def _moved(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _function(name: str) -> Callable[[int, int, int, int], int]:
    """A system call of libc that lets go of the GIL."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    found: Callable[[int, int, int, int], int] = function
    return found


_PREADV: Final = _function("preadv")
_PWRITEV: Final = _function("pwritev")
