"""How large the transfers of a work are, and which blocks each of them has."""

from __future__ import annotations

from kvwire.cli.bench.many_work import (
    AT_ONCE,
    BESIDE,
    BLOCK_BYTES,
    MEDIUM_BYTES,
    ONE_BY_ONE,
    SMALL_BYTES,
    ManyWork,
    scattered,
)
from kvwire.limits import MIB


def test_the_sizes_of_a_mix_are_shares_of_all() -> None:
    work = ManyWork(verb=AT_ONCE, nbytes=4 * MIB, count=1000)
    sizes = work.sizes()
    assert [sizes.count(s) for s in (SMALL_BYTES, MEDIUM_BYTES, 4 * MIB)] == [
        *(800, 180, 20)
    ]
    assert work.moved_bytes == sum(sizes)
    for publishes in (False, True):
        blocks, shares = work.shares(publishes=publishes)
        assert blocks * BLOCK_BYTES == sum(sizes)
        assert [len(share) * BLOCK_BYTES for share in shares] == sizes


def test_one_by_one_they_share_their_blocks() -> None:
    work = ManyWork(verb=ONE_BY_ONE, nbytes=MIB, count=9, others=2, other_bytes=2 * MIB)
    assert work.shares(publishes=False)[0] * BLOCK_BYTES == 5 * MIB
    assert work.moved_bytes == 9 * MIB


def test_who_publishes_has_the_blocks_of_the_others_once() -> None:
    work = ManyWork(verb=BESIDE, nbytes=MIB, count=9, others=3, other_bytes=2 * MIB)
    blocks, (own, *others) = work.shares(publishes=True)
    assert blocks * BLOCK_BYTES == 3 * MIB
    assert others == [others[0]] * 3
    assert sorted(own + others[0]) == list(range(blocks))
    blocks, shares = work.shares(publishes=False)
    assert blocks * BLOCK_BYTES == 7 * MIB
    assert sorted(block for share in shares for block in share) == list(range(blocks))


def test_no_block_belongs_to_two_transfers() -> None:
    sizes = [BLOCK_BYTES, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES]
    parts = scattered(sizes, 8)
    assert [len(part) for part in parts] == [1, 3, 2]
    blocks = [block for part in parts for block in part]
    assert len(set(blocks)) == 6
    assert set(blocks) <= set(range(8))
