"""Which ranks meet, for any numbers of ranks and stages of two engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import KVSpec, UsageError
from kvwire_vllm.metadata import LoadPrompt, SendPrompt
from kvwire_vllm.topology import (
    OwnRank,
    check_ranks,
    group_specs,
    lacking,
    rank_route,
    shard_sources,
    sources,
    targets,
)
from packages.vllm.tests.support.fakes import SHAPE

LAYERS = 7
POWERS = st.sampled_from([1, 2, 4, 8])
# Ranks of each stage, and stages.
Shape: TypeAlias = tuple[int, int]
SHAPES = st.tuples(POWERS, st.integers(1, 4))


def ranks_of(heads: int, shape: Shape) -> list[KVSpec]:
    """What each rank of an engine holds, in order."""
    whole = KVSpec(
        layers=LAYERS, kv_heads=heads, head_dim=8, block_tokens=4, model_kv_heads=heads
    )
    return group_specs(whole, *shape)


def cells(spec: KVSpec, heads: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """What a rank holds of a model, as (layer, head)."""
    held = np.zeros((LAYERS, heads), np.bool_)
    held[np.ix_(list(spec.layer_indices), list(spec.heads))] = True
    return held


@given(heads=POWERS, producing=SHAPES, consuming=SHAPES)
def test_both_ends_agree_and_each_cell_comes_once(
    heads: int, producing: Shape, consuming: Shape
) -> None:
    there, here = ranks_of(heads, producing), ranks_of(heads, consuming)
    fetched = {
        (at, to) for to, spec in enumerate(here) for at in sources(spec, *producing)
    }
    served = {
        (at, to) for at, spec in enumerate(there) for to in targets(spec, *consuming)
    }
    assert fetched == served
    for to, spec in enumerate(here):
        parts = [there[at] for at, into in fetched if into == to]
        held = cells(spec, heads)
        brought = sum(cells(part, heads) & held for part in parts)
        assert np.array_equal(brought, held.astype(int))


@given(heads=POWERS, consuming=SHAPES, data=st.data())
def test_what_no_part_brings_is_named(
    heads: int, consuming: Shape, data: st.DataObject
) -> None:
    here = data.draw(st.sampled_from(ranks_of(heads, consuming)))
    there = [
        one for shape in data.draw(st.lists(SHAPES)) for one in ranks_of(heads, shape)
    ]
    parts = [one for one in there if data.draw(st.booleans())]
    held = cells(here, heads)
    brought = np.zeros_like(held)
    said = []
    for part in parts:
        both = cells(part, heads) & held
        rows, columns = np.nonzero(both)
        if rows.size:
            box = range(rows[0], rows[-1] + 1), range(columns[0], columns[-1] + 1)
            said.append({"kv": box})
        brought |= both
    left = np.argwhere(held & ~brought)
    want = ""
    if left.size:
        want = f"layer {left[0][0]}, KV head {left[0][1]} of cache group 'kv'"
    assert lacking({"kv": here}, said) == want


def test_a_group_that_nobody_brings() -> None:
    (spec,) = ranks_of(4, (1, 1))
    whole = {"a": (range(LAYERS), range(4))}
    assert lacking({"a": spec}, [whole]) == ""
    assert lacking({"a": spec, "b": spec}, [whole]) == (
        "layer 0, KV head 0 of cache group 'b'"
    )


def test_what_cannot_be_split() -> None:
    (spec,) = ranks_of(4, (1, 1))
    assert sources(spec, 1, LAYERS + 1) == targets(spec, 1, LAYERS + 1) == ()
    check_ranks([SHAPE], 6, 3)
    with pytest.raises(
        UsageError, match="4 addresses, which cannot be divided among 3"
    ):
        check_ranks([SHAPE], 4, 3)
    with pytest.raises(UsageError, match="4 KV heads"):
        check_ranks([SHAPE], 6, 2)


def met(
    kind: type[SendPrompt | LoadPrompt], own: OwnRank, *there: str, stages: int = 1
) -> tuple[str, ...]:
    """Addresses of the ranks that a rank meets."""
    more: dict[str, Any] = {"tokens": 1} if kind is SendPrompt else {}
    moved = kind(request_id="r", transfer_id="t", remote=there, stages=stages, **more)
    return rank_route(moved, own).peers


def test_a_rank_meets_those_that_hold_what_it_holds() -> None:
    (whole,) = ranks_of(4, (1, 1))
    assert met(SendPrompt, OwnRank(whole), "a:1", "a:2") == ("a:1", "a:2")
    half = OwnRank(ranks_of(4, (2, 1))[1])
    assert met(LoadPrompt, half, "b:1") == ("b:1",)
    last = OwnRank(ranks_of(4, (2, 2))[3], stage=(1, 2))
    assert met(LoadPrompt, last, "a:1", "a:2", stages=2) == ("a:2",)
    # Without addresses: those of an engine like this one.
    assert met(SendPrompt, last) == ("",)


@pytest.mark.parametrize(
    ("here", "rank", "there", "found"),
    [
        (1, 0, 4, (0, 1, 2, 3)),
        (2, 1, 4, (2, 3)),
        (4, 3, 2, (1,)),
        (4, 2, 4, (2,)),
        (8, 5, 2, (1,)),
        (2, 1, 16, (9, 11, 13, 15)),
        (16, 3, 16, (3,)),
    ],
)
def test_each_head_comes_from_one_shard(
    here: int, rank: int, there: int, found: tuple[int, ...]
) -> None:
    """Splits and merges; of replicas the one that this rank shares fairly."""
    assert shard_sources(ranks_of(8, (here, 1))[rank], ranks_of(8, (there, 1))) == found


def test_mla_is_read_once() -> None:
    """Decode ranks spread over the prefill ranks, each reading from one."""
    latent = replace(ranks_of(1, (1, 1))[0], components=1)
    there = [replace(latent, shard=(rank, 4)) for rank in range(4)]
    found = [shard_sources(replace(latent, shard=(r, 8)), there) for r in range(8)]
    assert found == [(rank % 4,) for rank in range(8)]


def test_a_head_that_nobody_holds_is_named() -> None:
    with pytest.raises(UsageError, match="no peer of 3 holds KV head 6"):
        shard_sources(ranks_of(8, (1, 1))[0], ranks_of(8, (4, 1))[:3])
