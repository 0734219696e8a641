"""One side's map: where each byte of the canonical walk lies in this side's memory.

The address of an element is a base (by layer and component) plus an offset along each
other axis, so the addresses of a whole segment are a broadcast sum: one NumPy addition
for each axis, whatever the number of fragments. Axes at the inner end of the walk whose
steps are exactly as long as what lies inside them are merged before the sum, and what
touches by chance (neighbouring block ids) after it.

Streaming by layer asks for the same granules of one layer after the other. Their
fragments differ by one distance, so the last answer is kept and moved.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.canonical import Canonical
from kvwire.kv.fragments import Fragments
from kvwire.kv.paged import CacheGroup


class GroupMap:
    """Finds where a transfer's elements of one cache group lie here.

    Attributes:
        walk: What is carried, in which order.
        memory: The group of the local cache.
        ids: The transfer's block list.
        wanted: Shape (walk.granules,): which granules are moved.
        moves_all: Whether that is all of them.
        granules_per_block: Granules in one block of this side.
    """

    __slots__ = (
        "_last",
        "granules_per_block",
        "ids",
        "memory",
        "moves_all",
        "walk",
        "wanted",
    )

    def __init__(
        self, walk: Canonical, memory: CacheGroup, ids: Ids, wanted: Bits
    ) -> None:
        self.walk: Canonical = walk
        self.memory: CacheGroup = memory
        self.ids: Ids = ids
        self.wanted: Bits = wanted
        self.moves_all: bool = bool(wanted.all())
        self.granules_per_block: int = memory.spec.block_tokens // walk.granule_tokens
        self._last: _Answer | None = None

    def fragments(self, layers: range, granules: slice) -> Fragments:
        """Return this side's memory of a part of the walk, merged.

        Args:
            layers: The model's indices, inside ``walk.layers``.
            granules: A part of the granules; those not wanted are left out.
        """
        table = self._table(layers)
        distance = self._distance(table, granules)
        if self._last is not None and distance is not None:
            return self._last.fragments.shifted(distance)
        fragments = self._compute(table, self.moved(granules))
        self._last = _Answer(table, granules, fragments)
        return fragments

    def moved(self, granules: slice) -> Ids:
        """Return the wanted ones among some granules, ascending."""
        found: Ids = np.flatnonzero(self.wanted[granules])
        return found + np.int64(granules.start)

    def merged_axes(self, layers: range) -> tuple[str, ...]:
        """Return the inner axes of the walk that are one run of this side's memory."""
        granules = np.flatnonzero(self.wanted)
        extents = self.walk.extents(len(layers), granules.size)
        merged, _ = self._merged(extents, self._table(layers), self._offsets(granules))
        return self.walk.order[len(self.walk.order) - merged :]

    def _distance(self, table: Ids, granules: slice) -> int | None:
        """Return how far these layers lie behind the last answer's, if so."""
        last = self._last
        if last is None or last.granules != granules:
            return None
        if last.table.shape != table.shape:
            return None
        distances = table - last.table
        distance = distances[0, 0]
        return int(distance) if (distances == distance).all() else None

    def _compute(self, table: Ids, granules: Ids) -> Fragments:
        order = self.walk.order
        extents = self.walk.extents(table.shape[0], granules.size)
        addresses, run = np.empty(0, np.int64), 0
        if granules.size:
            offsets = self._offsets(granules)
            merged, run = self._merged(extents, table, offsets)
            outer = order[: len(order) - merged]
            addresses = _broadcast(outer, extents, table, offsets).ravel()
        return Fragments(
            addresses.astype(np.uint64),
            np.full(addresses.size, run, np.uint64),
            owner=self.memory.owners,
            writable=self.memory.writable,
            device=self.memory.device,
        ).merged()

    def _table(self, layers: range) -> Ids:
        first = layers.start - self.memory.spec.first_layer
        return self.memory.bases[first : first + len(layers)]

    def _offsets(self, granules: Ids) -> dict[str, Ids]:
        """Return the offsets along each axis that is not in the table of bases."""
        strides = self.memory.strides
        per_block = self.granules_per_block
        blocks = self.ids[granules // per_block] * strides["block"]
        token = strides["token"]
        inside = granules % per_block * (self.walk.granule_tokens * token)
        heads = self.walk.heads
        first_head = heads.start - self.memory.spec.heads.start
        return {
            "block": blocks + inside,
            "token": np.arange(self.walk.granule_tokens) * token,
            "head": np.arange(first_head, first_head + len(heads)) * strides["head"],
            "dim": np.arange(self.walk.head_dim) * strides["dim"],
        }

    def _merged(
        self, extents: dict[str, int], table: Ids, offsets: dict[str, Ids]
    ) -> tuple[int, int]:
        """Return how many inner axes are one run, and the bytes of that run."""
        run = self.walk.item_bytes
        merged = 0
        for axis in reversed(self.walk.order):
            if extents[axis] > 1 and not _steps_are(axis, run, table, offsets):
                break
            run *= extents[axis]
            merged += 1
        return merged, run


class _Answer(NamedTuple):
    """Remembers the last question and its answer."""

    table: Ids
    granules: slice
    fragments: Fragments


def _steps_are(axis: str, run: int, table: Ids, offsets: dict[str, Ids]) -> bool:
    """Tell whether each step along an axis is as long as the run inside it."""
    if axis == "layer":
        return bool((np.diff(table, axis=0) == run).all())
    if axis == "kv":
        return bool((np.diff(table, axis=1) == run).all())
    return bool((np.diff(offsets[axis]) == run).all())


def _broadcast(
    outer: tuple[str, ...],
    extents: dict[str, int],
    table: Ids,
    offsets: dict[str, Ids],
) -> Ids:
    """Return the address of every outer step; merged axes are at their first."""
    bases = table[
        : extents["layer"] if "layer" in outer else 1,
        : extents["kv"] if "kv" in outer else 1,
    ]
    if "layer" in outer and "kv" in outer and outer.index("kv") < outer.index("layer"):
        bases = bases.T
    at = {axis: position for position, axis in enumerate(outer)}
    shape = [extents[axis] if axis in ("layer", "kv") else 1 for axis in outer]
    addresses = bases.reshape(shape)
    for axis, steps in offsets.items():
        if axis not in at:
            addresses = addresses + steps[0]
            continue
        shape = [1] * len(outer)
        shape[at[axis]] = steps.size
        addresses = addresses + steps.reshape(shape)
    assert addresses.size == math.prod(extents[axis] for axis in outer)
    return addresses
