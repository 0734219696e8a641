"""``kvwire bench many``, on a few connections and tiny caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvwire.cli.bench import many
from kvwire.cli.bench.many import (
    AT_ONCE,
    BESIDE,
    BLOCK_BYTES,
    MEDIUM_BYTES,
    ONE_BY_ONE,
    SMALL_BYTES,
    ManySide,
    ManyWork,
)
from kvwire.cli.bench.side import JoinedSide
from kvwire.limits import MIB
from tests.cli.bench.conftest import Bench

ONE = {"transport": "tcp", "endpoints": "1"}

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)


def test_everything_is_measured_and_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "TIMED", 5)
    arguments = ["--endpoints", "2", "--transfers", "20", "--large-mib", "2"]
    arguments += ["--others", "2", "--other-mib", "2", "--rounds", "1"]
    found, printed = bench("many", *arguments)
    assert "2 x 2 connections. From the call to the outcome." in printed
    assert found["contenders"]["kvwire tcp"]["connections"] == 4
    assert "kvwire tcp, 1 MiB beside 2 x 2 MiB: p99 " in printed
    rows = {row["name"]: row["contenders"]["kvwire tcp"] for row in found["cases"]}
    counts = {name: row["count"] for name, row in rows.items()}
    assert counts == {
        "1 MiB alone": 5,
        "1 MiB beside 2 x 2 MiB": 5,
        "1 MiB beside 2 x 2 MiB, priority 1": 5,
        "64 KiB alone": 5,
        "20 at once: 64 KiB": 15,
        "20 at once: 1 MiB": 4,
        "20 at once: 2 MiB": 1,
    }
    assert all(row["low"] > 0 for row in rows.values())


def test_the_sizes_of_a_mix_are_shares_of_all() -> None:
    work = ManyWork(verb=AT_ONCE, nbytes=4 * MIB, count=1000)
    sizes = work.sizes()
    counts = [sizes.count(s) for s in (SMALL_BYTES, MEDIUM_BYTES, 4 * MIB)]
    assert counts == [800, 180, 20]
    assert work.moved_bytes == sum(sizes)
    for publishes in (False, True):
        blocks, shares = work.shares(publishes=publishes)
        assert blocks * BLOCK_BYTES == sum(sizes)
        assert [len(share) * BLOCK_BYTES for share in shares] == sizes


def test_who_publishes_has_the_blocks_of_the_others_once() -> None:
    work = ManyWork(verb=BESIDE, nbytes=MIB, count=9, others=3, other_bytes=2 * MIB)
    assert work.moved_bytes == 9 * MIB
    blocks, (own, *others) = work.shares(publishes=True)
    assert blocks * BLOCK_BYTES == 3 * MIB
    assert others == [others[0]] * 3
    assert sorted(own + others[0]) == list(range(blocks))
    blocks, shares = work.shares(publishes=False)
    assert blocks * BLOCK_BYTES == 7 * MIB
    assert sorted(block for share in shares for block in share) == list(range(blocks))


async def test_memory_of_two_works_is_never_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = ManySide(ONE)
    work = ManyWork(verb=BESIDE, nbytes=MIB, count=1, others=1, other_bytes=MIB)
    await side.use(work, None)
    kept: list[int] = []
    ones = np.ones

    def watched(nbytes: int, dtype: type[np.uint8]) -> npt.NDArray[np.uint8]:
        kept.append(side.memory.size)
        return ones(nbytes, dtype)

    monkeypatch.setattr(np, "ones", watched)
    await side.use(replace(work, priority=1), None)
    assert kept == []
    await side.use(replace(work, others=2), None)
    assert kept == [0]


async def test_what_is_timed_is_what_was_asked_for() -> None:
    beside = ManyWork(verb=BESIDE, nbytes=MIB, count=2, others=3, other_bytes=MIB)
    alone = ManyWork(verb=ONE_BY_ONE, nbytes=SMALL_BYTES, count=2)
    left, right = ManySide(ONE), ManySide(ONE)
    both = JoinedSide(left, right)
    try:
        await both.connect(None)
        for work in (beside, alone, beside):
            await both.use(work, None)
            assert len((await both.drive(work))["values"]) == 2
            for side, publishes in ((left, False), (right, True)):
                assert side.shares == work.shares(publishes=publishes)[1]
    finally:
        await both.close()
