"""``kvwire bench fragments``, from the command line to the files, on tiny caches."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvwire.cli.bench import fragments_command
from kvwire.cli.bench.case import Contender, Sample
from kvwire.cli.bench.fragment_work import LEFT, work_of
from kvwire.cli.bench.fragments import (
    SAME_HOST,
    TCP,
    FragmentsChoice,
    fragments,
    registered,
)
from kvwire.cli.bench.pair import FragmentPair
from kvwire.cli.bench.sides.fragments_half import FragmentsHalf, Pool
from kvwire.cli.bench.solo import SoloContender
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import KIB, MIB
from kvwire.memory.arena import arena_of
from kvwire.memory.copy import as_fragments

# Each starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)

WORKS = [
    work_of(verb, 4 * KIB, cross_layer=cross, round_bytes=1 * MIB)
    for verb in ("push", "pull")
    for cross in (False, True)
]
POOL_BYTES = max(work.pool_bytes for work in WORKS)
POOL = f"pool_bytes={POOL_BYTES}"
LOCAL = ["transport=local", "loop=asyncio", POOL]


@pytest.mark.usefixtures("sides")
def test_everything_is_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round; every row has a sample of everybody, and the table says so."""
    out, plot = tmp_path / "found.json", tmp_path / "found.svg"
    arguments = ["--transport", "tcp,inproc", "--rounds", "1"]
    arguments += ["--sizes-kib", "4", "1024", "--round-mib", "2"]
    arguments += ["--json", str(out), "--plot", str(plot)]
    assert main(["bench", "fragments", *arguments]) == 0

    printed = capsys.readouterr().out
    assert "push over TCP, a tensor for each layer: GB/s, CPU s/GiB" in printed
    assert "over best other:" in printed
    assert max(map(len, printed.splitlines())) <= 80
    found = json.loads(out.read_text())
    assert len(found["cases"]) == 2 * 2 * 3
    for row in found["cases"]:
        assert not row["failures"]
        layered = not row["work"]["cross_layer"]
        expected = {
            TCP: {"kvwire tcp"},
            SAME_HOST: {"kvwire inproc", "memcpy"} if layered else {"kvwire inproc"},
        }[row["group"]]
        assert set(row["contenders"]) == expected
        for samples in row["contenders"].values():
            assert samples["median"] > 0
            assert len(samples["rounds"]) == 1
    assert "tcp: taken" in found["contenders"]["kvwire tcp"]["transport"]
    assert ET.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("sides")
@pytest.mark.parametrize(
    "contender",
    [
        FragmentPair("tcp", "fragments", ["transport=tcp", "loop=asyncio", POOL]),
        SoloContender("inproc", "inproc", ["transport=inproc", POOL]),
        SoloContender("memcpy", "memcpy", [POOL]),
    ],
    ids=lambda c: c.name,
)
def test_our_own_sides_do_every_work(contender: Contender) -> None:
    assert len(does_every_work(contender)) == len(WORKS)


@pytest.mark.slow
def test_two_processes_move_fragments_in_arenas() -> None:
    contender = FragmentPair("arena", "fragments", [*LOCAL, "memory=arena"])
    assert len(does_every_work(contender)) == len(WORKS)


@pytest.mark.parametrize("in_arena", [False, True])
async def test_a_pool_lies_in_an_arena_if_it_is_asked_for(in_arena: bool) -> None:
    half = FragmentsHalf("local", POOL_BYTES, arena=in_arena)
    pool = Pool(half.memory, WORKS[0], LEFT)
    assert (arena_of(as_fragments(pool.memory.data)) is not None) is in_arena
    half.memory = np.empty(0, np.uint8)
    del pool
    await half.close()


def test_local_takes_part_with_and_without_arenas() -> None:
    choice = FragmentsChoice(
        transports=["local"],
        layer_bytes=[4 * KIB],
        round_bytes=1 * MIB,
        loop="asyncio",
    )
    assert list(fragments(choice).ours) == ["kvwire local", "kvwire local arena"]


def does_every_work(contender: Contender) -> list[Sample]:
    """Checked, then timed; what a round reports is plausible."""
    samples = []
    try:
        contender.start()
        for work in WORKS:
            contender.check(work)
            samples.append(contender.round(work))
    finally:
        contender.stop()
    for work, sample in zip(WORKS, samples, strict=True):
        assert min(sample.values) > 0
        assert sample.moved_bytes == work.nbytes * work.count
        assert sample.cpu_s > 0
    return samples


@pytest.mark.usefixtures("threads")
def test_a_transport_that_cannot_run_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for by name, so the exit status says that it failed."""
    monkeypatch.setenv("KVWIRE_FORBID", "tcp")
    arguments = ["--transport", "tcp", "--sizes-kib", "4"]
    status = main(["bench", "fragments", *arguments, "--round-mib", "1"])
    assert status == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "kvwire tcp failed, 4 KiB push, per-layer, TCP and 3 more:" in printed
    assert "forbid" in printed


def test_a_transport_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fragments", "--transport", "pigeons"]) == CALLED_WRONG
    assert "--transport pigeons: " in capsys.readouterr().err


def test_the_registered_backends_are_the_default() -> None:
    assert {"tcp", "inproc"} <= set(registered())
    assert fragments_command.SIZES_KIB[0] == 4
    assert fragments_command.SIZES_KIB[-1] == 16 * KIB
