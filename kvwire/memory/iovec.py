"""Lists of fragments in the form that the system calls ``readv`` and ``writev`` take.

A list may be longer than one system call accepts, and a call may move fewer bytes than
it was given. So the list itself never changes: :class:`Iovecs` counts the remaining
bytes, and for each call NumPy lays out a *window*, a table of the next iovecs. A
window's first row begins after the bytes that earlier calls moved, and its last row
ends at the byte limit. A window costs the same few NumPy calls for one fragment as for
1,000.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final, NoReturn, final

import numpy as np

from kvwire.kv.fragments import Fragments, Payload
from kvwire.memory.copy import address_of, copy

# Linux and macOS accept 1,024, and refuse more with EINVAL.
IOVECS_MAX: Final = 1024


@final
class Iovecs:
    """A list of fragments, with the number of bytes that have not been moved yet.

    Args:
        fragments: The list, at least 1 byte long; this object keeps it alive.
        head: Bytes to move before the list.

    Attributes:
        rest: The bytes not moved yet, including the head. The caller subtracts the
            bytes that it has moved.
        asked: The bytes of the last request: the last window with its tail, or a number
            set by a caller that used no window.
    """

    __slots__ = (
        "_fragments",
        "_head",
        "_head_end",
        "_table",
        "_table_address",
        "asked",
        "rest",
    )

    def __init__(self, fragments: Fragments, head: bytes = b"") -> None:
        self._fragments = fragments
        self._head = head
        self._head_end = address_of(head) + len(head) if head else 0
        # A window has rows for the fragments, the head and the tail.
        rows = min(fragments.addresses.size + 2, IOVECS_MAX)
        self._table = np.empty((rows, 2), np.uint64)
        # The same as `ctypes.data`, without its three Python calls.
        self._table_address: int = self._table.__array_interface__["data"][0]
        self.rest: int = len(head) + fragments.nbytes
        self.asked: int = 0

    def __len__(self) -> int:
        """Return the number of bytes not moved yet, as ``len`` of a view does."""
        return self.rest

    def window(
        self, bytes_max: int, tail: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Lay out the next iovecs, at most ``IOVECS_MAX``.

        Args:
            bytes_max: The most bytes of fragments to include, at least 1.
            tail: Address and length of memory to append; included only if the window
                reaches the list's end.

        Returns:
            The table's address and its number of rows, valid until the next call.
        """
        fragments = self._fragments
        table = self._table
        begin = fragments.nbytes - self.rest
        row = 0
        # Before: the last `rest` bytes of head and list have not been moved; a negative
        # `begin` is inside the head.
        if begin < 0:
            table[0] = self._head_end + begin, -begin
            begin = 0
            row = 1
        end = min(begin + bytes_max, fragments.nbytes)
        starts = fragments.starts
        stop = fragments.addresses.size
        # Here the window covers the list's bytes from begin to end, which start in
        # fragment `first` and end in fragment `stop - 1`.
        first = int(starts.searchsorted(np.uint64(begin), "right")) - 1 if begin else 0
        if end < fragments.nbytes:
            stop = int(starts.searchsorted(np.uint64(end), "left"))
        if stop - first > len(table) - 2:
            stop = first + len(table) - 2
            end = int(starts[stop])
        last = row + stop - first
        table[row:last, 0] = fragments.addresses[first:stop]
        table[row:last, 1] = fragments.lengths[first:stop]
        # The rows are whole fragments. Cut the last row at the window's end, then the
        # first at its beginning; they may be the same row.
        if end < fragments.nbytes:
            table[last - 1, 1] -= starts[stop] - np.uint64(end)
        if begin:
            skipped = np.uint64(begin) - starts[first]
            table[row, 0] += skipped
            table[row, 1] -= skipped
        self.asked = self.rest - (fragments.nbytes - end)
        if tail is not None and end == fragments.nbytes:
            table[last] = tail
            last += 1
            self.asked += tail[1]
        return self._table_address, last

    def fill(self, source: memoryview) -> None:
        """Copy ``source`` to the next bytes, and count them; only without a head."""
        self.scatter(source)
        self.rest -= len(source)

    def scatter(self, source: memoryview) -> None:
        """Copy ``source`` to the next bytes, without counting them as moved."""
        fragments = self._fragments
        copy(source, fragments.slice(fragments.nbytes - self.rest, len(source)))

    def gather(self, target: memoryview) -> int:
        """Copy the next bytes, including the head, into ``target`` until it is full.

        Returns:
            The number of bytes copied, which still count as not moved.
        """
        fragments = self._fragments
        begin = fragments.nbytes - self.rest
        filled = 0
        if begin < 0:
            head = self._head[begin:][: len(target)]
            filled = len(head)
            target[:filled] = head
            begin = 0
        count = min(len(target) - filled, fragments.nbytes - begin)
        copy(fragments.slice(begin, count), target[filled : filled + count])
        return filled + count

    def tobytes(self) -> bytes:
        """Return a copy of the bytes not moved yet."""
        rest = bytearray(self.rest)
        self.gather(memoryview(rest))
        return bytes(rest)


def readv(fd: int, window: tuple[int, int]) -> int:
    """Read from ``fd`` into a window without holding the GIL; 0 at the end of file.

    Raises:
        OSError: The system call failed; BlockingIOError if nothing is there to read.
    """
    moved: int = _LIBC.readv(fd, window[0], window[1])
    return moved if moved >= 0 else _failed()


def writev(fd: int, window: tuple[int, int]) -> int:
    """Write a window to ``fd`` without holding the GIL; return the bytes written.

    Raises:
        OSError: The system call failed; BlockingIOError if nothing can be written.
    """
    moved: int = _LIBC.writev(fd, window[0], window[1])
    return moved if moved >= 0 else _failed()


def simplest(payload: Payload) -> Payload:
    """Return the same bytes, as a view if they are one fragment of host memory.

    Calls with a view are faster than calls with a window: 5 GB/s instead of 4.2 with
    chunks of 1 MiB.
    """
    if isinstance(payload, memoryview) or payload.addresses.size != 1:
        return payload
    if payload.device is not None:
        return payload
    array = (ctypes.c_char * payload.nbytes).from_address(payload.addresses.item())
    array.owner = payload.owner  # type: ignore[attr-defined]  # keeps it alive
    view = memoryview(array).cast("B")
    return view if payload.writable else view.toreadonly()


def _failed() -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for function in (libc.readv, libc.writev):
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    return libc


_LIBC: Final = _libc()
