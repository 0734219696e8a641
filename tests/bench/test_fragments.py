"""Libraries beside ``kvwire bench fragments``.

Peers are whatever is installed here; each that is not says why its test is skipped.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from kvwire.cli.bench.fragments import (
    LEFT,
    RIGHT,
    FragmentsChoice,
    FragmentWork,
    Pool,
    fragments,
)
from kvwire.cli.bench.pair import BenchError, Contender, SideProcess
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import KIB, MIB
from tests.bench import iperf3
from tests.bench.__main__ import app
from tests.bench.fragments import ALL_PEERS, joining
from tests.bench.peer import PEERS, interpreters
from tests.bench.peers.serving import offsets
from tests.cli.bench.test_fragments import WORKS, does_every_work

# Each starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)

CHOICE = FragmentsChoice(
    transports=["tcp"], layer_bytes=[4 * KIB], round_bytes=1 * MIB, loop="asyncio"
)


def test_peers_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fragments", "--peers", "nixl,pigeons"], app) == CALLED_WRONG
    assert "--peers pigeons: there are nixl" in capsys.readouterr().err


@pytest.mark.slow
def test_targets_are_in_the_document(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--transport", "tcp", "--peers", "none", "--rounds", "1"]
    arguments += ["--sizes-kib", "4", "1024", "--round-mib", "2", "--json", str(out)]
    assert main(["fragments", *arguments], app) == 0
    targets = json.loads(out.read_text())["targets"]
    assert [(t["best"], t["verb"]) for t in targets] == [
        ("kvwire tcp", "push"),
        ("kvwire tcp", "pull"),
    ]


@pytest.mark.parametrize("name", PEERS)
def test_peers_move_the_same_fragments(name: str) -> None:
    peer = PEERS[name]
    named = [Path(path) for path in [os.environ.get("BENCH_PEER_PYTHON")] if path]
    interpreter = peer.interpreter(interpreters(named))
    if interpreter is None:
        pytest.skip(f"{name} is not installed: {peer.install}")
    pool_bytes = max(work.pool_bytes for work in WORKS)
    for setting in peer.settings:
        contender = peer.contender(setting, interpreter, pool_bytes)
        assert len(does_every_work(contender)) == len(WORKS)


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
    pool_bytes = max(work.pool_bytes for work in WORKS)
    return PEERS["mooncake"].contender("", sys.executable, pool_bytes)


def test_bytes_of_a_peer_that_do_not_arrive_are_found(forged: Contender) -> None:
    with forged.start() as pair:
        assert pair.facts == {"mooncake": "1"}
        with pytest.raises(BenchError, match="what arrived is not what was sent"):
            pair.check(WORKS[0])


def test_a_peer_that_refuses_is_a_failure_with_its_reason(
    forged: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGED_STATUS", "-1")
    with (
        forged.start() as pair,
        pytest.raises(BenchError, match="a batch of 256 fragments returned -1"),
    ):
        pair.check(WORKS[0])


def test_a_peer_that_ends_says_why(forged: Contender, tmp_path: Path) -> None:
    (tmp_path / "mooncake" / "engine.py").write_text("raise SystemExit('no libnuma')")
    with pytest.raises(BenchError, match=r"ended with status 1: no libnuma$"):
        forged.start()


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("work", WORKS)
def test_peers_have_their_fragments_where_kvwire_has_them(
    work: FragmentWork, side: int
) -> None:
    """A program of a peer works it out by itself, without kvwire."""
    pool = Pool(np.empty(work.pool_bytes, np.uint8), work, side)
    assert offsets(asdict(work), side).tolist() == (pool.rows * work.nbytes).tolist()


def test_a_peer_is_stopped_while_it_is_not_its_turn(
    forged: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    pause, resume = SideProcess.pause, SideProcess.resume

    def paused(side: SideProcess) -> None:
        said.append("pause")
        pause(side)

    def resumed(side: SideProcess) -> None:
        said.append("resume")
        resume(side)

    monkeypatch.setattr(SideProcess, "pause", paused)
    monkeypatch.setattr(SideProcess, "resume", resumed)
    with forged.start() as pair:
        pair.round(WORKS[0])
    assert said == [*["pause"] * 2, *["resume"] * 2] * 2


def test_what_is_not_installed_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.bench.peer._has", lambda *_: False)
    found = fragments(CHOICE, joining(ALL_PEERS, [sys.executable]))
    names = [absent.name for absent in found.missing]
    assert names == [*PEERS, "iperf3"]
    assert all("install" in absent.remedy for absent in found.missing)
    assert iperf3.missing() in found.missing
    names = [one.name for case in found.cases for one in case.contenders]
    assert set(names) == {"kvwire tcp", "memcpy"}


def test_a_peer_python_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fragments", "--peer-python", "/no/python"], app) == 1
    assert "/no/python: this is not a Python" in capsys.readouterr().err
