"""Spaces: what makes two blocks of one hash the same block, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire import KVSpec, PagedCache, UsageError
from kvwire.kv.layout import AxisOrder
from kvwire_store import namespace
from tests.support.caches import STORED as SPEC

NAMESPACE = namespace.Namespace("kv", SPEC)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"kv_heads": 4},
        {"head_dim": 16},
        {"block_tokens": 8},
        {"dtype": "bfloat16"},
        {"components": 1},
        {"fingerprint": "another"},
        {"shard": (1, 2)},
        {"first_layer": 2},
        {"model_layers": 4},
    ],
    ids=str,
)
def test_whatever_differs_makes_another_space(change: dict[str, Any]) -> None:
    other = namespace.Namespace("kv", replace(SPEC, **change))
    assert other.digest != NAMESPACE.digest
    assert other != NAMESPACE
    assert NAMESPACE.differing(other) == other.differing(NAMESPACE)
    (field,) = change
    assert any(name.startswith(field) for name in NAMESPACE.differing(other))


def test_the_group_is_a_part_of_it() -> None:
    other = namespace.Namespace("window", SPEC)
    assert other.digest != NAMESPACE.digest
    assert NAMESPACE.differing(other) == ("group",)
    both = namespace.Namespace("window", replace(SPEC, layers=1))
    assert NAMESPACE.differing(both)[0] == "group"
    assert NAMESPACE.differing(NAMESPACE) == ()


def test_a_digest_is_the_same_everywhere_and_for_ever() -> None:
    """It is on disks and in the names of objects."""
    assert NAMESPACE.digest.hex() == "583a701094f9b00b0095591c8ceb279d"
    assert len(NAMESPACE.digest) == namespace.DIGEST_BYTES


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
@settings(max_examples=100)
def test_no_text_runs_over_into_the_next(group: str, other: str, more: str) -> None:
    """A group that ends where a fingerprint begins is not another group's."""
    one = namespace.Namespace(group + more, replace(SPEC, fingerprint=other))
    two = namespace.Namespace(group, replace(SPEC, fingerprint=more + other))
    same = (group + more, other) == (group, more + other)
    assert (one.digest == two.digest) == same


def test_an_order_is_a_number_for_ever() -> None:
    """The first and the last of them, and none that stands for no block."""
    assert len(set(namespace.ORDERS)) == len(namespace.ORDERS) == 120
    assert namespace.ORDERS[0] == ("layer", "kv", "token", "head", "dim")
    assert namespace.ORDERS[7] == ("layer", "token", "kv", "dim", "head")
    assert namespace.ORDERS[119] == ("dim", "head", "token", "kv", "layer")
    assert len(namespace.ORDERS) <= namespace.ABSENT


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("layer block kv token head dim", "layer kv token head dim"),
        ("block layer kv head token dim", "layer kv head token dim"),
        ("kv layer block token head dim", "kv layer token head dim"),
    ],
)
def test_images_have_the_order_of_their_cache(layout: str, order: str) -> None:
    extents = {"block": 3, "layer": 2, "kv": 2, "token": 4, "head": 2, "dim": 8}
    array = np.zeros([extents[axis] for axis in layout.split()], np.float16)
    cache = PagedCache(SPEC, array, AxisOrder(layout))
    (group,) = cache.groups.values()
    assert namespace.ORDERS[namespace.order_of(group.order)] == tuple(order.split())
    assert namespace.namespace_of(group, None) == NAMESPACE
    assert namespace.namespace_of(group, 4) == NAMESPACE
    assert namespace.namespace_of(group, 8) == namespace.Namespace(
        group.name, replace(SPEC, block_tokens=8)
    )


@pytest.mark.parametrize("tokens", [0, -1, 2**40, 1.5, True, "4"])
def test_tokens_of_a_hash_out_of_range(tokens: Any) -> None:
    cache = PagedCache(
        SPEC, np.zeros((2, 3, 2, 4, 2, 8), np.float16), AxisOrder(_LAYOUT)
    )
    (group,) = cache.groups.values()
    with pytest.raises(UsageError, match="tokens that one hash covers"):
        namespace.namespace_of(group, tokens)


_LAYOUT = "layer block kv token head dim"


def test_a_spec_that_is_written_otherwise_is_the_same_space() -> None:
    """What follows from other fields need not be said."""
    spec = KVSpec(
        layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16",
        model_layers=2, model_kv_heads=2,
    )  # fmt: skip
    assert namespace.Namespace("kv", spec).digest == NAMESPACE.digest
