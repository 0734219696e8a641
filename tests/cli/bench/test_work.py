"""Memory of a work: its blocks lie apart, where kvwire and the digest read them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.cli.bench.command import VERBS, work_of
from kvwire.cli.bench.work import ARENA, LEFT, RIGHT, BenchMemory, Pool, Work
from kvwire.limits import KIB, KV_LAYERS_MAX, MIB
from kvwire.memory.arena import arena_of
from kvwire.memory.copy import as_fragments

WORKS = [
    work_of(verb, 4 * KIB, cross_layer=cross, round_bytes=1 * MIB)
    for verb in VERBS
    for cross in (False, True)
]


@pytest.mark.parametrize("in_arena", [False, True])
def test_a_pool_lies_in_an_arena_if_it_is_asked_for(in_arena: bool) -> None:
    memory = BenchMemory(LEFT, {"memory": ARENA} if in_arena else {})
    memory.have(WORKS[0], checks=False)
    assert (arena_of(as_fragments(memory.bytes.data)) is not None) is in_arena
    memory.close()


works = st.builds(
    work_of,
    st.sampled_from(VERBS),
    st.sampled_from([4 * KIB, 64 * KIB, 1 * MIB, 4 * MIB]),
    cross_layer=st.booleans(),
    round_bytes=st.sampled_from([1 * MIB, 10 * MIB]),
)


@given(works, st.sampled_from([LEFT, RIGHT]))
def test_no_two_fragments_meet_or_follow_each_other(work: Work, side: int) -> None:
    assert work.nbytes == work.blocks * work.layers * work.layer_bytes
    assert 1 <= work.layers <= KV_LAYERS_MAX
    pool = Pool(np.empty(work.memory_bytes, np.uint8), work, side)
    places = np.sort(pool.rows)
    assert len(places) == work.fragments
    assert 0 <= places[0] <= places[-1] < work.spread * work.fragments
    assert np.all(np.diff(places) > 1)


@pytest.mark.parametrize("work", WORKS[:2], ids=lambda work: work.layout)
def test_rows_are_where_the_cache_has_its_blocks(work: Work) -> None:
    """What kvwire reads off its tensors, and where the bytes are compared."""
    pool, other = (
        Pool(np.zeros(work.memory_bytes, np.uint8), work, side)
        for side in (LEFT, RIGHT)
    )
    assert pool.blocks != other.blocks
    group = pool.cache.groups["kv"]
    starts = group.bases[:, 0][:, None] + np.array(pool.blocks) * group.strides["block"]
    if work.cross_layer:
        starts = starts[:1]
    nbytes = work.nbytes // work.fragments
    expected = pool.rows * nbytes + pool.memory.ctypes.data
    assert starts.ravel().tolist() == expected.tolist()


@pytest.mark.parametrize("beside", [False, True])
def test_a_digest_shows_a_byte_that_has_changed_in_a_block_or_beside_it(
    beside: bool,
) -> None:
    work = WORKS[0]
    memory = np.zeros(work.memory_bytes, np.uint8)
    pool = Pool(memory, work, RIGHT)
    pool.mark_beside()
    before = pool.digest()
    first = int(pool.rows[0]) ^ beside
    memory[first * work.layer_bytes] ^= 1
    after = pool.digest()
    assert after != before
    assert after.endswith(" and more on the right side") is beside
