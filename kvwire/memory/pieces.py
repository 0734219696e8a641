"""Copies pieces of memory: columns of addresses and lengths, all in one call.

A *piece* is contiguous on both sides. Where kvwire was installed with a C compiler, a
loop of C's copies them (``_copy.c``). Without it there are two ways, chosen by the
measured knee between them:

* by NumPy: all pieces of one length are items of an array of a void type of that
  length, laid over the whole span of addresses. NumPy copies twice, which pays for
  small ones only; once where one side has them side by side. Where distances are
  multiples of the length, as those of a cache's blocks are, item follows item;
  elsewhere items have a stride of one byte, so that an index is a byte offset. NumPy
  takes the former into memory that is there, the latter into new one;
* by one ``memmove`` each, called from a loop of C's over the three columns.

``process_vm_readv`` of our own process would look up every page of both.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import distinct
from kvwire.kv.fragments import Array, Fragments
from kvwire.limits import KIB, MIB
from kvwire.memory.buffers import mid_page_memory

Items = npt.NDArray[np.void]
"""Pieces of one length, each an item of so many bytes."""
Places = npt.NDArray[np.intp]
_Loops = tuple[Callable[..., None], Callable[..., None]]

HELD_BYTES: Final = 4 * MIB
"""Copied without letting go of the GIL: half a millisecond, for which nobody misses it.

A call that lets go of it may wait for the switch interval of another thread, 5 ms.
"""
# From this mean length on, a call for each piece is faster than gathering and
# scattering all of them; seconds of processor time for a GiB: 0.82 against 0.39 at
# 1 KiB, 0.52 against 0.38 at 2, 0.33 against 0.34 at 4, 0.24 against 0.28 at 8.
_PIECE_BYTES: Final = 8 * KIB
# Side by side on one side, NumPy has 6.3 GB/s for 3.0 at 4 KiB, 9.7 for 7.5 at 32.
_LINE_PIECE_BYTES: Final = 256 * KIB
# NumPy is called once for each length of piece; beyond this that is work per fragment.
_LENGTHS_MAX: Final = 64
# Below this a loop is shorter than what NumPy does before it begins.
_FEW_PIECES: Final = 8
# Gathered at once; small enough to be still in the second-level cache when scattered.
_BATCH_BYTES: Final = 256 * KIB


def copy_pieces(origin: Array, target: Array, lengths: Array, total: int) -> None:
    """Copy the piece at each address of ``origin`` to that in ``target``.

    Args:
        origin: Where each piece begins.
        target: Where each goes; they overlap neither each other nor ``origin``.
        lengths: The bytes of each.
        total: The sum of ``lengths``.
    """
    if compiled is not None:
        held, released = compiled
        columns = np.array((origin, target, lengths), np.uint64)
        first, step = columns.__array_interface__["data"][0], lengths.nbytes
        move = held if total <= HELD_BYTES else released
        move(first, first + step, first + 2 * step, lengths.size, total)
        return
    # Planned once for all turns: for each that would take as long as the copy.
    starts = lengths.cumsum() - lengths
    turns = np.arange(HELD_BYTES, total, HELD_BYTES, dtype=np.uint64)
    ends = starts.searchsorted(turns)
    move_some = _copy_by_numpy if _numpy_is_faster(lengths) else _copy_one_by_one
    for first, end in itertools.pairwise((0, *distinct(ends).tolist(), starts.size)):
        part = slice(first, end)
        if first:
            time.sleep(0)  # another thread has its turn
        if end > first:
            move_some(origin[part], target[part], lengths[part])


def copy_alike(pieces: Fragments, line: int, *, gather: bool) -> bool:
    """Copy pieces that are alike to an address, side by side, or from there, by NumPy.

    False, and nothing is copied, if it is another case or another way is faster.
    """
    length = pieces.piece_bytes
    few = pieces.lengths.size <= _FEW_PIECES
    if few or not 0 < length < _LINE_PIECE_BYTES:
        return False
    items, places = _items(pieces.addresses, length)
    beside = np.asarray(_ArrayView(line, pieces.lengths.size, length, length))
    if gather:
        _move_items(items, places, beside, None)
    else:
        _move_items(beside, None, items, places)
    return True


def _load(library: Path) -> _Loops | None:
    """Return the loop of C's, keeping the GIL and not; None where it is not there."""
    try:
        loaders = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
    except OSError:
        return None
    for loader in loaders:
        loader.kvwire_copy.argtypes = _COLUMNS
        loader.kvwire_copy.restype = None
    held, released = loaders
    return held.kvwire_copy, released.kvwire_copy


_COLUMNS: Final = (*(ctypes.c_void_p,) * 3, ctypes.c_size_t, ctypes.c_uint64)
compiled: _Loops | None = _load(Path(__file__).with_name("_copy.so"))


def _numpy_is_faster(lengths: Array) -> bool:
    if lengths.size <= _FEW_PIECES:
        return False
    if int(np.add.reduce(lengths)) >= _PIECE_BYTES * lengths.size:
        return False
    return distinct(lengths).size <= _LENGTHS_MAX


def _copy_one_by_one(origin: Array, target: Array, lengths: Array) -> None:
    """Copy one piece after another."""
    released = int(np.maximum.reduce(lengths)) >= HELD_BYTES
    calls = map(
        ctypes.memmove if released else _memmove_with_gil(),
        target.tolist(),
        origin.tolist(),
        lengths.tolist(),
    )
    deque(calls, maxlen=0)


def _copy_by_numpy(origin: Array, target: Array, lengths: Array) -> None:
    """Copy all pieces of one length together."""
    sizes = distinct(lengths).tolist()
    if len(sizes) == 1:
        _gather_and_scatter(origin, target, sizes[0])
        return
    for length in sizes:
        chosen = lengths == length
        _gather_and_scatter(origin[chosen], target[chosen], length)


def _gather_and_scatter(origin: Array, target: Array, length: int) -> None:
    """Copy pieces of one length from the addresses ``origin`` to ``target``."""
    source, read = _items(origin, length)
    destination, written = _items(target, length)
    _move_items(source, read, destination, written)


def _move_items(
    source: Items, read: Places | None, destination: Items, written: Places | None
) -> None:
    """Copy items of one array into another: those at certain places, or all."""
    length, count = source.itemsize, (source if read is None else read).size
    batch = max(1, _BATCH_BYTES // length)
    if read is None or (written is None and source.flags.c_contiguous):
        batch = count  # nothing is gathered before it is where it belongs
    for i in range(0, count, batch):
        part = slice(i, i + batch)
        if written is None and read is not None:
            _take(source, read[part], destination[part])
            continue
        items = source[part] if read is None else _taken(source, read[part], length)
        destination[part if written is None else written[part]] = items


def _items(addresses: Array, length: int) -> tuple[Items, Places | None]:
    """Return an array in which the pieces are items, and which; None for all.

    Its span may hold memory that is not ours, even not mapped: only what is indexed is
    touched.
    """
    # Methods of arrays go through a function in Python; a ufunc does not.
    first = np.minimum.reduce(addresses)
    stride, places = length, None
    count = addresses.size
    if addresses.item(-1) - addresses.item(0) != (
        count - 1
    ) * length or np.logical_or.reduce(addresses[1:] - addresses[:-1] != length):
        distances = addresses - first
        places, beside = np.divmod(distances, np.uint64(length))
        if np.logical_or.reduce(beside):
            places, stride = distances, 1
        count = int(np.maximum.reduce(places)) + 1
    items = np.asarray(_ArrayView(int(first), count, length, stride))
    return items, None if places is None else places.view(np.intp)


def _taken(source: Items, places: Places, length: int) -> Items:
    """Return a batch of pieces side by side, good until this thread takes another.

    New memory for each batch would be faulted in page by page, which takes longer than
    the copy: malloc gives what lies at the end of its heap back to the kernel at once.
    """
    nbytes = places.size * length
    if nbytes > _BATCH_BYTES:
        return source[places]  # one piece
    items = _batch.memory[:nbytes].view(source.dtype)
    _take(source, places, items)
    return items


def _take(source: Items, places: Places, items: Items) -> None:
    """Copy pieces side by side into ``items``."""
    if source.flags.c_contiguous:
        # In any other mode NumPy takes into memory of its own first.
        source.take(places, out=items, mode="clip")
    else:
        items[:] = source[places]


class _Batch(threading.local):
    """Holds a thread's memory for what is gathered before it is scattered."""

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = mid_page_memory(_BATCH_BYTES)


_batch: Final = _Batch()


class _ArrayView:
    """Shows memory as an array; NumPy asks for ``__array_interface__``.

    An array type of ctypes would do as well, but making one of each length takes longer
    than gathering a chunk.
    """

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, count: int, length: int, stride: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (count,),
            "strides": (stride,),
            "typestr": f"|V{length}",
        }


@functools.cache
def _memmove_with_gil() -> Callable[[int, int, int], object]:
    """``memmove`` as a function that does not let go of the GIL."""
    function = ctypes.PyDLL(None).memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function
