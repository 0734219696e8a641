"""A transfer's byte order, which both sides compute from their two descriptions.

Theory
------
A transfer moves the elements that both sides have. They form a box with these axes: the
model layers that both hold, the request's granules and their tokens, the components,
the model heads that both hold, and the elements of a head. The byte order is a walk
through that box; each side maps the steps of the walk onto its own memory. The two
sides need to agree only on the walk.

*Granules.* The two sides' blocks may differ in size, so the token axis is cut into
granules of ``gcd(block_tokens, block_tokens)`` tokens: the largest runs of tokens that
no block boundary of either side divides. If the block sizes are equal, a granule is a
block. Granule g begins at token ``g * granule_tokens`` of the request, and lies within
one block on either side. A partly filled last granule is moved whole; the bytes after
the last token lie in the same blocks and have no meaning.

*Axis order.* The walk nests the axes (layer, granule, component, token, head, dim) in
some order, with the granule axis in the place that ``block`` has in a memory order. Any
order would be correct. A side needs one fragment for each run of the walk that is
contiguous in its memory, and the runs are longest if the walk follows that side's
memory order. So the order is the producer's or the consumer's memory order, whichever
makes fewer fragments in total; if equal, the producer's. Consequences:

* Equal layouts merge into the longest fragments that the memory allows, on both sides.
* A cross-layer side and a per-layer side: the walk goes block by block, so the
  cross-layer side has one fragment per block, and the other side has no more fragments
  than it would have anyway.
* NHD and HND: one side keeps whole blocks and the other scatters. The scattering
  happens in that side's memory, where it is cheap, and not on the wire.

*Why both sides agree.* The choice depends only on the two descriptions, and uses
integer arithmetic. The order is part of :attr:`Canonical.order` and so of the plan's
digest. If peers with different versions chose different orders, they would notice
before a byte moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvwire.errors import ProfileMismatch, printable
from kvwire.kv.geometry import Geometry, GroupGeometry
from kvwire.kv.layout import extents_of
from kvwire.kv.spec import overlap, require_same_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """The elements of one cache group in a transfer, and their order.

    ``layers`` and ``heads`` are the model's indices that both sides hold. In ``order``
    the name ``block`` stands for the granule axis.
    """

    group: str
    order: tuple[str, ...]
    layers: range
    heads: range
    components: int
    head_dim: int
    item_bytes: int
    tokens: int
    granule_tokens: int
    granules: int

    @property
    def granule_bytes(self) -> int:
        """Return the bytes of one granule in one layer."""
        elements = self.components * self.granule_tokens * len(self.heads)
        return elements * self.head_dim * self.item_bytes

    def fields(self) -> tuple[str | int, ...]:
        """Return the values that determine the walk, for a digest to compare."""
        return (
            self.group,
            " ".join(self.order),
            self.layers.start,
            self.layers.stop,
            self.heads.start,
            self.heads.stop,
            self.components,
            self.head_dim,
            self.item_bytes,
            self.tokens,
            self.granule_tokens,
            self.granules,
        )

    def extents(self, layers: int, granules: int) -> dict[str, int]:
        """Return the number of steps along each axis, for a part of the walk."""
        return {
            "layer": layers,
            "block": granules,
            "kv": self.components,
            "token": self.granule_tokens,
            "head": len(self.heads),
            "dim": self.head_dim,
        }


def negotiate(producer: Geometry, consumer: Geometry) -> tuple[Canonical, ...]:
    """Return the number of pieces of a walk that are contiguous in one side's memory.

    Both sides get the same answer, because it depends on the two descriptions only.

    Raises:
        ProfileMismatch: The sides differ in groups, model or tokens, or have no layer
            or head in common.
    """
    names = [group.name for group in producer.groups]
    others = [group.name for group in consumer.groups]
    if names != others:
        listed = [printable(", ".join(side)) for side in (names, others)]
        raise ProfileMismatch(
            f"cache groups: the producer has {listed[0]}, the consumer {listed[1]}; "
            "both need the same groups in the same order",
            fields=("groups",),
        )
    pairs = zip(producer.groups, consumer.groups, strict=True)
    return tuple(_negotiate_group(p, c) for p, c in pairs)


def pieces(walk: Canonical, side: GroupGeometry) -> int:
    """Return the number of contiguous pieces of a walk in one side's memory."""
    extents = walk.extents(len(walk.layers), walk.granules)
    return math.prod(extents.values()) // _run(walk.order, extents, side)


def _negotiate_group(producer: GroupGeometry, consumer: GroupGeometry) -> Canonical:
    where = f"group {producer.name!r}"
    here = producer.spec
    there = consumer.spec
    require_same_model(here, there, where)
    layers = overlap(here.layer_indices, there.layer_indices)
    heads = overlap(here.heads, there.heads)
    for common, what, field in (
        (layers, "layer", "first_layer"),
        (heads, "KV head", "shard"),
    ):
        if not common:
            raise ProfileMismatch(
                f"{where}: the two sides have no {what} in common", fields=(field,)
            )
    tokens = _common_tokens(producer, consumer, where)
    granule_tokens = math.gcd(here.block_tokens, there.block_tokens)
    parts = Canonical(
        group=producer.name,
        order=producer.order,
        layers=layers,
        heads=heads,
        components=here.components,
        head_dim=here.head_dim,
        item_bytes=here.item_bytes,
        tokens=tokens,
        granule_tokens=granule_tokens,
        granules=-(-tokens // granule_tokens),
    )
    return replace(parts, order=_choose_order(parts, producer, consumer))


def _common_tokens(producer: GroupGeometry, consumer: GroupGeometry, where: str) -> int:
    """Return the number of tokens in the two block lists.

    Raises:
        ProfileMismatch: The lists are not for the same tokens.
    """
    tokens = min(producer.capacity, consumer.capacity)
    both = producer.tokens is not None and consumer.tokens is not None
    if both and producer.tokens != consumer.tokens:
        raise ProfileMismatch(
            f"{where}: the producer has tokens={producer.tokens}, the consumer "
            f"tokens={consumer.tokens}",
            fields=("tokens",),
        )
    for side in (producer, consumer):
        if -(-tokens // side.spec.block_tokens) != side.blocks:
            raise ProfileMismatch(
                f"{where}: the producer lists {_list_of(producer)}, the consumer "
                f"{_list_of(consumer)}; list the blocks of the same tokens",
                fields=("blocks",),
            )
    return tokens


def _list_of(side: GroupGeometry) -> str:
    tokens = "" if side.tokens is None else f" for tokens={side.tokens}"
    return f"{side.blocks} blocks of {side.spec.block_tokens} tokens{tokens}"


def _choose_order(
    parts: Canonical, producer: GroupGeometry, consumer: GroupGeometry
) -> tuple[str, ...]:
    """Return the memory order of the side whose order gives fewer fragments."""
    extents = parts.extents(len(parts.layers), parts.granules)
    elements = math.prod(extents.values())

    def fragments(order: tuple[str, ...]) -> int:
        runs = (_run(order, extents, side) for side in (producer, consumer))
        return sum(elements // run for run in runs)

    return min((producer.order, consumer.order), key=fragments)


def _run(order: tuple[str, ...], extents: dict[str, int], side: GroupGeometry) -> int:
    """Return the number of contiguous elements of the walk on one side.

    Blocks never count as adjacent, since neither side knows the other's block ids.
    """
    strides = _gapless_strides(side)
    run = 1
    for axis in reversed(order):
        if extents[axis] == 1:
            continue
        if strides.get(axis) != run:
            break
        run *= extents[axis]
    return run


def _gapless_strides(side: GroupGeometry) -> dict[str, int]:
    """Return the strides within a block, in elements, without padding."""
    extents = extents_of(side.spec)
    strides: dict[str, int] = {}
    stride = 1
    for axis in reversed(side.order):
        if axis == "block":
            break
        strides[axis] = stride
        stride *= extents[axis]
    return strides
