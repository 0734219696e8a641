"""Copies one payload into another in this process, with no bytecode for each fragment.

Both sides are cut at every border that either has, which gives *pieces*: contiguous on
both. Two ways to move them, chosen by the measured knee between them:

* by NumPy: all pieces of one length are items of an array of a void type of that
  length, laid over the whole span of addresses. Where one side has its pieces side by
  side, as a view and the images of a store do, one call moves all of them without the
  GIL, faster than a call for each at any length. Where both are scattered NumPy copies
  twice, and that pays for small ones only. Where distances are multiples of the
  length, as those of a cache's blocks are, item follows item; elsewhere items have a
  stride of one byte, so that an index is a byte offset. NumPy takes the former into
  memory that is there, the latter into new one;
* by one ``memmove`` each, called from a loop of C's over the three columns.
  ``process_vm_readv`` of our own process would look up every page of both.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.kv.blocks import distinct
from kvwire.kv.fragments import Array, Fragments
from kvwire.limits import KIB, MIB
from kvwire.memory.buffers import Payload

Items = npt.NDArray[np.void]
"""Pieces of one length, each an item of so many bytes."""
Places = npt.NDArray[np.intp]

# From this mean length on, a call for each piece is faster than gathering and
# scattering all of them; seconds of processor time for a GiB: 0.82 against 0.39 at
# 1 KiB, 0.52 against 0.38 at 2, 0.33 against 0.34 at 4, 0.24 against 0.28 at 8.
# Side by side on one side, NumPy has 6.3 GB/s for 3.0 at 4 KiB, 9.7 for 7.5 at 32.
_PIECE_BYTES: Final = 8 * KIB
# A call that lets go of the GIL may wait for the switch interval of another thread,
# 5 ms, until it has it again. Shorter pieces are copied before anybody would miss it.
_RELEASE_GIL_BYTES: Final = 256 * KIB
# NumPy is called once for each length of piece; beyond this that is work per fragment.
_LENGTHS_MAX: Final = 64
# Half a millisecond, within which nobody misses the GIL; to sleep for no time, so that
# another thread gets it, takes a tenth.
_TURN_BYTES: Final = 4 * MIB
# NumPy lets go of the GIL to assign more items than this; of no fewer bytes, since an
# item takes 0.2 us.
_HELD_ITEMS: Final = 500
_SPLIT_BYTES: Final = 4 * KIB
# Runs of fewer pieces side by side are not worth a call of NumPy's.
_RUN_PIECES: Final = 16
# Below this a loop is shorter than what NumPy does before it begins.
_FEW_PIECES: Final = 8
# Gathered at once; small enough to be still in the second-level cache when scattered.
_BATCH_BYTES: Final = 256 * KIB
MID_PAGE_BYTES: Final = 2 * KIB
"""Where memory of our own begins within a page.

``rep movsb``, by which the C library and the kernel copy, falls to a third of its rate
on AMD's processors where the destination begins 1 to 31 bytes further into a page than
the source (glibc bug 30994). NumPy's memory begins 16 bytes into a page, torch's 64, a
mapping 0: from the middle of a page, and into it, no copy meets that.
"""
_PAGE_BYTES: Final = 4 * KIB


def copy(
    source: Payload, destination: Payload, turn: Callable[[], object] | None = None
) -> None:
    """Copy ``source`` into ``destination``, which must not overlap it.

    Args:
        source: What is copied.
        destination: Where it goes; of the same length.
        turn: Called now and then where the copy keeps the GIL, to let other threads
            have it. Without one, the copy is that of a loop, which keeps it if it can.

    Raises:
        UsageError: They differ in length, or the destination is read-only.
    """
    if source.nbytes != destination.nbytes:
        raise UsageError(
            f"copy: {source.nbytes} bytes into a destination of {destination.nbytes}"
        )
    if isinstance(destination, Fragments):
        read_only = not destination.writable
    else:
        read_only = destination.readonly
    if read_only:
        raise UsageError("copy: the destination is read-only memory")
    if source.nbytes == 0:
        return
    if isinstance(source, memoryview) and isinstance(destination, memoryview):
        destination[:] = source
        return
    if turn is not None or not _copy_alike(source, destination):
        _copy_pieces(source, destination, turn)


def gathered(addresses: Array, length: int) -> Iterator[Items]:
    """Copies of the pieces of ``length`` bytes at these addresses, batch by batch.

    Each batch is contiguous, small enough to be still in the second-level cache when it
    is used, and gone when the next one is asked for, or anything is copied.
    """
    source, places = _items(addresses, length)
    batch = max(1, _BATCH_BYTES // length)
    for i in range(0, addresses.size, batch):
        part = slice(i, i + batch)
        yield source[part] if places is None else _taken(source, places[part], length)


def mid_page_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory that begins in the middle of a page; not cleared."""
    memory = np.empty(nbytes + _PAGE_BYTES, np.uint8)
    begin = (MID_PAGE_BYTES - int(memory.ctypes.data)) % _PAGE_BYTES
    return memory[begin : begin + nbytes]


def as_fragments(payload: Payload) -> Fragments:
    """Return the payload as fragments; a view becomes a list of one."""
    if isinstance(payload, Fragments):
        return payload
    places = [address_of(payload)] if payload.nbytes else []
    starts = np.array([0, payload.nbytes][: len(places) + 1], np.uint64)
    return Fragments(
        np.array(places, np.uint64),
        starts[1:],
        owner=payload,
        writable=not payload.readonly,
        starts=starts,
    )


def address_of(buffer: bytes | bytearray | memoryview | mmap.mmap) -> int:
    """Return where the bytes of a non-empty buffer lie; the caller keeps it alive."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def paired(source: Payload, destination: Payload) -> tuple[Array, Array, Array]:
    """Cut both where either is cut: the addresses of both, and the lengths.

    At least one of them is fragments.
    """
    borders = _borders(source, destination)
    starts, lengths = borders[:-1], borders[1:] - borders[:-1]
    return _places(source, starts), _places(destination, starts), lengths


def _copy_pieces(
    source: Payload, destination: Payload, turn: Callable[[], object] | None
) -> None:
    origin, target, lengths = paired(source, destination)
    if _numpy_is_faster(lengths, _RELEASE_GIL_BYTES):
        runs = min(_runs(origin, lengths), _runs(target, lengths), key=len)
        if len(runs) * _RUN_PIECES <= lengths.size or len(runs) == 2:
            for part in itertools.starmap(slice, itertools.pairwise(runs)):
                pieces = origin[part], target[part], lengths[part]
                _copy_by_numpy(*(pieces if turn is None else _split(*pieces)))
            return
    move = _copy_one_by_one
    if _numpy_is_faster(lengths, _PIECE_BYTES):
        move = _copy_by_numpy
    if turn is None:
        move(origin, target, lengths)
        return
    # Planned once for all of it: for each turn that would take as long as the copy.
    starts = lengths.cumsum() - lengths
    ends = starts.searchsorted(
        np.arange(_TURN_BYTES, source.nbytes, _TURN_BYTES, dtype=np.uint64)
    )
    first = 0
    for end in (*distinct(ends).tolist(), starts.size):
        part = slice(first, end)
        if end > first:
            move(origin[part], target[part], lengths[part])
            turn()
        first = end


def _copy_alike(source: Payload, destination: Payload) -> bool:
    """Copy between memory side by side and pieces that are known to be alike.

    False if it is another case, or a loop is faster.
    """
    pieces, side_by_side = source, destination
    if isinstance(source, memoryview):
        pieces, side_by_side = destination, source
    if not isinstance(pieces, Fragments) or not isinstance(side_by_side, memoryview):
        return False
    length = pieces.piece_bytes
    if not 0 < length < _RELEASE_GIL_BYTES or pieces.lengths.size <= _FEW_PIECES:
        return False
    items, places = _items(pieces.addresses, length)
    line = np.frombuffer(side_by_side, items.dtype)
    if pieces is source:
        _move_items(items, places, line, None)
    else:
        _move_items(line, None, items, places)
    return True


def _runs(addresses: Array, lengths: Array) -> list[int]:
    """Return where pieces begin that do not lie behind the one before, and the end."""
    apart = addresses[1:] != addresses[:-1] + lengths[:-1]
    return [0, *(apart.nonzero()[0] + 1).tolist(), lengths.size]


def _split(origin: Array, target: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Cut pieces of one length, so that NumPy lets go of the GIL to move them."""
    length = int(lengths[0])
    parts = 1
    while lengths.size * parts <= _HELD_ITEMS and length % (2 * parts) == 0:
        if length < 2 * parts * _SPLIT_BYTES:
            break
        parts *= 2
    if parts == 1 or np.logical_or.reduce(lengths != length):
        return origin, target, lengths
    steps = np.arange(0, length, length // parts, dtype=np.uint64)
    sizes = np.empty(lengths.size * parts, np.uint64)
    sizes.fill(length // parts)
    return (
        np.add.outer(origin, steps).ravel(),
        np.add.outer(target, steps).ravel(),
        sizes,
    )


def _borders(source: Payload, destination: Payload) -> Array:
    """Return where a piece of either side begins, and the total."""
    if isinstance(source, memoryview):
        assert isinstance(destination, Fragments), "two views need no pieces"
        return destination.starts
    if isinstance(destination, memoryview):
        return source.starts
    if np.array_equal(source.starts, destination.starts):
        return source.starts
    return distinct(np.concatenate((source.starts, destination.starts)))


def _places(payload: Payload, offsets: Array) -> Array:
    """Return where the bytes at these offsets of a payload lie in memory."""
    if isinstance(payload, memoryview):
        return offsets + np.uint64(address_of(payload))
    if offsets.size == payload.addresses.size:
        return payload.addresses  # no border of the other side is within a fragment
    index = np.searchsorted(payload.starts, offsets, "right") - 1
    return payload.addresses[index] + (offsets - payload.starts[index])


def _numpy_is_faster(lengths: Array, knee_bytes: int) -> bool:
    if lengths.size <= _FEW_PIECES:
        return False
    if int(np.add.reduce(lengths)) >= knee_bytes * lengths.size:
        return False
    return bool(
        np.minimum.reduce(lengths) == np.maximum.reduce(lengths)
        or distinct(lengths).size <= _LENGTHS_MAX
    )


def _copy_one_by_one(origin: Array, target: Array, lengths: Array) -> None:
    """Copy one piece after another."""
    released = int(np.maximum.reduce(lengths)) >= _RELEASE_GIL_BYTES
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
