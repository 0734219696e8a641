"""Memory for caches that other processes of this host can map.

An arena is a piece of anonymous memory with a descriptor (``memfd_create``). Arrays and
tensors in it are ordinary memory in this process. Another process that receives the
descriptor maps the same pages and copies from them at the speed of a memcpy. Reading
another process's memory is slower, and the kernel may forbid it.

The receiver of the descriptor can neither write to the arena nor change its size: the
arena is sealed as soon as it is mapped here (F_SEAL_FUTURE_WRITE: only this mapping
writes).

A process knows the addresses of its arenas, so a transport can find out whether a
payload lies in one.

https://man7.org/linux/man-pages/man2/memfd_create.2.html, "File sealing"
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import logging
import mmap
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError, refused_call
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.buffers import MID_PAGE_BYTES
from kvwire.memory.copy import address_of

# On x86-64, and on Arm with pages of 4 KiB.
HUGE_PAGE_BYTES: Final = 2 * MIB
# Missing in the `mmap` module: advice values of Linux 6.1 and 5.14, and two flags that
# every Linux has.
_MADV_COLLAPSE: Final = 25
_MADV_POPULATE_WRITE: Final = 23
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FAILED: Final = ctypes.c_size_t(-1).value
# Missing in the `fcntl` module of Python 3.11 and 3.12; since Linux 5.1.
_F_SEAL_FUTURE_WRITE: Final = 0x0010
# A cache line, which is also the alignment that the widest vector instructions need.
_ALIGNMENT: Final = 64


# A profile of seccomp refuses a call with the first, an older kernel or gVisor's with
# the second.
_REFUSED: Final = (errno.EPERM, errno.ENOSYS, errno.EACCES)
_REMEDY: Final = (
    "to share memory, allow memfd_create in the sandbox's profile (seccomp)"
)

logger: logging.Logger = logging.getLogger("kvwire")


class Arena:
    """Memory that other processes can map by its descriptor.

    >>> arena = Arena(1 << 30)
    >>> cache = arena.numpy((layers, blocks, 2, 16, 8, 128), np.float16)
    >>> tensor = torch.frombuffer(arena.buffer(1 << 20), dtype=torch.bfloat16)

    Keep a reference to it, and do not close it, as long as its memory is used.

    Args:
        nbytes: Its size, rounded up to whole pages. Pages cost memory once they are
            written to.
        name: Shown in ``/proc/<pid>/maps``.
        populate: Allocate all pages now, huge ones where the kernel can: this speeds up
            the first write to the arena, and every copy out of it.

    Attributes:
        nbytes: Its size.
        address: The address of its mapping.
        serial: Its number in this process, never used twice.
        mapped_bytes: The bytes of the memory behind its descriptor.
        watchers: Functions that are called once, on any thread, when it is closed or
            released.

    Raises:
        UsageError: The size is not positive, or this is not Linux.
        OSError: The kernel refuses: no memory, no descriptor, or a kernel before 5.1.
    """

    def __init__(
        self, nbytes: int, *, name: str = "kvwire", populate: bool = False
    ) -> None:
        if nbytes < 1:
            raise UsageError(f"arena: nbytes={nbytes}; at least 1 byte is needed")
        if sys.platform != "linux":
            raise UsageError("arena: only Linux can share memory by descriptor")
        self.nbytes: int = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.mapped_bytes: int = self.nbytes + mmap.PAGESIZE
        self.watchers: list[Callable[[], object]] = []
        # The bytes of the mapping that are in use.
        self._used = MID_PAGE_BYTES
        self._closed = False
        try:
            self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            if exc.errno in _REFUSED:
                raise refused_call(exc, "memfd_create", _REMEDY) from None
            raise
        try:
            os.ftruncate(self._fd, self.mapped_bytes)
            self._map = SharedMapping(self._fd, self.mapped_bytes, writable=True)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(self._fd)
            raise
        if populate:
            self.populate()
        self.address: int = self._map.address
        self.serial: int = next(_serials)
        _arenas[self.serial] = self

    def numpy(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        """Return an array of zeros in the arena, in C order.

        Raises:
            UsageError: The array does not fit any more, or the arena is closed.
        """
        kind = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        count = int(np.prod(shape, dtype=object))
        if kind.hasobject or count < 0:
            raise UsageError(
                f"arena: an array of shape {shape} and type {kind} cannot be shared"
            )
        if count == 0:
            return np.empty(shape, kind)
        return self.buffer(count * kind.itemsize).view(kind).reshape(shape)

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the next ``nbytes`` bytes, all zero, as writable memory.

        It has the buffer protocol: ``torch.frombuffer(arena.buffer(n), dtype=...)``.

        Raises:
            UsageError: The arena has fewer bytes left, or is closed.
        """
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self.closed:
            raise UsageError("arena: it is closed")
        used = begin - MID_PAGE_BYTES
        if nbytes < 1 or used + nbytes > self.nbytes:
            raise UsageError(
                f"arena: {nbytes} bytes do not fit: {used} of its {self.nbytes} bytes "
                "are used; make a larger arena"
            )
        self._used = begin + nbytes
        # The array references the mapping, which therefore cannot be unmapped while the
        # array lives.
        return self._map.array(begin, nbytes)

    def populate(self) -> None:
        """Allocate all pages now; call it before others write to the arena.

        It takes some tenths of a second per GiB, so call it on a thread.
        """
        self._map.populate()

    @property
    def closed(self) -> bool:
        """Return whether the arena was closed or released."""
        return self._closed

    def fileno(self) -> int:
        """Return the descriptor; any process that gets it may read the whole arena.

        Raises:
            UsageError: The arena is closed.
        """
        if self.closed:
            raise UsageError("arena: it is closed")
        return self._fd

    def holds(self, first: int, end: int) -> bool:
        """Return whether the addresses in ``range(first, end)`` are in it."""
        return self.address <= first and end <= self.address + self.mapped_bytes

    def close(self) -> None:
        """Unmap it here. Peers that have it mapped unmap it when they are notified.

        Raises:
            UsageError: Arrays, tensors or views of it are alive.
        """
        if self.closed:
            return
        try:
            self._map.close()
        except BufferError:
            raise UsageError(
                "arena: arrays or tensors in it are still referenced; drop them first"
            ) from None
        self._forget()

    def release(self) -> bool:
        """Close it; memory that is in use is freed with the last array or tensor in it.

        Returns:
            Whether all of the memory was freed at once.
        """
        with contextlib.suppress(UsageError):
            self.close()
        if self.closed:
            return True
        self._forget()
        return False

    def _forget(self) -> None:
        """Remove it from the list of open arenas, and close its descriptor."""
        self._closed = True
        del _arenas[self.serial]
        os.close(self._fd)
        for watcher in tuple(self.watchers):
            watcher()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The traceback of an exception may still reference arrays. That exception must
        # not be replaced by ours.
        if error:
            self.release()
        else:
            self.close()

    def __repr__(self) -> str:
        used = self._used - MID_PAGE_BYTES
        state = "closed" if self.closed else f"{used} used"
        return f"Arena({self.nbytes} bytes, {state})"


SEALS: Final = (
    (
        fcntl.F_SEAL_SHRINK  # accessing a page that was cut off would kill the reader
        | fcntl.F_SEAL_GROW
        | fcntl.F_SEAL_SEAL
        | _F_SEAL_FUTURE_WRITE
    )
    if sys.platform == "linux"
    else 0
)
"""A process with the arena's descriptor can rely on these seals for ever."""


def arena_of(fragments: Fragments) -> Arena | None:
    """Return the arena that contains all of these fragments, or None."""
    if not _arenas or not len(fragments):
        return None
    first = int(fragments.addresses.min())
    end = int((fragments.addresses + fragments.lengths).max())
    return arena_at(first, end)


def arena_at(first: int, end: int) -> Arena | None:
    """Return the arena with the addresses in ``range(first, end)``."""
    there = list(_arenas.values())
    return next((arena for arena in there if arena.holds(first, end)), None)


@functools.cache
def may_share() -> bool:
    """Return whether this process can make memory that other processes can map.

    If a sandbox refuses that, the reason is logged once; ordinary memory does instead,
    and peers of this host get copies.
    """
    if sys.platform != "linux":
        return False
    try:
        os.close(os.memfd_create("kvwire-trial", os.MFD_CLOEXEC))
    except OSError as exc:
        if exc.errno in _REFUSED:
            logger.warning(
                "memfd_create: %s; memory here is this process's own, and peers of "
                "this host get copies; %s",
                exc.strerror,
                _REMEDY,
            )
            return False
    return True  # whatever else is the matter, the caller gets that error


class SharedMapping:
    """A mapping of the memory behind a descriptor, aligned for huge pages.

    Huge pages need an address that is a multiple of their size, and the kernel gives a
    file's mapping such an address only by luck. So a larger range is reserved, and a
    part of it is mapped over.

    Attributes:
        address: The address of the mapping.
        nbytes: Its size.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.nbytes = nbytes
        # This reserves addresses only: an arena may be larger than the available
        # memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._reserved = mmap.mmap(
                -1, nbytes + HUGE_PAGE_BYTES, flags=flags, prot=access
            )
        except (OSError, OverflowError):
            # The kernel counts reserved addresses as memory (vm.overcommit_memory=2),
            # or a peer's file is larger than any mapping can be.
            self._reserved = mmap.mmap(fd, nbytes, prot=access)
            self._begin = 0
            self.address: int = address_of(self._reserved)
        else:
            self._begin = -address_of(self._reserved) % HUGE_PAGE_BYTES
            self.address = address_of(self._reserved) + self._begin
            self._map_over(fd, access)
        self._advise(mmap.MADV_HUGEPAGE)

    def array(self, begin: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a part of it as an array; ``close`` fails while the array lives."""
        return np.frombuffer(self._reserved, np.uint8, nbytes, self._begin + begin)

    def populate(self) -> None:
        """Allocate all pages, huge ones if possible; others follow on first use."""
        # The kernel merges small pages into a huge one only if one of them was written
        # to.
        first_bytes = self.array(0, self.nbytes)[::HUGE_PAGE_BYTES]
        first_bytes |= 0
        self._advise(_MADV_COLLAPSE)
        self._advise(_MADV_POPULATE_WRITE)

    @property
    def closed(self) -> bool:
        """Return whether it was unmapped."""
        return self._reserved.closed

    def close(self) -> None:
        """Unmap it.

        Raises:
            BufferError: Arrays of it are alive.
        """
        self._reserved.close()

    def _map_over(self, fd: int, access: int) -> None:
        """Map the memory behind a descriptor over the reserved range."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        where = _libc().mmap(self.address, self.nbytes, access, flags, fd, 0)
        if where == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap: {os.strerror(code)}")

    def _advise(self, advice: int) -> None:
        """Give the kernel an advice, which an older kernel ignores."""
        _libc().madvise(self.address, self.nbytes, advice)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    number = ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_long)
    libc.mmap.restype = size
    libc.madvise.argtypes = (ctypes.c_void_p, size, number)
    return libc


_arenas: Final[dict[int, Arena]] = {}
"""The open arenas of this process. They are few, so a linear search will do.

There is no lock: the garbage collector may release an arena in the middle of any call.
"""
_serials: Final = itertools.count(1)
