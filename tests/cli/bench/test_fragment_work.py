"""The same fragments for everybody: their count, their places, kvwire's own plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.cli.bench.fragment_work import (
    LAYERS_MAX,
    LEFT,
    RIGHT,
    FragmentWork,
    block_ids,
    offsets,
    work_of,
)
from kvwire.cli.bench.sides.fragments_half import Pool
from kvwire.limits import KIB, MIB

works = st.builds(
    work_of,
    st.sampled_from(["push", "pull"]),
    st.sampled_from([4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB]),
    cross_layer=st.booleans(),
    round_bytes=st.sampled_from([1 * MIB, 64 * MIB, 100 * MIB]),
)


@given(works)
def test_fragments_are_as_many_bytes_as_blocks(work: FragmentWork) -> None:
    assert work.nbytes * work.count == work.blocks * work.layers * work.layer_bytes
    assert 1 <= work.layers <= LAYERS_MAX
    assert work.count >= 1


@given(works, st.sampled_from([LEFT, RIGHT]))
def test_no_two_fragments_meet_or_follow_each_other(
    work: FragmentWork, side: int
) -> None:
    places = np.sort(offsets(work, side))
    assert len(places) == work.count
    assert places[0] >= 0
    assert places[-1] + work.nbytes <= work.pool_bytes
    assert np.all(np.diff(places) > work.nbytes)


def test_both_sides_have_them_in_different_places() -> None:
    work = work_of("push", 4 * KIB, cross_layer=False, round_bytes=16 * MIB)
    assert np.array_equal(block_ids(work, LEFT), block_ids(work, LEFT))
    assert not np.array_equal(block_ids(work, LEFT), block_ids(work, RIGHT))


@pytest.mark.parametrize("cross_layer", [False, True])
def test_the_offsets_of_peers_are_where_the_cache_has_its_blocks(
    cross_layer: bool,
) -> None:
    """What kvwire reads off its tensors, beside what the others are given."""
    work = work_of("push", 4 * KIB, cross_layer=cross_layer, round_bytes=1 * MIB)
    memory = np.zeros(work.pool_bytes, np.uint8)
    pool = Pool(memory, work, LEFT)
    group = pool.cache.groups["kv"]
    starts = group.bases[:, 0][:, None] + np.array(pool.blocks) * group.strides["block"]
    if cross_layer:
        starts = starts[:1]
    expected = offsets(work, LEFT) + memory.ctypes.data
    assert starts.ravel().tolist() == expected.tolist()
