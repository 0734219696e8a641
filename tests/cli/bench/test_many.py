"""``kvwire bench many``, on a few connections and tiny caches."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvwire.cli.bench import many
from kvwire.cli.bench.many_work import (
    BESIDE,
    ONE_BY_ONE,
    SMALL_BYTES,
    ManyWork,
)
from kvwire.cli.bench.sides.many_half import ManyHalf
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import MIB

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)


@pytest.mark.usefixtures("sides")
def test_everything_is_measured_and_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many, "TIMED", 5)
    out = tmp_path / "found.json"
    arguments = ["--endpoints", "2", "--transfers", "20", "--large-mib", "2"]
    arguments += ["--others", "2", "--other-mib", "2", "--rounds", "1"]
    assert main(["bench", "many", *arguments, "--json", str(out)]) == 0

    printed = capsys.readouterr().out
    assert "2 x 2 connections. From the call to the outcome." in printed
    assert max(map(len, printed.splitlines())) <= 100
    found = json.loads(out.read_text())
    assert found["contenders"]["kvwire tcp"]["connections"] == 4
    rows = {case["name"]: case["by_size"]["kvwire tcp"] for case in found["cases"]}
    assert list(rows) == [
        "1 MiB alone",
        "1 MiB beside 2 x 2 MiB",
        "1 MiB beside 2 x 2 MiB, priority 1",
        "64 KiB alone",
        "20 at once",
    ]
    mixed = {size: found["count"] for size, found in rows["20 at once"].items()}
    assert mixed == {"64 KiB": 15, "1 MiB": 4, "2 MiB": 1}
    assert all(s["low"] > 0 for sizes in rows.values() for s in sizes.values())


async def test_memory_of_two_works_is_never_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = ManyHalf("tcp", 1)
    work = ManyWork(verb=BESIDE, nbytes=MIB, count=1, others=1, other_bytes=MIB)
    await half.use(work, {})
    kept: list[int] = []
    ones = np.ones

    def watched(nbytes: int, dtype: type[np.uint8]) -> npt.NDArray[np.uint8]:
        kept.append(half._memory.size)
        return ones(nbytes, dtype)

    monkeypatch.setattr(np, "ones", watched)
    await half.use(replace(work, priority=1), {})
    assert kept == []
    await half.use(replace(work, others=2), {})
    assert kept == [0]


async def test_what_is_timed_is_what_was_asked_for() -> None:
    """Every work is checked before the first round: none runs with another's blocks."""
    beside = ManyWork(verb=BESIDE, nbytes=MIB, count=2, others=3, other_bytes=MIB)
    alone = ManyWork(verb=ONE_BY_ONE, nbytes=SMALL_BYTES, count=2)
    left, right = ManyHalf("tcp", 1), ManyHalf("tcp", 1)
    try:
        address = (await right.listen())["address"]
        await asyncio.gather(right.accept(), left.connect(address))
        for work in (beside, alone):
            await asyncio.gather(right.prepare(work), left.use(work, {}))
        for work in (beside, alone):
            served = asyncio.ensure_future(right.serve(work))
            timed = await left.drive(work)
            await served
            assert len(timed["values"]) == 2
            for half, publishes in ((left, False), (right, True)):
                assert half._shares == work.shares(publishes=publishes)[1]
    finally:
        await left.close()
        await right.close()


def test_a_transport_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "many", "--transport", "pigeons"]) == CALLED_WRONG
    assert "--transport pigeons: no such backend" in capsys.readouterr().err
