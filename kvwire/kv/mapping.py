"""One side's map: the memory address of each byte of the canonical walk.

An element's address is a base (by layer and component) plus one offset for each other
axis, so the addresses of a whole segment are a broadcast sum: one NumPy addition per
axis, however many fragments there are. Before the sum, the innermost axes are merged as
long as they are contiguous; afterwards, fragments that happen to be adjacent (because
of neighbouring block ids) are joined.

Layer-wise streaming requests the same granules in one layer after the other. From layer
to layer, all fragments move by the same distance, so the last result is kept and
shifted. If a layer is a single fragment, it is a slice of one view over all layers.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.canonical import Canonical
from kvwire.kv.fragments import Fragments, view_of
from kvwire.kv.paged import Addresses
from kvwire.kv.spec import KVSpec
from kvwire.types import Device

# Cached results for the ranges of layers of one template, as addresses in all of them.
# Beyond this number they are computed again.
KV_TEMPLATE_STEPS_MAX: Final = 4096


class GroupMemory(Protocol):
    """The memory of one cache group; see :class:`kvwire.kv.paged.CacheGroup`."""

    @property
    def spec(self) -> KVSpec:
        """The group's spec."""

    @property
    def bases(self) -> Addresses:
        """The address of block 0 of each layer and component."""

    @property
    def strides(self) -> dict[str, int]:
        """The bytes between steps along each of the other axes."""

    @property
    def owners(self) -> object:
        """The objects that keep the memory alive."""

    @property
    def writable(self) -> bool:
        """Whether the memory is writable."""

    @property
    def device(self) -> Device | None:
        """The device that holds it; None for host memory."""


class Steps:
    """The part of a group's address computation that is independent of block ids."""

    def __init__(self, walk: Canonical, memory: GroupMemory) -> None:
        self.walk: Canonical = walk
        self.memory: GroupMemory = memory
        self.first_layer: int = memory.spec.first_layer
        self.granules_per_block: int = memory.spec.block_tokens // walk.granule_tokens
        # Each layer's distance from the first layer, if it is the same for keys and
        # values.
        behind = memory.bases - memory.bases[0]
        even = bool((behind == behind[:, :1]).all())
        self.distances: list[int] | None = behind[:, 0].tolist() if even else None
        self.granule_bytes: int = walk.granule_bytes
        self._known: dict[range, tuple[Ids, int, tuple[int, ...]]] = {}
        # The addresses in all of them.
        self._size = 0
        # The fragments of the first granule, in the same ranges.
        self._first: dict[range, Fragments] = {}

    def blocks(self, ids: Ids) -> Fragments:
        """Return some blocks in all layers, block by block; granules must be blocks."""
        stride = self.memory.strides["block"]
        if ids.size == 1 and (first := self._first.get(self.walk.layers)) is not None:
            return first.shifted(ids.item(0) * stride)
        return self.fragments(self.walk.layers, ids * stride)

    def fragments(self, layers: range, behind: Ids) -> Fragments:
        """Return the granules ``behind`` bytes after block 0, adjacent runs merged."""
        if behind.size != 1:
            return self._computed(layers, behind)
        first = self._first.get(layers)
        if first is None:
            first = self._computed(layers, np.zeros(1, np.int64))
            if layers in self._known:
                self._first[layers] = first  # bounded: KV_TEMPLATE_STEPS_MAX
        return first.shifted(behind.item(0))

    def _computed(self, layers: range, behind: Ids) -> Fragments:
        relative, run, shape = self.of(layers)
        addresses = relative + behind.reshape(shape)
        return Fragments.uniform(
            addresses.ravel().view(np.uint64),
            run,
            owner=self.memory.owners,
            writable=self.memory.writable,
            device=self.memory.device,
        )

    def of(self, layers: range) -> tuple[Ids, int, tuple[int, ...]]:
        """Return addresses relative to a granule, the bytes at each, and a shape.

        To add an array of granule offsets to the addresses, reshape it to that shape.
        """
        known = self._known.get(layers)
        if known is None:
            known = self._compute(layers)
            if known[0].size > KV_TEMPLATE_STEPS_MAX:
                return known
            self._size += known[0].size
            if self._size > KV_TEMPLATE_STEPS_MAX:
                self._known.clear()
                self._first.clear()
                self._size = known[0].size
            self._known[layers] = known  # bounded: KV_TEMPLATE_STEPS_MAX
        return known

    def table(self, layers: range) -> Ids:
        """Return the base address of each component in some layers."""
        first = layers.start - self.memory.spec.first_layer
        return self.memory.bases[first : first + len(layers)]

    def _offsets(self, outer: tuple[str, ...]) -> dict[str, Ids]:
        """Return the offsets along tokens, heads and elements; 1 along merged axes."""
        walk = self.walk
        first = walk.heads.start - self.memory.spec.heads.start
        indices = {
            "token": range(walk.granule_tokens),
            "head": range(first, first + len(walk.heads)),
            "dim": range(walk.head_dim),
        }
        offsets: dict[str, Ids] = {}
        for axis, found in indices.items():
            some = found if axis in outer else found[:1]
            stride = self.memory.strides[axis]
            offsets[axis] = np.arange(some.start, some.stop) * stride
        return offsets

    def _steps_are(self, axis: str, run: int, table: Ids) -> bool:
        """Return whether every step along an axis has the length ``run``."""
        if axis not in ("layer", "kv"):
            return self.memory.strides[axis] == run
        steps = np.diff(table, axis=("layer", "kv").index(axis))
        return bool((steps == run).all())

    def _compute(self, layers: range) -> tuple[Ids, int, tuple[int, ...]]:
        table = self.table(layers)
        extents = self.walk.extents(len(layers), 1)
        outer = self.walk.order
        run = self.walk.item_bytes
        while outer and (axis := outer[-1]) != "block":
            if extents[axis] > 1 and not self._steps_are(axis, run, table):
                break
            run *= extents[axis]
            outer = outer[:-1]
        addresses = _broadcast(outer, table, self._offsets(outer))
        shape = tuple([-1 if axis == "block" else 1 for axis in outer])
        return addresses, run, shape


class GroupMap:
    """The local memory of a transfer's elements in one cache group."""

    def __init__(self, steps: Steps, ids: Ids, wanted: Bits) -> None:
        self.walk: Canonical = steps.walk
        self.memory: GroupMemory = steps.memory
        self.ids: Ids = ids
        self.wanted: Bits = wanted
        self.moves_all: bool = bool(np.logical_and.reduce(wanted))
        self._steps = steps
        self.granules_per_block: int = steps.granules_per_block
        self.granule_bytes: int = steps.granule_bytes
        # The arguments and the result of the last call of `fragments`.
        self._last: tuple[range, slice, Fragments] | None = None
        # The range of granules for which each layer is one fragment; a view from the
        # first such fragment to the end of the last, including whatever lies between;
        # the start of each layer's fragment in the view; and the length of each.
        self._line: tuple[tuple[int, int], memoryview, list[int], int] | None = None

    def line(self, layer: int, granule: int, granules: int) -> memoryview | None:
        """Return the host memory of a part of one layer, if it is a single piece."""
        at = layer - self._steps.first_layer
        line = self._line
        if line is not None and line[0] == (granule, granules):
            begin = line[2][at]
            return line[1][begin : begin + line[3]]
        whole = slice(granule, granule + granules)
        last = self._last
        if last is not None and last[1] == whole and last[2].addresses.size != 1:
            return None  # the same result as for the previous layer
        fragments = self.fragments(range(layer, layer + 1), whole)
        behind = self._steps.distances
        if (
            behind is None
            or fragments.device is not None
            or fragments.addresses.size != 1
        ):
            return None
        first = min(behind)
        here = behind[at]
        nbytes = fragments.nbytes
        view = view_of(
            fragments.addresses.item() - here + first,
            max(behind) - first + nbytes,
            owner=fragments.owner,
            writable=fragments.writable,
        )
        begins = [each - first for each in behind]
        self._line = (granule, granules), view, begins, nbytes
        return view[here - first :][:nbytes]

    def fragments(self, layers: range, granules: slice) -> Fragments:
        """Return the local memory of a part of the walk, merged."""
        last = self._last
        if last is not None and last[1] == granules and len(last[0]) == len(layers):
            before = last[0]
            fragments = last[2]
            behind = self._steps.distances
            if len(layers) > 1 or behind is None:
                distance = self._distance(before, layers)
            else:
                first = self.memory.spec.first_layer
                distance = behind[layers.start - first] - behind[before.start - first]
            if distance is not None:
                return fragments.shifted(distance)
        fragments = self._steps.fragments(layers, self._blocks(granules))
        self._last = layers, granules, fragments
        return fragments

    def moved(self, granules: slice) -> Ids:
        """Return the numbers of the wanted granules within a slice, ascending."""
        found: Ids = np.flatnonzero(self.wanted[granules])
        return found + np.int64(granules.start)

    def _distance(self, before: range, layers: range) -> int | None:
        """Return the distance between two runs of layers, or None if it varies."""
        distances = self._steps.table(layers) - self._steps.table(before)
        distance = distances[0, 0]
        return int(distance) if (distances == distance).all() else None

    def _blocks(self, granules: slice) -> Ids:
        """Return the distance of each wanted granule from block 0, in bytes."""
        strides = self.memory.strides
        per_block = self.granules_per_block
        if per_block == 1 and self.moves_all:
            return self.ids[granules] * strides["block"]
        numbers = self.moved(granules)
        inside = self.walk.granule_tokens * strides["token"]
        blocks = self.ids[numbers // per_block] * strides["block"]
        found: Ids = blocks + numbers % per_block * inside
        return found


_AXES: Final = ("layer", "kv", "token", "head", "dim", "block")


def _broadcast(outer: tuple[str, ...], table: Ids, offsets: dict[str, Ids]) -> Ids:
    """Return the address of every outer step, where merged axes are at their start."""
    merged = [axis for axis in _AXES if axis not in outer]
    table = table[: 1 if "layer" in merged else None, : 1 if "kv" in merged else None]
    addresses = (
        table[:, :, None, None, None, None]
        + offsets["token"][:, None, None, None]
        + offsets["head"][:, None, None]
        + offsets["dim"][:, None]
    )
    walked = addresses.transpose([_AXES.index(axis) for axis in (*outer, *merged)])
    return walked.reshape(walked.shape[: len(outer)])
