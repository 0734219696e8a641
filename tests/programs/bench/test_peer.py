"""Libraries beside kvwire: they do the same, or say why not; what is aimed at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from kvwire.cli.bench.command import SAME_HOST, TCP, fragments_of, ops_of, work_of
from kvwire.cli.bench.pair import BenchError, Contender
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, Case
from kvwire.cli.bench.work import LEFT, RIGHT, Pool, Work
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import KIB, MIB
from tests.cli.bench.contenders import case, does, measured, rated
from tests.cli.bench.test_pair import WORKS
from tests.programs.bench.__main__ import app
from tests.programs.bench.peer import ALL_PEERS, PEERS, interpreters, joined
from tests.programs.bench.peers.serving import offsets
from tests.programs.bench.targets import CLAIMS, judge

POOL_BYTES = max(work.memory_bytes for work in WORKS)


def test_peers_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fragments", "--peers", "nixl,pigeons"], app) == CALLED_WRONG
    assert "--peers pigeons: there are nixl" in capsys.readouterr().err
    assert main(["fragments", "--peer-python", "/no/python"], app) == 1
    assert "/no/python: this is not a Python" in capsys.readouterr().err


def _loads(interpreter: str, module: str) -> bool:
    """Return whether a module's compiled part finds its libraries."""
    return (
        subprocess.run([interpreter, "-c", f"import {module}"], check=False).returncode
        == 0
    )


@pytest.mark.parametrize("name", PEERS)
def test_peers_move_the_same_fragments(name: str) -> None:
    peer = PEERS[name]
    named = [Path(path) for path in [os.environ.get("BENCH_PEER_PYTHON")] if path]
    interpreter = peer.interpreter(interpreters(named))
    if interpreter is None:
        pytest.skip(f"{name} is not installed: {peer.install}")
    if name == "mooncake" and not _loads(interpreter, "mooncake.engine"):
        pytest.skip(f"{name} lacks a library of the system: {peer.install}")
    for setting in peer.settings:
        with peer.contender(setting, interpreter, POOL_BYTES).start() as pair:
            for work in WORKS:
                does(pair, work)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter has all peers, and there is an iperf3."""
    monkeypatch.setattr("tests.programs.bench.peer._has", lambda *_: True)
    monkeypatch.setattr("tests.programs.bench.iperf3.missing", lambda: None)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("wire", "name"), [(TCP, "nixl tcp"), (SAME_HOST, "nixl shm")])
def test_nixl_stands_beside_transfers_of_its_wire_and_no_other_operation(
    wire: str, name: str
) -> None:
    found = joined(ops_of("tcp", "asyncio"), ["nixl"], [sys.executable], wire)
    beside = {case.name for case in found.cases if len(case.beside) > 1}
    assert beside == {
        "pull, 64 KiB, 16 layers",
        "pull, 256 KiB, 16 layers",
        "push, 256 KiB, 16 layers",
        "push, 4 MiB, 32 layers",
        "get, 64 KiB, 16 layers",
        "get, 256 KiB, 16 layers",
    }
    others = {one.name for case in found.cases for one in case.beside}
    assert others == {name, "asyncio streams"}


@pytest.mark.usefixtures("_installed")
def test_everybody_stands_beside_fragments_of_its_wire() -> None:
    plan = fragments_of(["tcp", "local"], WORKS, "asyncio")
    found = joined(plan, ALL_PEERS, [sys.executable], TCP)
    by_wire = {
        wire: {one.name for c in found.cases if c.group == wire for one in c.beside}
        for wire in (TCP, SAME_HOST)
    }
    others = {"nixl tcp", "mooncake", "mooncake by 1024", "iperf3", "bare sockets"}
    assert by_wire == {TCP: others, SAME_HOST: {"nixl shm", "memcpy"}}


def test_what_is_not_installed_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.programs.bench.peer._has", lambda *_: False)
    plan = fragments_of(["tcp"], WORKS, "asyncio")
    found = joined(plan, ALL_PEERS, [sys.executable], TCP)
    assert [absent.name for absent in found.missing] == [*PEERS, "iperf3"]
    assert all("install" in absent.remedy for absent in found.missing)
    names = {one.name for case in found.cases for one in case.contenders}
    assert names == {"kvwire tcp", "bare sockets"}


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
def forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contender:
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
    return PEERS["mooncake"].contender("", sys.executable, POOL_BYTES)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("0", "the received bytes differ"),
        ("-1", "a batch of 256 fragments returned -1"),
    ],
)
def test_a_peer_that_does_not_do_its_work_is_found_and_stopped_between_rounds(
    forged: Contender, monkeypatch: pytest.MonkeyPatch, status: str, said: str
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(
        subprocess.Popen, "send_signal", lambda _, one: signals.append(one)
    )
    monkeypatch.setenv("FORGED_STATUS", status)
    with forged.start() as pair:
        assert pair.facts == {"mooncake": "1"}
        assert signals == [signal.SIGSTOP] * 2
        with pytest.raises(BenchError, match=said):
            pair.turn(WORKS[0], checks=True)
    assert signals[2:4] == signals[-2:] == [signal.SIGCONT] * 2


def test_a_peer_that_ends_says_why(forged: Contender, tmp_path: Path) -> None:
    (tmp_path / "mooncake" / "engine.py").write_text("raise SystemExit('no libnuma')")
    with pytest.raises(BenchError, match=r"ended with status 1: no libnuma$"):
        forged.start()


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("work", WORKS)
def test_peers_have_their_fragments_where_kvwire_has_them(
    work: Work, side: int
) -> None:
    """A program of a peer works it out by itself, without kvwire."""
    pool = Pool(np.empty(work.memory_bytes, np.uint8), work, side)
    nbytes = work.nbytes // work.fragments
    assert offsets(asdict(work), side).tolist() == (pool.rows * nbytes).tolist()


# --- what is aimed at -----------------------------------------------------------------


def row(rates: dict[str, float], size: int, across: bool = False) -> Case:
    """GB/s of everybody in one case."""
    work = work_of("push", size, cross_layer=across, round_bytes=MIB)
    everybody = [rated(name, rate * 1e9, work=work) for name, rate in rates.items()]
    return case(*everybody, work=work, unit=GIGABYTES_PER_SECOND)


def test_targets_are_judged_by_medians_of_caches_with_a_tensor_a_layer() -> None:
    """The best is the fastest of those that took part; no others are judged."""
    found = measured(
        row({"kvwire tcp": 3.0, "nixl tcp": 0.5, "iperf3": 0.25}, 4 * KIB),
        row({"kvwire tcp": 4.0, "nixl tcp": 2.0, "iperf3": 5.0}, MIB),
        row({"kvwire tcp": 3.6, "nixl tcp": 2.5}, 4 * KIB, across=True),
        rounds=2,
    )
    verdicts = {
        (v.claim.target, v.best): (round(v.ratio, 3), v.met) for v in judge(found)
    }
    assert verdicts == {
        (1.0, "iperf3"): (0.8, False),
        (5.0, "nixl tcp"): (6.0, True),
        (0.6, "kvwire tcp"): (0.75, True),
    }
    for alone in ({"kvwire tcp": 3.0}, {"nixl tcp": 3.0}):
        assert list(judge(measured(row(alone, 4 * KIB)))) == []
    assert {claim.layer_bytes for claim in CLAIMS} == {4 * KIB, 64 * KIB, MIB}
