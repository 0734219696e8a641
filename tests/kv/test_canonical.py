"""Both sides get the same walk from the same two descriptions, and it is a good one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwire.errors import ProfileMismatch
from kvwire.kv.canonical import Canonical, negotiate
from kvwire.kv.geometry import Geometry, GroupGeometry
from kvwire.kv.spec import KVSpec

SPEC = KVSpec(layers=8, kv_heads=4, head_dim=64, block_tokens=16)

NHD = "layer block kv token head dim"
HND = "layer block kv head token dim"
CROSS = "block layer kv token head dim"
KV_FIRST = "layer kv block token head dim"
PACKED = "layer block head token kv dim"


def side(order: str = NHD, blocks: int = 4, **fields: Any) -> Geometry:
    """One group of full blocks, unless ``tokens`` says otherwise."""
    tokens = fields.pop("tokens", None)
    name = fields.pop("name", "kv")
    spec = replace(SPEC, **fields)
    axes = tuple(order.split())
    return Geometry(
        (GroupGeometry(name=name, spec=spec, order=axes, blocks=blocks, tokens=tokens),)
    )


def walk_of(producer: Geometry, consumer: Geometry) -> Canonical:
    (walk,) = negotiate(producer, consumer)
    return walk


@pytest.mark.parametrize(
    ("producer", "consumer", "order"),
    [
        (NHD, NHD, NHD),
        (HND, HND, HND),
        (CROSS, CROSS, CROSS),
        (CROSS, NHD, CROSS),
        (NHD, CROSS, CROSS),
        (NHD, HND, NHD),
        (HND, NHD, HND),
        (KV_FIRST, NHD, NHD),
        (NHD, KV_FIRST, NHD),
        (PACKED, PACKED, PACKED),
    ],
)
def test_the_order_that_fragments_least(
    producer: str, consumer: str, order: str
) -> None:
    assert " ".join(walk_of(side(producer), side(consumer)).order) == order


@pytest.mark.parametrize(
    ("sizes", "blocks", "granule", "granules"),
    [
        ((16, 16), (4, 4), 16, 4),
        ((16, 32), (4, 2), 16, 4),
        ((64, 16), (1, 4), 16, 4),
        ((48, 32), (2, 3), 16, 6),
        ((16, 32), (3, 2), 16, 3),
        ((5, 7), (7, 5), 1, 35),
    ],
)
def test_granules(
    sizes: tuple[int, int], blocks: tuple[int, int], granule: int, granules: int
) -> None:
    """The third from below leaves half of the consumer's last block untouched."""
    ends = [side(block_tokens=s, blocks=n) for s, n in zip(sizes, blocks, strict=True)]
    walk = walk_of(*ends)
    assert (walk.granule_tokens, walk.granules) == (granule, granules)
    assert walk.granule_bytes == granule * SPEC.token_bytes


def test_one_side_may_know_the_tokens() -> None:
    for ends in ((side(tokens=60), side()), (side(), side(tokens=60))):
        walk = walk_of(*ends)
        assert (walk.tokens, walk.granules) == (60, 4)
    coarse = side(block_tokens=64, blocks=1, tokens=50)
    assert walk_of(coarse, side()).granules == 4


@pytest.mark.parametrize(
    ("producer", "consumer", "field", "message"),
    [
        (side(name="a"), side(name="b"), "groups", "producer has a, the consumer b"),
        (
            side(name="a"),
            side(name="\x1b[2J"),
            "groups",
            r"the consumer '\\x1b\[2J'; both",
        ),
        (
            Geometry(side(name="a" * 128).groups * 64),
            side(),
            "groups",
            "'a{128}, a{65,66}\\.\\.\\., the",
        ),
        (
            side(),
            side(dtype="float16"),
            "dtype",
            "'kv' differs in dtype: dtype is 'bfloat16' at the producer",
        ),
        (side(), side(blocks=5), "blocks", "producer lists 4 blocks of 16 tokens, the"),
        (side(), side(block_tokens=32), "blocks", "list the blocks of the same tokens"),
        (
            side(tokens=60),
            side(tokens=61),
            "tokens",
            "tokens=60, the consumer tokens=61",
        ),
        (side(), side(tokens=40, blocks=3), "blocks", "consumer 3 blocks .* tokens=40"),
        (
            side(kv_heads=1, shard=(0, 4)),
            side(kv_heads=1, shard=(1, 4)),
            "shard",
            "no KV head in common",
        ),
        (
            side(layers=4, model_layers=8),
            side(layers=4, first_layer=4),
            "first_layer",
            "no layer in common",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_r35_a_mismatch_names_the_field(
    producer: Geometry, consumer: Geometry, field: str, message: str
) -> None:
    with pytest.raises(ProfileMismatch, match=message) as caught:
        negotiate(producer, consumer)
    assert caught.value.fields == (field,)
