"""The map from an exposed cache's blocks to a reader's blocks.

A transfer's plan depends on two block lists. A window has no list: any of its blocks
may be read into any block of the reader. So the plan is a template, made once for two
geometries, to which a read adds only the block ids. The template uses the same
canonical walk as a transfer (:mod:`kvwire.kv.canonical`), over the smallest run of
tokens that consists of whole blocks on both sides. So windows support every combination
of caches that transfers support.

Both sides make the template from the same two geometries, so they agree on the order of
the transmitted bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvwire import limits
from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.canonical import Canonical, negotiate, pieces
from kvwire.kv.fragments import Array, columns_of
from kvwire.kv.geometry import Geometry, GroupGeometry
from kvwire.kv.mapping import GroupMemory, Steps
from kvwire.kv.paged import Addresses, PagedCache
from kvwire.memory.buffers import mid_page_memory
from kvwire.memory.pieces import copy_pieces


def geometry_of_pools(cache: PagedCache) -> Geometry:
    """Return the geometry of all blocks of a cache."""
    return Geometry(
        tuple(
            GroupGeometry(
                name=name, spec=group.spec, order=group.order, blocks=group.num_blocks
            )
            for name, group in cache.groups.items()
        )
    )


class ViewWalk(NamedTuple):
    """The map from one group's blocks to a reader's blocks.

    Attributes:
        walk: The walk through the smallest run of tokens that both sides can move.
        pieces: The number of memory pieces of one owner's block, on the side with more.
    """

    walk: Canonical
    pieces: int


def view_walks(owner: Geometry, reader: Geometry) -> tuple[ViewWalk, ...]:
    """Return the map from each group's blocks to a reader's blocks.

    Raises:
        ProfileMismatch: The two caches do not fit together; the error names the fields.
    """
    if len(owner.groups) != len(reader.groups):
        negotiate(owner, reader)  # raises, with the names of both
    ours: list[GroupGeometry] = []
    theirs: list[GroupGeometry] = []
    for mine, other in zip(owner.groups, reader.groups, strict=True):
        tokens = math.lcm(mine.spec.block_tokens, other.spec.block_tokens)
        ours.append(_of_tokens(mine, tokens))
        theirs.append(_of_tokens(other, tokens))
    walks = negotiate(Geometry(tuple(ours)), Geometry(tuple(theirs)))
    return tuple(map(_view_walk, walks, ours, theirs))


def _view_walk(
    walk: Canonical, owner: GroupGeometry, reader: GroupGeometry
) -> ViewWalk:
    """Refuse a walk that would cut one block into too many pieces.

    The peer chooses its own layout, and without a limit could make the tables of
    fragments larger than the memory that they describe.
    """
    per_granule = -(-max(pieces(walk, owner), pieces(walk, reader)) // walk.granules)
    granules = owner.spec.block_tokens // walk.granule_tokens
    count = per_granule * granules
    nbytes = len(walk.layers) * walk.granule_bytes * granules
    most = pieces_max(nbytes)
    if count > most:
        raise ProfileMismatch(
            f"group {walk.group!r}: the two layouts differ so much that a block of "
            f"{nbytes} bytes becomes {count} pieces, more than {most} (memory orders: "
            f"{' '.join(owner.order)} and {' '.join(reader.order)}); use one layout "
            "on both sides",
            fields=("order",),
        )
    return ViewWalk(walk, count)


def pieces_max(nbytes: int) -> int:
    """Return the most pieces that the blocks of one get may have."""
    return max(limits.KV_PIECES_MAX, nbytes // limits.KV_PIECE_BYTES)


def _of_tokens(group: GroupGeometry, tokens: int) -> GroupGeometry:
    return GroupGeometry(
        name=group.name,
        spec=group.spec,
        order=group.order,
        blocks=tokens // group.spec.block_tokens,
    )


class BlockPlaces(Steps):
    """The places of one side's blocks in one group, granule by granule.

    Attributes:
        block_bytes: The bytes of one of this side's blocks that a read moves.
    """

    def __init__(self, walk: Canonical, memory: GroupMemory) -> None:
        super().__init__(walk, memory)
        granules = self.granules_per_block
        self.block_bytes: int = len(walk.layers) * walk.granule_bytes * granules
        inside = walk.granule_tokens * memory.strides["token"]
        self._inside = np.arange(granules, dtype=np.int64) * inside
        self._pieces: tuple[Array, int] | None = None

    def offsets(self, ids: Ids) -> Ids:
        """Return the distance of some blocks' granules from block 0, in bytes."""
        behind = ids * self.memory.strides["block"]
        if self.granules_per_block > 1:
            behind = np.add.outer(behind, self._inside).ravel()
        return behind

    def pieces(self) -> tuple[Array, int]:
        """Return the addresses of the first granule's pieces, and their length."""
        if self._pieces is None:
            relative, run, _ = self.of(self.walk.layers)
            self._pieces = (relative.ravel().view(np.uint64), run)
        return self._pieces

    def in_order(self, offsets: Ids) -> tuple[Array, int]:
        """Return the addresses of all pieces of some granules, in order."""
        pieces, run = self.pieces()
        if offsets.size == 1:
            return pieces + offsets.view(np.uint64), run
        return np.add.outer(offsets.view(np.uint64), pieces).ravel(), run


def common_pieces(owner: BlockPlaces, reader: BlockPlaces) -> tuple[Array, Array, int]:
    """Return a granule's pieces that are contiguous on both sides: theirs, ours.

    Both sides cut the same walk at multiples of a suffix of its axes, so the shorter
    run's length divides the longer one's.
    """
    from_places, from_run = owner.pieces()
    to_places, to_run = reader.pieces()
    run = min(from_run, to_run)
    return _cut(from_places, from_run, run), _cut(to_places, to_run, run), run


def _cut(places: Array, length: int, run: int) -> Array:
    if length == run:
        return np.ascontiguousarray(places)
    steps = np.arange(0, length, run, dtype=np.uint64)
    return np.add.outer(places, steps).ravel()


class Placed(NamedTuple):
    """The memory of one cache group, as its owner describes it to a reader.

    Attributes:
        bases: The address of block 0 for each layer and component.
        strides: The bytes between blocks, tokens, heads, and elements.
    """

    bases: Addresses
    strides: tuple[int, int, int, int]


_STRIDES = ("block", "token", "head", "dim")


def placed(cache: PagedCache) -> tuple[Placed, ...]:
    """Return the places of a cache's groups in this process."""
    return tuple(
        Placed(
            group.bases,
            (
                group.strides["block"],
                group.strides["token"],
                group.strides["head"],
                group.strides["dim"],
            ),
        )
        for group in cache.groups.values()
    )


class PeerGroup:
    """A cache group in another process, whose walks this process computes."""

    owners: object = None
    writable: bool = False
    device: None = None

    def __init__(self, group: GroupGeometry, where: Placed) -> None:
        self.spec = group.spec
        self.bases: Addresses = where.bases
        self.strides: dict[str, int] = dict(zip(_STRIDES, where.strides, strict=True))
        if where.bases.shape != (group.spec.layers, group.spec.components):
            raise ProfileMismatch(
                f"group {group.name!r}: a table of {where.bases.shape} addresses does "
                f"not fit {group.spec.layers} layers and {group.spec.components} "
                "components",
                fields=("bases",),
            )


def spans_of(
    geometry: Geometry, where: Sequence[Placed]
) -> tuple[tuple[int, int], ...]:
    """Return the memory ranges (address, bytes) of all blocks, joined and sorted.

    Raises:
        UsageError: An address is larger than any process can have.
    """
    begins: list[Addresses] = []
    ends: list[Addresses] = []
    for group, place in zip(geometry.groups, where, strict=True):
        spec = group.spec
        extents = (group.blocks, spec.block_tokens, spec.kv_heads, spec.head_dim)
        low = 0
        high = spec.item_bytes
        for extent, stride in zip(extents, place.strides, strict=True):
            reach = (extent - 1) * stride
            low += min(0, reach)
            high += max(0, reach)
        if high - low >= 2**62:
            raise UsageError(
                f"group {group.name!r}: strides {place.strides} are not valid"
            )
        table = np.sort(place.bases, axis=None)
        if int(table[0]) + low < 0 or int(table[-1]) + high >= 2**62:
            raise UsageError(f"group {group.name!r}: its addresses are out of range")
        begins.append(table + low)
        ends.append(table + high)
    begin = np.concatenate(begins)
    end = np.concatenate(ends)
    order = np.argsort(begin, kind="stable")
    begin = begin[order]
    end = np.maximum.accumulate(end[order])
    first = np.concatenate(([True], begin[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    starts = begin[first].tolist()
    lengths = (end[last] - begin[first]).tolist()
    return tuple(zip(starts, lengths, strict=True))


# --- the bytes of a small get ---------------------------------------------------------

# They are in the order of the granules, and within a granule in the order in which its
# pieces are walked. The two sides may cut a granule into pieces of different lengths,
# but the order is the same.


def gathered(parts: Sequence[tuple[BlockPlaces, Ids]], nbytes: int) -> memoryview:
    """Return a copy of granules, given per group as offsets from its block 0."""
    data = mid_page_memory(nbytes)
    line: int = data.__array_interface__["data"][0]
    for place, offsets in parts:
        line += move_granules(place, offsets, line, gather=True)
    return data.data


def move_granules(place: BlockPlaces, offsets: Ids, line: int, *, gather: bool) -> int:
    """Copy granules to or from a contiguous range; return the number of bytes."""
    addresses, run = place.in_order(offsets)
    total = run * addresses.size
    lengths, starts = columns_of(addresses.size, run)
    side_by_side = starts[:-1] + np.uint64(line)
    if gather:
        copy_pieces(addresses, side_by_side, lengths, total)
    else:
        copy_pieces(side_by_side, addresses, lengths, total)
    return total
