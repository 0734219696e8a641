"""Memory that an agent has registered: whole long-lived arrays, and slots.

Registering memory with a network card takes as long as copying it. So arrays that
contain payloads, such as the layers of a cache, are registered whole and once. They
stay registered until they are freed, which a weak reference reports *before* the memory
is gone.

NIXL cannot revoke a description that a peer has. After a described array was freed,
another array may be allocated in its place: that one is not registered, and its
payloads go through a slot. So do small pieces, each of which would cost NIXL time, and
objects without weak references, such as ``bytearray``.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.backend import Payload
from kvwire.errors import KVWireError
from kvwire.kv.fragments import Fragments
from kvwire.kv.tensors import tensor_view
from kvwire.limits import KIB, SPAN_PIECES_MAX
from kvwire.memory.copy import as_fragments
from kvwire_nixl.library import NixlAgent

# If pieces are shorter than this on average, they are gathered: NIXL takes about 5 us
# for each descriptor of a list, and a copy moves this much in 5 us.
PIECE_BYTES_MIN: Final = 32 * KIB
# The most arrays registered over one lane's life: enough for 128 layers with separate
# keys and values, in four groups.
RANGES_MAX: Final = 1024

_SLOT_BYTES_MIN: Final = 64 * KIB


class NixlRange:
    """A range of memory that the agent has registered."""

    __slots__ = ("address", "is_announced", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address: int = address
        self.nbytes: int = nbytes
        self.is_announced: bool = False
        self.owner: weakref.ref[object] | None = None


class Ranges:
    """The arrays that an agent has registered."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        # An array may be freed on any thread at any moment, also while this thread has
        # the lock.
        self._lock = threading.RLock()
        # Disjoint ranges, by address; freed ones that the peer knows stay in the list.
        self._ranges: list[NixlRange] = []
        self._starts: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._ends: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def covering(self, payload: Payload) -> list[NixlRange]:
        """Return the ranges that contain a payload, registering arrays if necessary.

        The list is empty if the payload has to go through a slot.
        """
        pieces = as_fragments(payload)
        count = len(pieces)
        too_small = pieces.nbytes < count * PIECE_BYTES_MIN
        if not count or count > SPAN_PIECES_MAX or too_small or pieces.device:
            return []
        with self._lock:
            found = self._find(pieces)
            if not found:
                added = [self._add(each) for each in _owners(payload)]
                found = self._find(pieces) if any(added) else []
            return found

    def _find(self, pieces: Fragments) -> list[NixlRange]:
        if not self._ranges:
            return []
        addresses = pieces.addresses
        at = self._starts.searchsorted(addresses, "right").astype(np.int64) - 1
        if (at < 0).any() or (addresses + pieces.lengths > self._ends[at]).any():
            return []
        found = [self._ranges[i] for i in np.unique(at).tolist()]
        dead = any(range_.owner is None or range_.owner() is None for range_ in found)
        return [] if dead else found

    def _add(self, owner: object) -> bool:
        """Register an array, unless its range overlaps a registered or freed one."""
        extent = _extent(owner)
        if extent is None or len(self._ranges) >= RANGES_MAX:
            return False
        low, high = extent
        at = int(self._starts.searchsorted(np.uint64(high), "left"))
        if at and int(self._ends[at - 1]) > low:
            return False
        range_ = NixlRange(low, high - low)
        try:
            range_.owner = weakref.ref(owner, lambda _: self._freed(range_))
            self._agent.register(range_.address, range_.nbytes)
        except (TypeError, KVWireError):
            return False
        self._ranges.insert(at, range_)  # bounded: RANGES_MAX
        self._index()
        return True

    def _freed(self, range_: NixlRange) -> None:
        with self._lock:
            self._agent.deregister(range_.address, range_.nbytes)
            if not range_.is_announced and range_ in self._ranges:
                self._ranges.remove(range_)
                self._index()

    def _index(self) -> None:
        self._starts = np.array([r.address for r in self._ranges], np.uint64)
        self._ends = np.array([r.address + r.nbytes for r in self._ranges], np.uint64)


class NixlSlot:
    """Memory that the lane owns, for one payload at a time."""

    __slots__ = ("memory", "range")

    def __init__(self, nbytes: int) -> None:
        self.memory: memoryview = memoryview(mmap.mmap(-1, nbytes))
        address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.range: NixlRange = NixlRange(address, nbytes)


class NixlSlots:
    """Hands out registered slots, and keeps returned ones for reuse."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._free: dict[int, list[NixlSlot]] = {}

    def take(self, nbytes: int) -> NixlSlot:
        """Return a slot of at least this number of bytes."""
        size = max(_SLOT_BYTES_MIN, 1 << (nbytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            return free.pop()
        slot = NixlSlot(size)
        self._agent.register(slot.range.address, size)
        return slot

    def give_back(self, slot: NixlSlot) -> None:
        """Take back a slot that nothing reads or writes any more."""
        free = self._free.setdefault(slot.range.nbytes, [])
        free.append(slot)  # bounded: LANE_PAYLOADS_MAX


def _owners(payload: Payload) -> Iterable[object]:
    owner = payload.owner if isinstance(payload, Fragments) else payload
    for each in owner if isinstance(owner, (tuple, list)) else (owner,):
        array = each.obj if isinstance(each, memoryview) else each
        while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
            array = array.base
        yield array


def _extent(owner: object) -> tuple[int, int] | None:
    """Return the first and the end address of an array in host memory, else None."""
    try:
        view = tensor_view(owner, "owner")
    except KVWireError:
        return None
    if view.device is not None or min(view.shape, default=1) < 1:
        return None
    steps = [
        (n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)
    ]
    low = view.address + sum(step for step in steps if step < 0)
    high = view.address + sum(step for step in steps if step > 0) + view.item_bytes
    return low, high
