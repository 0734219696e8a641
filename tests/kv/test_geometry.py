"""What a peer says of its share is checked before any number of it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvwire import limits
from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv.canonical import negotiate
from kvwire.kv.geometry import Geometry, GroupGeometry, describe
from kvwire.kv.layout import AXES
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=2, block_tokens=4)


def cache() -> PagedCache:
    groups = {
        name: (SPEC, [np.zeros((9, 2, 4, 1, 2), np.uint16) for _ in range(2)])
        for name in ("full", "window")
    }
    return PagedCache.grouped(groups)


def geometry(tokens: Any = None) -> Geometry:
    here = cache()
    return describe(here, here.block_lists({"full": [1, 2], "window": [3]}), tokens)


def group(**fields: Any) -> GroupGeometry:
    given: dict[str, Any] = {
        "name": "kv",
        "spec": SPEC,
        "order": AXES,
        "blocks": 2,
    } | fields
    return GroupGeometry(**given)


def test_an_address_is_never_told() -> None:
    """Nor a block id: what is told is text and small numbers."""
    flat = repr(geometry().encoded)
    for number in cache().groups["full"].bases.ravel().tolist():
        assert str(number) not in flat


def test_valid_tokens() -> None:
    """Of all groups, of some, or full blocks."""
    assert [g.capacity for g in geometry().groups] == [8, 4]
    assert [g.capacity for g in geometry({"full": 5}).groups] == [5, 4]
    assert [g.tokens for g in geometry({"full": 5, "window": 1}).groups] == [5, 1]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (5, "group 'window': tokens=5 is 2 blocks of 4 tokens, but the list has 1"),
        ({"full": 4}, "group 'full': tokens=4 is 1 blocks"),
        ({"full": -1}, "tokens=-1"),
        ({"kv": 4}, "tokens: unknown group kv; the groups are full, window"),
    ],
    ids=str,
)
def test_tokens_that_do_not_fit(tokens: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        geometry(tokens)


def test_counts_are_bounded() -> None:
    with pytest.raises(UsageError, match=f"{limits.KV_BLOCKS_MAX + 1} blocks; 0 to"):
        group(blocks=limits.KV_BLOCKS_MAX + 1)
    with pytest.raises(UsageError, match="-1 blocks"):
        group(blocks=-1)
    with pytest.raises(UsageError, match=r"order .* is not one of"):
        group(order=(*AXES[:-1], "head"))


GOOD = ("kv", SPEC.to_pairs(), " ".join(AXES), 2, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "not a list of groups"),
        ((), "0 groups; 1 to 64"),
        ((GOOD,) * 65, "65 groups; 1 to 64"),
        (("kv",), "a group must be .name, spec"),
        ((GOOD[:4],), "a group must be .name, spec"),
        (((7, *GOOD[1:]),), "a group's name is not a short string"),
        ((("", *GOOD[1:]),), "a group's name is not a short string"),
        ((("x" * 999, *GOOD[1:]),), "a group's name is not a short string"),
        (((*GOOD[:2], "x" * 999, *GOOD[3:]),), "the order of group 'kv' is"),
        (((*GOOD[:2], None, *GOOD[3:]),), "the order of group 'kv' is"),
        (((*GOOD[:2], "block dim", *GOOD[3:]),), "is not one of"),
        (((*GOOD[:3], 2.0, None),), "the counts of group 'kv' are not numbers"),
        (((*GOOD[:3], True, None),), "the counts of group 'kv' are not numbers"),
        (((*GOOD[:3], 2, "8"),), "the counts of group 'kv' are not numbers"),
        (((*GOOD[:3], 2**70, None),), "blocks; 0 to"),
        (((*GOOD[:3], 2, 2**70),), "tokens=1180591620717411303424"),
        (((GOOD[0], (), *GOOD[2:]),), "the peer's layers is ''"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_r35_what_a_peer_says_is_checked(fields: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Geometry.decode(fields)


def test_fields_of_a_newer_version_are_ignored() -> None:
    (found,) = Geometry.decode([[*GOOD, "newer"]]).groups
    assert (found.name, found.blocks, found.tokens) == ("kv", 2, None)


# --- two descriptions that do not fit are told apart by field -------------------------


CANONICAL = KVSpec(layers=8, kv_heads=4, head_dim=64, block_tokens=16)

NHD = "layer block kv token head dim"


def side(order: str = NHD, blocks: int = 4, **fields: Any) -> Geometry:
    """One group of full blocks, unless ``tokens`` says otherwise."""
    tokens = fields.pop("tokens", None)
    name = fields.pop("name", "kv")
    spec = replace(CANONICAL, **fields)
    axes = tuple(order.split())
    return Geometry(
        (GroupGeometry(name=name, spec=spec, order=axes, blocks=blocks, tokens=tokens),)
    )


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
        (side(), side(components=1), "components", "'kv' differs in components"),
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
