"""Where a map puts the parts of a walk; that the bytes are right is in test_plan."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvwire.kv.canonical import negotiate
from kvwire.kv.geometry import describe
from kvwire.kv.layout import AxisOrder
from kvwire.kv.mapping import GroupMap, Steps
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from kvwire.limits import MIB

SPEC = KVSpec(layers=3, kv_heads=2, head_dim=4, block_tokens=2)
BLOCK_BYTES = SPEC.layer_block_bytes


def map_of(
    cache: PagedCache, ids: list[int], wanted: list[bool] | None = None
) -> GroupMap:
    """The map of a cache that is both ends of a transfer."""
    lists = cache.block_lists(ids)
    here = describe(cache, lists)
    (walk,) = negotiate(here, here)
    bits = np.array(wanted or [True] * len(ids), np.bool_)
    return GroupMap(Steps(walk, cache.groups["kv"]), lists["kv"], bits)


def offsets(group_map: GroupMap, layers: range, granules: slice) -> list[int]:
    """Where each fragment begins, from the beginning of the tensor."""
    found = group_map.fragments(layers, granules)
    base = int(group_map.memory.bases.min())
    return [address - base for address in found.addresses.tolist()]


def blocks(*numbers: int) -> list[int]:
    """The offset of each, counted in blocks of one layer."""
    return [number * BLOCK_BYTES for number in numbers]


CROSS = PagedCache(SPEC, np.zeros((9, 3, 2, 2, 2, 4), np.uint16))
LAYERS = PagedCache(
    SPEC,
    np.zeros((3, 9, 2, 2, 2, 4), np.uint16),
    AxisOrder("layer block kv token head dim"),
)


def test_what_lies_together_is_one_fragment() -> None:
    """A block of all layers, and blocks that are neighbours; not what is not wanted."""
    cross = map_of(CROSS, ids=[4, 1, 7])
    assert offsets(cross, range(3), slice(0, 2)) == blocks(12, 3)
    assert offsets(cross, range(1, 3), slice(1, 3)) == blocks(4, 22)
    found = map_of(LAYERS, ids=[3, 4, 5])
    assert found.fragments(range(1), slice(0, 3)).lengths.tolist() == blocks(3)
    some = map_of(LAYERS, ids=[4, 1, 7], wanted=[True, False, True])
    assert some.moved(slice(1, 3)).tolist() == [2]
    assert offsets(some, range(1), slice(0, 3)) == blocks(4, 7)
    assert len(some.fragments(range(1), slice(1, 2))) == 0


def test_a_large_block_takes_no_memory_for_its_places() -> None:
    """What lies together is not listed element by element."""
    large = KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=4 * MIB,
        block_tokens=1,
        dtype="uint8",
        components=1,
        kind="state",
    )
    memory = np.zeros((2, 1, 1, large.head_dim), np.uint8)
    cache = PagedCache.grouped({"kv": (large, [memory])})
    tracemalloc.start()
    try:
        found = map_of(cache, [1]).fragments(range(1), slice(0, 1))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert found.nbytes == large.layer_block_bytes


@pytest.mark.parametrize("cache", [CROSS, LAYERS], ids=["cross", "layers"])
def test_the_last_answer_is_moved_only_where_it_fits(cache: PagedCache) -> None:
    """Asked in any order, each answer is that of a map that was never asked before."""
    asked = [
        (range(1), slice(0, 2)),
        (range(2, 3), slice(0, 2)),
        (range(2, 3), slice(0, 1)),
        (range(2), slice(0, 1)),
        (range(1, 3), slice(0, 1)),
        (range(3), slice(0, 2)),
        (range(1), slice(0, 2)),
    ]
    used = map_of(cache, ids=[4, 1])
    base = int(used.memory.bases.min())
    for layers, granules in asked:
        fresh = map_of(cache, ids=[4, 1])
        found = used.fragments(layers, granules)
        expected = fresh.fragments(layers, granules)
        assert offsets(used, layers, granules) == offsets(fresh, layers, granules)
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.owner is used.memory.owners
        assert int(found.addresses.min()) >= base


def test_layers_that_are_not_equally_far_apart() -> None:
    """Moving the last answer must not assume that one distance fits all layers."""
    buffer = np.zeros((6, 9, 2, 2, 2, 4), np.uint16)
    found = map_of(PagedCache(SPEC, [buffer[0], buffer[1], buffer[5]]), ids=[2])
    step = 9 * BLOCK_BYTES
    at = 2 * BLOCK_BYTES
    assert offsets(found, range(2), slice(0, 1)) == [at, step + at]
    assert offsets(found, range(1, 3), slice(0, 1)) == [step + at, 5 * step + at]
