"""``kvwire bench fragments``, from the command line to what it writes, on tiny caches.

Peers are whatever is installed here; each that is not says why its test is skipped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvwire.cli.bench import fragments_command, iperf3
from kvwire.cli.bench.case import Contender, Sample
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.fragment_work import LEFT, work_of
from kvwire.cli.bench.fragments import (
    ALL_PEERS,
    SAME_HOST,
    TCP,
    Choice,
    fragments,
    registered,
)
from kvwire.cli.bench.pair import Side
from kvwire.cli.bench.peer import PEERS, FragmentPair, PeerContender, interpreters
from kvwire.cli.bench.sides.fragments_half import FragmentsHalf, Pool
from kvwire.cli.bench.solo import (
    SoloContender,
    UcxPerftest,
    read_rate,
    ucx_perftest,
)
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
    arguments = ["--transport", "tcp,inproc", "--peers", "memcpy", "--rounds", "1"]
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
        layered = row["layout"] == "per-layer"
        expected = {
            TCP: {"kvwire tcp"},
            SAME_HOST: {"kvwire inproc", "memcpy"} if layered else {"kvwire inproc"},
        }[row["wire"]]
        assert set(row["contenders"]) == expected
        for samples in row["contenders"].values():
            assert samples["median"] > 0
            assert len(samples["rounds"]) == 1
    own = [t for t in found["targets"] if t["best"] == "kvwire tcp"]
    assert [t["verb"] for t in own] == ["push", "pull"]
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
    choice = Choice(
        transports=["local"],
        peers=[],
        interpreters=[],
        layer_bytes=[4 * KIB],
        round_bytes=1 * MIB,
        loop="asyncio",
    )
    assert list(fragments(choice).ours) == ["kvwire local", "kvwire local arena"]


@pytest.mark.parametrize("name", PEERS)
def test_peers_move_the_same_fragments(name: str) -> None:
    peer = PEERS[name]
    named = [Path(path) for path in [os.environ.get("BENCH_PEER_PYTHON")] if path]
    interpreter = peer.interpreter(interpreters(named))
    if interpreter is None:
        pytest.skip(f"{name} is not installed: {peer.install}")
    pool_bytes = max(work.pool_bytes for work in WORKS)
    for setting in peer.settings:
        contender = PeerContender(peer, setting, interpreter, pool_bytes)
        assert len(does_every_work(contender)) == len(WORKS)


def test_ucx_perftest_runs_both_ways() -> None:
    program = ucx_perftest([sys.executable])
    if program is None:
        pytest.skip("ucx_perftest is not installed: apt-get install ucx-utils")
    found = does_every_work(UcxPerftest("tcp", {"UCX_TLS": "tcp"}, program))
    assert len(found) == len(WORKS)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo first >&2; echo no libucp.so.0 >&2; exit 127", "127: no libucp.so.0$"),
        ("exit 3", "status 3$"),
    ],
)
def test_a_ucx_perftest_that_ends_says_why(
    script: str, said: str, tmp_path: Path
) -> None:
    program = tmp_path / "ucx_perftest"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    contender = UcxPerftest("tcp", {}, str(program))
    with pytest.raises(BenchError, match=said):
        contender.round(WORKS[0])


def test_the_libraries_of_a_wheel_are_found_beside_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before those that the user names; of another program nothing is added."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/named")
    program = tmp_path / "bin" / "ucx_perftest"
    (tmp_path / "lib").mkdir()
    other = UcxPerftest("tcp", {}, str(program))
    (tmp_path / "lib" / "libucp.so.0").touch()
    of_wheel = UcxPerftest("tcp", {}, str(program))
    paths = [c._environment["LD_LIBRARY_PATH"] for c in (other, of_wheel)]
    assert paths == ["/named", f"{tmp_path / 'lib'}:/named"]


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


FORGED_ENGINE = """
import os

class TransferEngine:
    def initialize(self, *arguments):
        return 0
    def register_memory(self, *arguments):
        return 0
    def get_rpc_port(self):
        return 1
    def batch_transfer_sync_write(self, *arguments):
        return int(os.environ["FORGED_STATUS"])
"""


@pytest.fixture
def forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerContender:
    """A peer whose program is the real one, of a library that moves nothing."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(FORGED_ENGINE)
    info = tmp_path / "mooncake_transfer_engine_non_cuda-1.dist-info"
    info.mkdir()
    name = "Name: mooncake-transfer-engine-non-cuda"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FORGED_STATUS", "0")
    pool_bytes = max(work.pool_bytes for work in WORKS)
    return PeerContender(PEERS["mooncake"], "", sys.executable, pool_bytes)


def test_bytes_of_a_peer_that_do_not_arrive_are_found(forged: PeerContender) -> None:
    forged.start()
    assert forged.facts() == {"mooncake": "1"}
    with pytest.raises(BenchError, match=r"what arrived .* is not what was sent"):
        forged.check(WORKS[0])
    forged.stop()


def test_a_peer_that_refuses_is_a_failure_with_its_reason(
    forged: PeerContender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGED_STATUS", "-1")
    forged.start()
    with pytest.raises(BenchError, match="a batch of 256 fragments returned -1"):
        forged.check(WORKS[0])
    forged.stop()


def test_a_peer_that_ends_says_why(forged: PeerContender, tmp_path: Path) -> None:
    (tmp_path / "mooncake" / "engine.py").write_text("raise SystemExit('no libnuma')")
    with pytest.raises(BenchError, match=r"ended with status 1: no libnuma$"):
        forged.start()
    forged.stop()


def test_a_peer_is_stopped_while_it_is_not_its_turn(
    forged: PeerContender, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    pause, resume = Side.pause, Side.resume

    def paused(side: Side) -> None:
        said.append("pause")
        pause(side)

    def resumed(side: Side) -> None:
        said.append("resume")
        resume(side)

    monkeypatch.setattr(Side, "pause", paused)
    monkeypatch.setattr(Side, "resume", resumed)
    forged.start()
    forged.round(WORKS[0])
    forged.stop()
    assert said == [*["pause"] * 2, *["resume"] * 2] * 2


def test_what_is_not_installed_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("kvwire.cli.bench.peer._has", lambda *_: False)
    monkeypatch.setattr("kvwire.cli.bench.fragments.ucx_perftest", lambda _: None)
    found = fragments(_choice(peers=ALL_PEERS))
    names = [absent.name for absent in found.missing]
    assert names == [*PEERS, "iperf3", "ucx_perftest"]
    assert all("install" in absent.remedy for absent in found.missing)
    assert iperf3.missing() in found.missing
    assert {c.name for c in found.contenders} == {"kvwire tcp", "memcpy"}


def test_the_help_says_how_to_install_each_peer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "fragments", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in ALL_PEERS:
        assert f"{name}: " in printed
    assert "nixl: pip install nixl-cu12" in printed
    assert "ucx_perftest: apt-get install ucx-utils" in printed


@pytest.mark.usefixtures("threads")
def test_a_transport_that_cannot_run_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for by name, so the exit status says that it failed."""
    monkeypatch.setenv("KVWIRE_FORBID", "tcp")
    arguments = ["--transport", "tcp", "--peers", "none", "--sizes-kib", "4"]
    status = main(["bench", "fragments", *arguments, "--round-mib", "1"])
    assert status == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "kvwire tcp failed, 4 KiB push, per-layer, TCP and 3 more:" in printed
    assert "forbid" in printed


def test_transports_and_peers_that_nobody_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["--transport", "pigeons"], ["--peers", "nixl,pigeons"]):
        assert main(["bench", "fragments", *arguments]) == CALLED_WRONG
        assert f"{arguments[0]} pigeons: " in capsys.readouterr().err


def test_a_peer_python_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fragments", "--peer-python", "/no/python"]) == 1
    assert "/no/python: this is not a Python" in capsys.readouterr().err


def test_the_registered_backends_are_the_default() -> None:
    assert {"tcp", "inproc"} <= set(registered())
    assert fragments_command.SIZES_KIB[0] == 4
    assert fragments_command.SIZES_KIB[-1] == 16 * KIB


@pytest.mark.parametrize("text", ["", "a,b\n1", "avg_bw\nfast"])
def test_what_is_no_report_of_ucx_perftest(text: str) -> None:
    with pytest.raises(BenchError, match="printed no report"):
        read_rate(text)


def test_a_report_of_ucx_perftest() -> None:
    assert read_rate("iterations,avg_bw\n10,2.5\n") == 2.5 * MIB


def _choice(**changed: Any) -> Choice:
    options: dict[str, Any] = {
        "transports": ["tcp"],
        "peers": (),
        "interpreters": [sys.executable],
        "layer_bytes": [4 * KIB],
        "round_bytes": 1 * MIB,
        "loop": "asyncio",
        **changed,
    }
    return Choice(**options)
