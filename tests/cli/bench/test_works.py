"""What the sides of benchmarks do: blocks that lie apart, the bytes of works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.cli.bench import many, overlap
from kvwire.cli.bench.fragments import LAYERS_MAX, VERBS, contenders, work_of
from kvwire.cli.bench.many import AT_ONCE, BESIDE, BLOCK_BYTES, ManyMemory, ManyWork
from kvwire.cli.bench.operations import ARENA, LEFT, RIGHT, BenchMemory, OpsWork, Pool
from kvwire.cli.bench.overlap import efficiency
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.side import Bench
from kvwire.limits import KIB, MIB
from kvwire.memory.arena import arena_of
from kvwire.memory.copy import as_fragments
from tests.cli.bench.contenders import Scripted, case, does, measured

# --- fragments ------------------------------------------------------------------------

WORKS = [
    work_of(verb, 4 * KIB, cross_layer=cross, round_bytes=1 * MIB)
    for verb in VERBS
    for cross in (False, True)
]
POOL_BYTES = max(work.memory_bytes for work in WORKS)


def does_every_work(contender: Contender) -> bool:
    with contender.start() as pair:
        for work in WORKS:
            does(pair, work)
    return True


@pytest.mark.slow
def test_local_moves_fragments_between_processes_with_and_without_arenas() -> None:
    both = [one for _, one in contenders("local", {})]
    assert [one.name for one in both] == ["kvwire local", "kvwire local arena"]
    for one in both:
        assert does_every_work(one)


@pytest.mark.parametrize("in_arena", [False, True])
async def test_a_pool_lies_in_an_arena_if_it_is_asked_for(in_arena: bool) -> None:
    memory = BenchMemory(Bench({"memory": ARENA} if in_arena else {}))
    memory.have(WORKS[0])
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
def test_no_two_fragments_meet_or_follow_each_other(work: OpsWork, side: int) -> None:
    assert work.nbytes == work.blocks * work.layers * work.layer_bytes
    assert 1 <= work.layers <= LAYERS_MAX
    pool = Pool(np.empty(work.memory_bytes, np.uint8), work, side)
    places = np.sort(pool.rows)
    assert len(places) == work.fragments
    assert 0 <= places[0] <= places[-1] < work.spread * work.fragments
    assert np.all(np.diff(places) > 1)


@pytest.mark.parametrize("work", WORKS[:2], ids=lambda work: work.layout)
def test_rows_are_where_the_cache_has_its_blocks(work: OpsWork) -> None:
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


# --- many -----------------------------------------------------------------------------


def test_the_sizes_of_a_mix_are_shares_of_all() -> None:
    work = ManyWork(verb=AT_ONCE, nbytes=4 * MIB, count=1000)
    sizes = work.sizes()
    counts = [sizes.count(s) for s in (many.SMALL_BYTES, many.MEDIUM_BYTES, 4 * MIB)]
    assert counts == [800, 180, 20]
    assert work.moved_bytes == sum(sizes)
    for publishes in (False, True):
        own, others = work.shares(publishes=publishes)
        assert [len(share) * BLOCK_BYTES for share in own] == sizes
        assert others == []


def test_who_publishes_has_the_blocks_of_the_others_once() -> None:
    work = ManyWork(verb=BESIDE, nbytes=MIB, count=9, others=3, other_bytes=2 * MIB)
    assert work.moved_bytes == 9 * MIB
    for publishes, count in ((True, 3), (False, 7)):
        (own,), others = work.shares(publishes=publishes)
        assert len(own) * BLOCK_BYTES == MIB
        assert len(others) == 3
        assert (others == [others[0]] * 3) is publishes
        different = set(own).union(*others)
        assert different == set(range(count * MIB // BLOCK_BYTES))


async def test_memory_of_two_works_is_never_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = ManyMemory(Bench({}))
    work = ManyWork(verb=BESIDE, nbytes=MIB, count=1, others=1, other_bytes=MIB)
    memory.have(work)
    kept: list[int] = []
    empty = np.empty

    def watched(shape: Any, dtype: Any = float) -> npt.NDArray[Any]:
        if shape == 3 * MIB:
            kept.append(memory.bytes.size)
        return empty(shape, dtype)

    monkeypatch.setattr(np, "empty", watched)
    memory.have(replace(work, priority=1))
    assert kept == []
    memory.have(replace(work, others=2))
    assert kept == [0]


# --- overlap --------------------------------------------------------------------------

MS = 1e-3


@pytest.mark.parametrize(
    ("compute_ms", "streamed_ms", "whole_ms", "ideal_ms", "expected"),
    [
        (4.0, 2.0, 20.0, 2.0, 1.0),
        (4.0, 20.0, 20.0, 2.0, 0.0),
        (4.0, 11.0, 20.0, 2.0, 0.5),
        # Little more than one layer, of much that could be hidden: still too late.
        (100.0, 3.5, 200.0, 2.0, 196.5 / 198),
        # The compute of the other nine layers hides 9 ms and no more.
        (1.0, 11.0, 20.0, 11.0, 1.0),
        # Nothing can be hidden of a transfer that takes as long as one layer.
        (4.0, 2.0, 2.0, 2.0, 0.0),
    ],
)
def test_the_efficiency_is_what_was_hidden_of_what_could_be(
    compute_ms: float,
    streamed_ms: float,
    whole_ms: float,
    ideal_ms: float,
    expected: float,
) -> None:
    work = replace(
        overlap.work_of(overlap.EXPOSED, 10, 64 * KIB), compute_s=compute_ms * MS
    )
    times = zip(overlap.WAYS, (streamed_ms, whole_ms, 2.0), strict=True)
    ways = [Scripted(way, [[ms * MS]]) for way, ms in times]
    (finding,) = measured(case(*ways, ours=3, work=work))
    found = efficiency(finding)
    assert found.ideal_s == pytest.approx(ideal_ms * MS)
    assert found.efficiency == pytest.approx(expected)
