"""Others beside kvwire: they do the same, or why not is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from kvwire import KVWireError
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import GIB, MIB
from kvwire_certify.bench.command import SAME_HOST, TCP, UCX, fragments_of, ops_of
from kvwire_certify.bench.pair import BenchError, Contender
from kvwire_certify.bench.turns import GIGABYTES_PER_SECOND
from kvwire_certify.bench.work import LEFT, RIGHT, Pool, Work
from packages.certify.tests.bench import iperf3
from packages.certify.tests.bench.__main__ import app
from packages.certify.tests.bench.contenders import Scripted, benchmark, case, does
from packages.certify.tests.bench.peer import (
    ALL_PEERS,
    INSTALL,
    contender,
    interpreter,
    interpreters,
    joined,
)
from packages.certify.tests.bench.peers.serving import offsets
from packages.certify.tests.bench.test_pair import WORKS

POOL_BYTES = max(work.memory_bytes for work in WORKS)


def test_peers_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fragments", "--peers", "nixl,pigeons"], app) == CALLED_WRONG
    assert "--peers pigeons: there are nixl" in capsys.readouterr().err
    assert main(["fragments", "--peer-python", "/no/python"], app) == 1
    assert "/no/python: this is not a Python" in capsys.readouterr().err


def test_nixl_moves_the_same_fragments() -> None:
    named = [Path(path) for path in [os.environ.get("BENCH_PEER_PYTHON")] if path]
    found = interpreter(interpreters(named))
    if found is None:
        pytest.skip(f"NIXL is not installed: {INSTALL}")
    for setting in UCX:
        with contender(setting, found, POOL_BYTES).start() as pair:
            for work in WORKS:
                does(pair, work)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter has NIXL, and there is an iperf3."""
    monkeypatch.setattr("packages.certify.tests.bench.peer._has", lambda *_: True)
    monkeypatch.setattr("packages.certify.tests.bench.iperf3.missing", lambda: None)


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
    others = {"nixl tcp", "iperf3", "bare sockets"}
    assert by_wire == {TCP: others, SAME_HOST: {"nixl shm", "memcpy"}}


def test_what_is_not_installed_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("packages.certify.tests.bench.peer._has", lambda *_: False)
    plan = fragments_of(["tcp"], WORKS, "asyncio")
    found = joined(plan, ALL_PEERS, [sys.executable], TCP)
    assert [absent.name for absent in found.missing] == ["nixl", "iperf3"]
    assert all("install" in absent.remedy for absent in found.missing)
    names = {one.name for case in found.cases for one in case.contenders}
    assert names == {"kvwire tcp", "bare sockets"}


FORGED = """
import os

class nixl_agent:
    def __init__(self, *arguments):
        self.transfer = lambda *_: os.environ["FORGED_STATE"]
    def __getattr__(self, name):
        return lambda *_: b""

nixl_agent_config = nixl_agent
"""


@pytest.fixture
def forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contender:
    """The real program, of a library that moves nothing."""
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(FORGED)
    info = tmp_path / "nixl_cu12-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nixl-cu12\nVersion: 1\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return contender("tcp", sys.executable, POOL_BYTES)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("DONE", "the received bytes differ"),
        ("ERR", "ended in state 'ERR'"),
    ],
)
def test_a_peer_that_does_not_do_its_work_is_found_and_stopped_between_rounds(
    forged: Contender, monkeypatch: pytest.MonkeyPatch, state: str, said: str
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(
        subprocess.Popen, "send_signal", lambda _, one: signals.append(one)
    )
    monkeypatch.setenv("FORGED_STATE", state)
    with forged.start() as pair:
        assert pair.facts["nixl"] == "1"
        assert signals == [signal.SIGSTOP] * 2
        with pytest.raises(BenchError, match=said):
            pair.turn(WORKS[0], checks=True)
    assert signals[2:4] == signals[-2:] == [signal.SIGCONT] * 2


def test_a_peer_that_ends_says_why(forged: Contender, tmp_path: Path) -> None:
    (tmp_path / "nixl_cu12" / "_api.py").write_text("raise SystemExit('no libnuma')")
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


# --- iperf3: its report, its absence, and the real one where it is --------------------


def test_a_report_is_read() -> None:
    """Half a second for 2 GiB, and 150 % of a CPU; or why there is none."""
    end = {
        "sum_received": {"bytes": 2 * GIB, "seconds": 0.5},
        "cpu_utilization_percent": {"host_total": 90.0, "remote_total": 60.0},
    }
    seconds, cpu_s = iperf3.read_report(json.dumps({"end": end}))
    assert (seconds, cpu_s) == (0.25 / GIB, 0.375 / GIB)
    with pytest.raises(KVWireError, match="iperf3: server busy"):
        iperf3.read_report('{"error": "server busy"}')


def test_it_stands_beside_rates_or_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = Scripted("kvwire")
    whole = benchmark(case(ours), case(ours, unit=GIGABYTES_PER_SECOND))
    monkeypatch.setattr(iperf3, "missing", lambda: None)
    cases = joined(whole, ["iperf3"], [], TCP).cases
    names = [[one.name for one in case.contenders] for case in cases]
    assert names == [["kvwire"], ["kvwire", "iperf3"]]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    (absent,) = joined(whole, ["iperf3"], [], TCP).missing
    assert "apt-get install iperf3" in absent.remedy
    fake = tmp_path / "iperf3"
    fake.write_text("#!/bin/sh\necho cannot bind\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BenchError, match="cannot bind"):
        iperf3.contender().start()


@pytest.mark.skipif(
    shutil.which("iperf3") is None, reason="iperf3 is not installed here"
)
@pytest.mark.parametrize("verb", ["send", "get"])
def test_the_real_one(verb: str) -> None:
    with iperf3.contender().start() as pair:
        sample = pair.turn(Work(verb=verb, nbytes=MIB, count=1))
        assert pair.facts["version"].startswith("iperf 3")
    assert sample.seconds[0] > 0
    assert sum(sample.cpu_s) > 0
