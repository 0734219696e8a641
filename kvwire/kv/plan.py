"""One side's plan of a transfer: segments, their bytes and their local memory.

Theory
------
:mod:`kvwire.kv.canonical` decides which elements a transfer carries, and the nesting of
the walk through them. That walk is cut into *segments*: a range of layers times a range
of granules, in one group. A segment is the unit that a producer marks as ready. Its
bytes are in the order of a walk through its own box. Both sides name a segment by the
same five numbers and know its length. Chunks are byte ranges within a segment, and need
not align with layers or blocks.

To map bytes back to blocks, :meth:`TransferPlan.touched` returns the (layer, granule)
cells that a byte range touches. A cell has landed when no missing byte range touches
it, whatever the order of the walk. A block has landed when all its granules have. Since
the two sides' block sizes may differ, each side groups the granules into its own
blocks.

*Blocks that the consumer has.* Block hashes may show that the consumer holds some of
its blocks already. Their granules keep their numbers but are left out of the walk.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvwire import limits
from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv.blocks import Bits, Blocks, MissingBlocks, nothing_missing
from kvwire.kv.canonical import Canonical, negotiate, pieces
from kvwire.kv.fragments import Fragments, Payload
from kvwire.kv.geometry import Geometry, GroupGeometry, Tokens, describe
from kvwire.kv.mapping import GroupMap, Steps
from kvwire.kv.paged import PagedCache, computed_once

if TYPE_CHECKING:
    from kvwire.kv.blocks import BlockLists


class PlanSide(enum.Enum):
    """The end of a transfer that a plan belongs to."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class Segment(NamedTuple):
    """A box of layers, by the model's index, and granules, in one group.

    Both sides name a segment by these five numbers.
    """

    group: int
    layer: int
    layers: int
    granule: int
    granules: int

    @property
    def layer_range(self) -> range:
        """Return the layers, by the model's index."""
        return range(self.layer, self.layer + self.layers)

    @property
    def granule_range(self) -> range:
        """Return the granules, counted within the group."""
        return range(self.granule, self.granule + self.granules)

    @property
    def granule_slice(self) -> slice:
        """Return the granules as a slice, for indexing arrays."""
        return slice(self.granule, self.granule + self.granules)


class PlanTemplate:
    """The part of a plan that depends on the two descriptions, not on block ids."""

    def __init__(
        self, cache: PagedCache, local: Geometry, peer: Geometry, side: PlanSide
    ) -> None:
        self.ends: tuple[Geometry, Geometry] = local, peer
        producer = side is PlanSide.PRODUCER
        self.groups: tuple[Canonical, ...] = (
            negotiate(local, peer) if producer else negotiate(peer, local)
        )
        for walk, group in zip(self.groups, local.groups, strict=True):
            _check_pieces(walk, group)
        consumer = peer if producer else local
        self.wanted: tuple[Bits, ...] = _wanted(self.groups, consumer, {})
        self.steps: tuple[Steps, ...] = tuple(
            Steps(walk, cache.groups[walk.group]) for walk in self.groups
        )
        self.nbytes: int = sum(
            len(walk.layers) * walk.granules * walk.granule_bytes
            for walk in self.groups
        )
        self.digest: bytes = _digest(self.groups, self.wanted)
        self.indices: dict[str, int] = {
            walk.group: index for index, walk in enumerate(self.groups)
        }
        self.tokens: dict[str, int] = {w.group: w.tokens for w in self.groups}
        most = max(self.tokens.values())
        longest = list(self.tokens.values()).index(most)
        # The blocks of the first group that lists the most tokens, and that number of
        # tokens.
        self.landed: tuple[int, int] = local.groups[longest].blocks, most
        self.missing: MissingBlocks = nothing_missing(
            {walk.group: walk.layers for walk in self.groups}
        )


class TransferPlan:
    """One side's plan of one transfer. Immutable.

    ``have``, per group a mask of shape (blocks,), marks the positions of the
    *consumer's* list whose blocks it holds already; both sides pass the same masks.
    ``named`` are the block ids that outcomes report, if these differ from ``blocks``.

    Raises:
        ProfileMismatch: The two descriptions do not fit together.
        UsageError: The cache is not writable, or a block list is wrong or too long.
    """

    def __init__(
        self,
        cache: PagedCache,
        blocks: Blocks,
        peer: Geometry,
        side: PlanSide,
        *,
        tokens: Tokens = None,
        have: Mapping[str, Bits] | None = None,
        local: Geometry | None = None,
        named: BlockLists | None = None,
    ) -> None:
        if side is PlanSide.CONSUMER and not cache.writable:
            raise UsageError(
                "a tensor of this cache is read-only; receiving needs writable tensors"
            )
        self.side = side
        ids = cache.block_lists(blocks, least=0)
        self.lists: BlockLists = ids if named is None else named
        self.local: Geometry = local or describe(cache, ids, tokens)
        # The template keeps both ends alive, so no other geometry can have the same
        # id().
        template = computed_once(
            cache,
            (id(self.local), id(peer), side is PlanSide.PRODUCER),
            lambda: PlanTemplate(cache, self.local, peer, side),
        )
        self.template: PlanTemplate = template
        self.groups: tuple[Canonical, ...] = template.groups
        self.indices: dict[str, int] = template.indices
        wanted = template.wanted
        if have:
            consumer = peer if side is PlanSide.PRODUCER else self.local
            wanted = _wanted(self.groups, consumer, have)
        self._whole = not have
        self.maps: tuple[GroupMap, ...] = tuple(
            map(GroupMap, template.steps, map(ids.__getitem__, self.indices), wanted)
        )
        self.nbytes: int = template.nbytes
        if have:
            self.nbytes = sum(self.nbytes_of(segment) for segment in self.segments())
        if self.nbytes > limits.REQUEST_BYTES_MAX:
            raise UsageError(
                f"this transfer has {self.nbytes} bytes, and one request carries at "
                f"most {limits.REQUEST_BYTES_MAX}; list fewer blocks"
            )

    def segments(self) -> tuple[Segment, ...]:
        """Return the whole transfer: a segment for each group that both sides have."""
        found = (
            self.marked(index, range(held.spec.layers), range(self.lists[name].size))
            for name, index in self.indices.items()
            for held in (self.maps[index].memory,)
        )
        return tuple(segment for segment in found if segment is not None)

    def marked(self, index: int, layers: range, blocks: range) -> Segment | None:
        """Return the segment of a checked mark, or None if the peer needs none of it.

        Layers are relative to this side's first layer, blocks to the local list.
        """
        walk = self.groups[index]
        group_map = self.maps[index]
        first = group_map.memory.spec.first_layer
        start = max(first + layers.start, walk.layers.start)
        stop = min(first + layers.stop, walk.layers.stop)
        granule = blocks.start * group_map.granules_per_block
        last = min(blocks.stop * group_map.granules_per_block, walk.granules)
        if start >= stop or granule >= last:
            return None
        # Made with tuple.__new__, because a NamedTuple's own __new__ is Python code.
        box = (index, start, stop - start, granule, last - granule)
        return tuple.__new__(Segment, box)

    def group_index(self, group: str) -> int:
        """Return the index of a group in the cache's order.

        Raises:
            UsageError: There is no such group.
        """
        found = self.indices.get(group)
        if found is not None:
            return found
        names = ", ".join(self.indices)
        raise UsageError(f"unknown group {group!r}; the groups are {names}")

    def check(self, segment: Segment) -> int:
        """Check a segment that a peer named; return its number of bytes.

        Raises:
            UsageError: It is not inside this transfer.
        """
        if not 0 <= segment.group < len(self.groups):
            raise UsageError(
                f"segment: group {segment.group} does not exist; there are "
                f"{len(self.groups)} groups"
            )
        walk = self.groups[segment.group]
        first = segment.layer
        last = segment.layer + segment.layers
        if segment.layers < 1 or first < walk.layers.start or last > walk.layers.stop:
            raise UsageError(
                f"segment: layers {first} to {last - 1}; group {walk.group!r} carries "
                f"{walk.layers.start} to {walk.layers.stop - 1}"
            )
        first = segment.granule
        last = segment.granule + segment.granules
        if segment.granules < 1 or first < 0 or last > walk.granules:
            raise UsageError(
                f"segment: granules {first} to {last - 1} are outside the "
                f"{walk.granules} granules of group {walk.group!r}"
            )
        group_map = self.maps[segment.group]
        if not group_map.moves_all:
            return self.nbytes_of(segment)
        return segment.layers * segment.granules * group_map.granule_bytes

    def nbytes_of(self, segment: Segment) -> int:
        """Return the number of bytes of a segment that is known to be valid."""
        group_map = self.maps[segment.group]
        granules = segment.granules
        if not group_map.moves_all:
            granules = int(np.count_nonzero(group_map.wanted[segment.granule_slice]))
        return segment.layers * granules * group_map.granule_bytes

    def memory(self, segment: Segment) -> Payload:
        """Return a segment's local memory, as a view if it is one piece of a layer.

        Calls with a view cost less than calls with a list of fragments.
        """
        group, layer, layers, granule, granules = segment
        found = self.maps[group]
        if layers == 1 and (view := found.line(layer, granule, granules)) is not None:
            return view
        return self.fragments(segment)

    def fragments(self, segment: Segment) -> Fragments:
        """Return a segment's local memory, in canonical order."""
        group, layer, layers, granule, granules = segment
        return self.maps[group].fragments(
            range(layer, layer + layers), slice(granule, granule + granules)
        )

    def positions(self, segment: Segment) -> slice:
        """Return the positions of the block list that a segment covers."""
        per_block = self.maps[segment.group].granules_per_block
        last = segment.granule + segment.granules
        return slice(segment.granule // per_block, -(-last // per_block))

    def covering(self, segments: Iterable[Segment]) -> dict[str, Bits]:
        """Return for each block list the positions that the segments cover."""
        found = {name: np.zeros(ids.size, np.bool_) for name, ids in self.lists.items()}
        for segment in segments:
            found[self.groups[segment.group].group][self.positions(segment)] = True
        return found

    def touched(self, segment: Segment, offset: int, nbytes: int) -> Bits:
        """Return the cells of a segment that a byte range touches."""
        if offset < 0 or nbytes < 0 or offset > self.nbytes_of(segment) - nbytes:
            raise UsageError(
                f"segment: bytes {offset}+{nbytes} are outside its "
                f"{self.nbytes_of(segment)} bytes"
            )
        walk = self.groups[segment.group]
        granules = self.maps[segment.group].moved(segment.granule_slice)
        extents = walk.extents(segment.layers, granules.size)
        depth = 1 + max(walk.order.index("layer"), walk.order.index("block"))
        inner = math.prod(extents[axis] for axis in walk.order[depth:])
        unit = inner * walk.item_bytes
        last = -(-(offset + nbytes) // unit) if nbytes else 0
        steps = np.arange(offset // unit, last)
        shape = tuple(extents[axis] for axis in walk.order[:depth])
        place = dict(
            zip(walk.order[:depth], np.unravel_index(steps, shape), strict=True)
        )
        cells = np.zeros((segment.layers, segment.granules), np.bool_)
        cells[place["layer"], granules[place["block"]] - segment.granule] = True
        return cells

    @property
    def digest(self) -> bytes:
        """Return 16 bytes that both sides share only if their walks are equal."""
        if self._whole:
            return self.template.digest
        return _digest(self.groups, [group_map.wanted for group_map in self.maps])


def _digest(groups: Iterable[Canonical], wanted: Iterable[Bits]) -> bytes:
    walks = tuple(walk.fields() for walk in groups)
    hashed = hashlib.sha256(repr(walks).encode())
    for granules in wanted:
        hashed.update(np.packbits(granules).tobytes())
    return hashed.digest()[:16]


def _check_pieces(walk: Canonical, local: GroupGeometry) -> None:
    """Refuse a walk that would cut the local memory into too many pieces.

    The peer chooses its own layout, and without a limit could make the tables of
    fragments larger than the memory that they describe.
    """
    count = pieces(walk, local)
    nbytes = len(walk.layers) * walk.granules * walk.granule_bytes
    most = max(limits.KV_PIECES_MAX, nbytes // limits.KV_PIECE_BYTES)
    if count > most:
        raise ProfileMismatch(
            f"group {walk.group!r}: the two layouts differ so much that "
            f"{nbytes} bytes become {count} pieces, more than {most} (order on the "
            f"wire: {' '.join(walk.order)}; in memory: {' '.join(local.order)}); use "
            "one layout on both sides, or list fewer blocks",
            fields=("order",),
        )


def _wanted(
    groups: tuple[Canonical, ...], consumer: Geometry, have: Mapping[str, Bits]
) -> tuple[Bits, ...]:
    """Return the granules of each group that the consumer lacks."""
    for name in have.keys() - {walk.group for walk in groups}:
        raise UsageError(f"have: unknown group {name!r}")
    wanted: list[Bits] = []
    for walk, end in zip(groups, consumer.groups, strict=True):
        held = have.get(walk.group)
        if held is None:
            # One bit stands for all, since a template may be kept for long.
            wanted.append(np.broadcast_to(np.True_, (walk.granules,)))
            continue
        if held.shape != (end.blocks,) or held.dtype != np.bool_:
            raise UsageError(
                f"have: group {walk.group!r} got {held.dtype.name} of shape "
                f"{held.shape}; pass one bool for each of the consumer's {end.blocks} "
                "blocks"
            )
        per_block = end.spec.block_tokens // walk.granule_tokens
        wanted.append(~np.repeat(held, per_block)[: walk.granules])
    return tuple(wanted)
