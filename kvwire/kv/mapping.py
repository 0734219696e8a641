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

from typing import Final

import numpy as np

from kvwire import limits
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.canonical import Canonical
from kvwire.kv.fragments import Fragments
from kvwire.kv.paged import CacheGroup


class Steps:
    """Keeps what of a group's addresses is the same for whatever blocks are named."""

    def __init__(self, walk: Canonical, memory: CacheGroup) -> None:
        self.walk: Canonical = walk
        self.memory: CacheGroup = memory
        self.granules_per_block: int = memory.spec.block_tokens // walk.granule_tokens
        # How far each layer lies behind the first, if keys and values lie alike.
        behind = memory.bases - memory.bases[0]
        even = bool((behind == behind[:, :1]).all())
        self.distances: list[int] | None = behind[:, 0].tolist() if even else None
        self.granule_bytes: int = walk.granule_bytes
        self._known: dict[range, tuple[Ids, int, tuple[int, ...]]] = {}
        # Of block 0, of all layers.
        self._block: Fragments | None = None

    def blocks(self, ids: Ids) -> Fragments:
        """Return where all of some blocks lies, one by one, where each is a granule."""
        behind = ids * self.memory.strides["block"]
        if ids.size != 1:
            return self.fragments(self.walk.layers, behind)
        if self._block is None:
            self._block = self.fragments(self.walk.layers, behind - behind)
        return self._block.shifted(behind.item(0))

    def fragments(self, layers: range, behind: Ids) -> Fragments:
        """Return where granules lie that are so far behind block 0, merged."""
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
        """Return addresses less those of blocks, the bytes at each, and a shape.

        The axis of blocks is one long there; in an array of that shape it is as long as
        there are granules.
        """
        known = self._known.get(layers)
        if known is None:
            known = self._compute(layers)
            if known[0].size > limits.KV_TEMPLATE_STEPS_MAX:
                return known
            if len(self._known) >= limits.KV_TEMPLATES_MAX:
                self._known.clear()
            self._known[layers] = known  # bounded: KV_TEMPLATES_MAX
        return known

    def table(self, layers: range) -> Ids:
        """Return where each component of some layers begins."""
        first = layers.start - self.memory.spec.first_layer
        return self.memory.bases[first : first + len(layers)]

    def _offsets(self) -> dict[str, Ids]:
        """Return the offsets along each axis but layers, components and blocks."""
        strides, walk = self.memory.strides, self.walk
        first = walk.heads.start - self.memory.spec.heads.start
        return {
            "token": np.arange(walk.granule_tokens) * strides["token"],
            "head": np.arange(first, first + len(walk.heads)) * strides["head"],
            "dim": np.arange(walk.head_dim) * strides["dim"],
        }

    def _compute(self, layers: range) -> tuple[Ids, int, tuple[int, ...]]:
        table, offsets = self.table(layers), self._offsets()
        extents = self.walk.extents(len(layers), 1)
        outer, run = self.walk.order, self.walk.item_bytes
        while outer and (axis := outer[-1]) != "block":
            if extents[axis] > 1 and not _steps_are(axis, run, table, offsets):
                break
            run *= extents[axis]
            outer = outer[:-1]
        addresses = _broadcast(outer, table, offsets)
        shape = tuple([-1 if axis == "block" else 1 for axis in outer])
        return addresses, run, shape


class GroupMap:
    """Finds where a transfer's elements of one cache group lie here."""

    def __init__(self, steps: Steps, ids: Ids, wanted: Bits) -> None:
        self.walk: Canonical = steps.walk
        self.memory: CacheGroup = steps.memory
        self.ids: Ids = ids
        self.wanted: Bits = wanted
        self.moves_all: bool = bool(np.logical_and.reduce(wanted))
        self._steps = steps
        self.granules_per_block: int = steps.granules_per_block
        self.granule_bytes: int = steps.granule_bytes
        # The last question and its answer.
        self._last: tuple[range, slice, Fragments] | None = None

    def fragments(self, layers: range, granules: slice) -> Fragments:
        """Return this side's memory of a part of the walk, merged."""
        last = self._last
        if last is not None and last[1] == granules and len(last[0]) == len(layers):
            before, fragments, behind = last[0], last[2], self._steps.distances
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
        """Return the wanted ones among some granules, ascending."""
        found: Ids = np.flatnonzero(self.wanted[granules])
        return found + np.int64(granules.start)

    def _distance(self, before: range, layers: range) -> int | None:
        """Return how far these layers lie behind as many others, if all lie alike."""
        distances = self._steps.table(layers) - self._steps.table(before)
        distance = distances[0, 0]
        return int(distance) if (distances == distance).all() else None

    def _blocks(self, granules: slice) -> Ids:
        """Return how far each wanted granule lies behind block 0."""
        strides, per_block = self.memory.strides, self.granules_per_block
        if per_block == 1 and self.moves_all:
            return self.ids[granules] * strides["block"]
        numbers = self.moved(granules)
        inside = self.walk.granule_tokens * strides["token"]
        blocks = self.ids[numbers // per_block] * strides["block"]
        found: Ids = blocks + numbers % per_block * inside
        return found


def _steps_are(axis: str, run: int, table: Ids, offsets: dict[str, Ids]) -> bool:
    """Tell whether each step along an axis is as long as the run inside it."""
    if axis in ("layer", "kv"):
        steps = np.diff(table, axis=("layer", "kv").index(axis))
    else:
        steps = np.diff(offsets[axis])
    return bool((steps == run).all())


_AXES: Final = ("layer", "kv", "token", "head", "dim", "block")


def _broadcast(outer: tuple[str, ...], table: Ids, offsets: dict[str, Ids]) -> Ids:
    """Return the address of every outer step; merged axes are at their first."""
    merged = [axis for axis in _AXES if axis not in outer]
    table = table[: 1 if "layer" in merged else None, : 1 if "kv" in merged else None]
    token, head, dim = (
        offsets[axis][: 1 if axis in merged else None]
        for axis in ("token", "head", "dim")
    )
    addresses = (
        table[:, :, None, None, None, None]
        + token[:, None, None, None]
        + head[:, None, None]
        + dim[:, None]
    )
    walked = addresses.transpose([_AXES.index(axis) for axis in (*outer, *merged)])
    return walked.reshape(walked.shape[: len(outer)])
