"""Copies many pieces of memory in one call, given as arrays of addresses and lengths.

A *piece* is contiguous on both sides. If kvwire was installed with a C compiler, a loop
in C copies them (``_copy.c``). Otherwise there are two ways, chosen by the measured
crossover between them:

* By NumPy: pieces of one length are items of an array that spans all the addresses; its
  type is a void of that length. NumPy copies each piece twice, which pays off only for
  small pieces; it copies once if the pieces are adjacent on one side. If all distances
  are multiples of the length, as for a cache's blocks, the array's items are adjacent;
  otherwise the items have a stride of one byte, so that an index is a byte offset. In
  the first case NumPy can copy into existing memory, in the second only into new
  memory.
* By one ``memmove`` per piece, called from a loop in C over the three arrays.

``process_vm_readv`` on our own process would look up every page on both sides.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import distinct
from kvwire.kv.fragments import Array
from kvwire.limits import KIB, MIB
from kvwire.memory.buffers import mid_page_memory
from kvwire.memory.compiled import CompiledFunction, compiled_function

Items = npt.NDArray[np.void]
"""Pieces of one length, as items of an array."""
Places = npt.NDArray[np.intp]

HELD_BYTES: Final = 4 * MIB
"""The most bytes copied without releasing the GIL: half a millisecond's worth.

A call that releases the GIL may then wait for another thread's switch interval, 5 ms.
"""
# From this mean length on, one call per piece is faster than gathering and scattering.
# In seconds of processor time per GiB, NumPy against memmove: 0.38 against 0.82 at 1
# KiB, 0.38 against 0.52 at 2, 0.34 against 0.33 at 4, 0.28 against 0.24 at 8.
_PIECE_BYTES: Final = 8 * KIB
# NumPy is called once per distinct length; with more lengths, this would amount to
# Python code per fragment.
_LENGTHS_MAX: Final = 64
# For fewer pieces, a loop takes less time than NumPy's preparations.
_FEW_PIECES: Final = 8
# The bytes gathered at once: few enough to be in the second-level cache when they are
# scattered.
_BATCH_BYTES: Final = 256 * KIB
compiled: CompiledFunction | None = compiled_function(
    "kvwire_copy", *(ctypes.c_void_p,) * 3, ctypes.c_size_t, ctypes.c_uint64
)


def copy_pieces(origin: Array, target: Array, lengths: Array, total: int) -> None:
    """Copy the piece at each address of ``origin`` to the same index of ``target``.

    Args:
        origin: The address of each piece.
        target: Its destination; destinations overlap neither each other nor ``origin``.
        lengths: The bytes of each piece.
        total: The sum of ``lengths``.

    Raises:
        ValueError: The columns do not belong together.
    """
    # Not an assert: the compiled loop reads as many numbers of each column.
    if not origin.nbytes == target.nbytes == lengths.nbytes == 8 * lengths.size:
        raise ValueError(
            f"{origin.nbytes} and {target.nbytes} bytes of addresses of "
            f"{lengths.size} pieces"
        )
    if compiled is not None:
        held, released = compiled
        move = held if total <= HELD_BYTES else released
        columns = (origin.tobytes(), target.tobytes(), lengths.tobytes())
        move(*columns, lengths.size, total)
        return
    # Plan all turns at once: planning each one separately would take as long as its
    # copy.
    starts = lengths.cumsum() - lengths
    turns = np.arange(HELD_BYTES, total, HELD_BYTES, dtype=np.uint64)
    ends = starts.searchsorted(turns)
    move_some = _copy_by_numpy if _numpy_is_faster(lengths) else _copy_one_by_one
    for first, end in itertools.pairwise((0, *distinct(ends).tolist(), starts.size)):
        part = slice(first, end)
        if first:
            time.sleep(0)  # let another thread run
        if end > first:
            move_some(origin[part], target[part], lengths[part])


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
    """Copy the pieces of each length together."""
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
    """Copy items of one array into another, all or at given indices."""
    length = source.itemsize
    count = (source if read is None else read).size
    batch = max(1, _BATCH_BYTES // length)
    if read is None or (written is None and source.flags.c_contiguous):
        batch = count  # one copy suffices, so no batches are needed
    for i in range(0, count, batch):
        part = slice(i, i + batch)
        if written is None and read is not None:
            _take(source, read[part], destination[part])
            continue
        items = source[part] if read is None else _taken(source, read[part], length)
        destination[part if written is None else written[part]] = items


def _items(addresses: Array, length: int) -> tuple[Items, Places | None]:
    """Return an array with the pieces as items, and their indices (None for all).

    The array may span memory that is not ours or not even mapped: only indexed items
    are touched.
    """
    # Methods of arrays run a Python function first; ufuncs do not.
    first = np.minimum.reduce(addresses)
    stride = length
    places = None
    count = addresses.size
    if addresses.item(-1) - addresses.item(0) != (
        count - 1
    ) * length or np.logical_or.reduce(addresses[1:] - addresses[:-1] != length):
        distances = addresses - first
        places, beside = np.divmod(distances, np.uint64(length))
        if np.logical_or.reduce(beside):
            places = distances
            stride = 1
        count = int(np.maximum.reduce(places)) + 1
    items = np.asarray(_ArrayView(int(first), count, length, stride))
    return items, None if places is None else places.view(np.intp)


def _taken(source: Items, places: Places, length: int) -> Items:
    """Return pieces as contiguous bytes, valid until this thread's next batch.

    New memory for each batch would be faulted in page by page, which takes longer than
    the copy, because malloc returns the end of its heap to the kernel at once.
    """
    nbytes = places.size * length
    if nbytes > _BATCH_BYTES:
        return source[places]  # there is a single piece
    items = _batch.memory[:nbytes].view(source.dtype)
    _take(source, places, items)
    return items


def _take(source: Items, places: Places, items: Items) -> None:
    """Copy pieces contiguously into ``items``."""
    if source.flags.c_contiguous:
        # In any other mode NumPy copies into temporary memory first.
        source.take(places, out=items, mode="clip")
    else:
        items[:] = source[places]


class _Batch(threading.local):
    """Each thread's memory for pieces between gathering and scattering."""

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = mid_page_memory(_BATCH_BYTES)


_batch: Final = _Batch()


class _ArrayView:
    """Memory at an address, as an array for NumPy's ``__array_interface__``.

    An array type of ctypes would also work, but creating one for each length takes
    longer than gathering a chunk.
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
    """Return ``memmove`` as a function that keeps the GIL."""
    function = ctypes.PyDLL(None).memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function
