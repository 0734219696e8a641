"""Which ranks meet, for any two group sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import KVSpec, UsageError
from kvwire.integrations.vllm.topology import (
    group_specs,
    incoming_route,
    outgoing_route,
    sources,
    targets,
)

POWERS = st.sampled_from([1, 2, 4, 8, 16])


def spec(heads: int, rank: int, size: int) -> KVSpec:
    return KVSpec(
        layers=2,
        kv_heads=max(1, heads // size),
        head_dim=8,
        block_tokens=4,
        shard=(rank, size),
        model_kv_heads=heads,
    )


@given(heads=POWERS, producers=POWERS, consumers=POWERS)
def test_both_ends_agree_who_meets(heads: int, producers: int, consumers: int) -> None:
    fetched = {
        (source, rank)
        for rank in range(consumers)
        for source in sources(spec(heads, rank, consumers), producers)
    }
    served = {
        (rank, target)
        for rank in range(producers)
        for target in targets(spec(heads, rank, producers), consumers)
    }
    assert fetched == served


@given(heads=POWERS, producers=POWERS, consumers=POWERS)
def test_every_head_comes_once(heads: int, producers: int, consumers: int) -> None:
    for rank in range(consumers):
        here = spec(heads, rank, consumers)
        group = group_specs(here, producers)
        got = [
            head
            for source in sources(here, producers)
            for head in group[source].heads
            if head in here.heads
        ]
        assert sorted(got) == list(here.heads)


def test_heads_that_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="cannot be spread over the 3 ranks"):
        sources(spec(4, 0, 1), 3)


def test_a_push_has_a_name_for_each_two_ranks() -> None:
    there = ("a:1", "a:2")
    out = outgoing_route("t", spec(4, 0, 1), there, pushed=True)
    assert [(peer.address, peer.id) for peer in out.peers] == [
        ("a:1", "t/0/0"),
        ("a:2", "t/0/1"),
    ]
    into = incoming_route("t", spec(4, 1, 2), ("b:1",), pushed=True)
    assert [peer.id for peer in into.peers] == ["t/0/1"]


def test_a_group_like_this_one_needs_no_addresses() -> None:
    route = outgoing_route("t", spec(4, 1, 2), (), pushed=False)
    assert [peer.id for peer in route.peers] == ["t/1/1"]
