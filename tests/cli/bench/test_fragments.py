"""``kvwire bench fragments``, from the command line to the files, on tiny caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend import Availability, Capabilities, registry
from kvwire.cli.bench.fragments import (
    ARENA,
    LAYERS_MAX,
    LEFT,
    RIGHT,
    SAME_HOST,
    TCP,
    FragmentsChoice,
    FragmentsSide,
    FragmentWork,
    InprocSide,
    MemcpySide,
    Pool,
    fragments,
    why_not,
    work_of,
)
from kvwire.cli.bench.pair import Contender, Sample
from kvwire.cli.main import main
from kvwire.limits import KIB, MIB
from kvwire.memory.arena import arena_of
from kvwire.memory.copy import as_fragments
from kvwire_inproc import InprocBackend
from tests.cli.bench.conftest import Bench

# Each starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)

WORKS = [
    work_of(verb, 4 * KIB, cross_layer=cross, round_bytes=1 * MIB)
    for verb in ("push", "pull")
    for cross in (False, True)
]
POOL_BYTES = max(work.pool_bytes for work in WORKS)
POOLS: dict[str, Any] = {"pool_bytes": POOL_BYTES}


def test_everything_is_measured_and_written(bench: Bench, tmp_path: Path) -> None:
    """One round; every row has a sample of everybody, and the table says so."""
    plot = tmp_path / "found.svg"
    arguments = ["--transport", "tcp,inproc", "--rounds", "1"]
    arguments += ["--sizes-kib", "4", "1024", "--round-mib", "2"]
    found, printed = bench("fragments", *arguments, "--plot", str(plot))
    assert "kvwire bench fragments TCP" in printed
    assert "4 KiB push, per-layer, GB/s" in printed
    assert max(map(len, printed.splitlines())) <= 80
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
        Contender("tcp", FragmentsSide, transport="tcp", **POOLS),
        Contender("inproc", InprocSide, alone=True, transport="inproc", **POOLS),
        Contender("memcpy", MemcpySide, alone=True, **POOLS),
    ],
    ids=lambda c: c.name,
)
def test_our_own_sides_do_every_work(contender: Contender) -> None:
    assert len(does_every_work(contender)) == len(WORKS)


@pytest.mark.slow
def test_two_processes_move_fragments_in_arenas() -> None:
    contender = Contender(
        "arena", FragmentsSide, transport="local", memory=ARENA, **POOLS
    )
    assert len(does_every_work(contender)) == len(WORKS)


@pytest.mark.parametrize("in_arena", [False, True])
async def test_a_pool_lies_in_an_arena_if_it_is_asked_for(in_arena: bool) -> None:
    options = {"transport": "local", "pool_bytes": str(POOL_BYTES)}
    side = FragmentsSide(options | {"memory": ARENA} if in_arena else options)
    pool = Pool(side.memory, WORKS[0], LEFT)
    assert (arena_of(as_fragments(pool.memory.data)) is not None) is in_arena
    side.memory = np.empty(0, np.uint8)
    del pool
    await side.close()


def test_local_takes_part_with_and_without_arenas() -> None:
    everybody = [one.name for one in fragments(choice("local")).cases[0].contenders]
    assert everybody == ["kvwire local", "kvwire local arena", "memcpy"]


def choice(transport: str) -> FragmentsChoice:
    return FragmentsChoice(
        transports=[transport], layer_bytes=[4 * KIB], round_bytes=MIB, loop="asyncio"
    )


def does_every_work(contender: Contender) -> list[Sample]:
    """Checked, then timed; what a round reports is plausible."""
    samples = []
    with contender.start() as pair:
        for work in WORKS:
            pair.check(work)
            samples.append(pair.round(work))
    for work, sample in zip(WORKS, samples, strict=True):
        assert min(sample.values) > 0
        assert sample.moved_bytes == work.nbytes * work.count
        assert sum(sample.cpu_s) > 0
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
    assert "kvwire tcp failed, 4 KiB push, per-layer and 3 more:" in printed
    assert "forbid" in printed


def test_a_backend_that_cannot_run_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did not fail: nobody tried."""
    found = Availability(available=False, reason="no GPU", remedy="buy one")
    monkeypatch.setattr(registry, "availability", lambda _: found)
    benchmark = fragments(choice("nccl"))
    assert {c.name for row in benchmark.cases for c in row.contenders} == {"memcpy"}
    (line,) = map(str, benchmark.missing)
    assert line == "kvwire nccl cannot run here and was left out: no GPU; buy one"


@pytest.mark.parametrize(
    ("capabilities", "said"),
    [
        (Capabilities(lanes=True), ""),
        (Capabilities(lanes=False), "no lanes"),
        (Capabilities(lanes=True, memory_kinds=frozenset()), "no host memory"),
    ],
)
def test_a_backend_that_this_benchmark_cannot_use_says_why(
    capabilities: Capabilities, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InprocBackend, "capabilities", capabilities)
    reason = why_not("inproc")
    assert said in reason
    assert bool(said) == bool(reason)


# --- the work -------------------------------------------------------------------------

works = st.builds(
    work_of,
    st.sampled_from(["push", "pull"]),
    st.sampled_from([4 * KIB, 64 * KIB, 1 * MIB, 4 * MIB]),
    cross_layer=st.booleans(),
    round_bytes=st.sampled_from([1 * MIB, 10 * MIB]),
)


@given(works, st.sampled_from([LEFT, RIGHT]))
def test_no_two_fragments_meet_or_follow_each_other(
    work: FragmentWork, side: int
) -> None:
    assert work.nbytes * work.count == work.blocks * work.layers * work.layer_bytes
    assert 1 <= work.layers <= LAYERS_MAX
    pool = Pool(np.empty(work.pool_bytes, np.uint8), work, side)
    places = np.sort(pool.rows)
    assert len(places) == work.count
    assert 0 <= places[0] <= places[-1] < work.pool_bytes // work.nbytes
    assert np.all(np.diff(places) > 1)


@pytest.mark.parametrize("cross_layer", [False, True])
def test_rows_are_where_the_cache_has_its_blocks(cross_layer: bool) -> None:
    """What kvwire reads off its tensors, and where the bytes are compared."""
    work = work_of("push", 4 * KIB, cross_layer=cross_layer, round_bytes=1 * MIB)
    pool, other = (
        Pool(np.zeros(work.pool_bytes, np.uint8), work, side) for side in (LEFT, RIGHT)
    )
    assert pool.blocks != other.blocks
    group = pool.cache.groups["kv"]
    starts = group.bases[:, 0][:, None] + np.array(pool.blocks) * group.strides["block"]
    if cross_layer:
        starts = starts[:1]
    expected = pool.rows * work.nbytes + pool.memory.ctypes.data
    assert starts.ravel().tolist() == expected.tolist()
