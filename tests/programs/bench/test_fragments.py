"""Libraries beside ``kvwire bench fragments``, and what is aimed at beside them.

Peers are whatever is installed here; each that is not says why its test is skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from kvwire.cli.bench.fragments import fragments, work_of
from kvwire.cli.bench.operations import LEFT, RIGHT, OpsWork, Pool
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.side import BenchError
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
)
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.limits import KIB, MIB
from tests.cli.bench.contenders import case, measured, rated
from tests.cli.bench.test_works import POOL_BYTES, WORKS, does_every_work
from tests.programs.bench import iperf3
from tests.programs.bench.__main__ import app
from tests.programs.bench.fragments import (
    ALL_PEERS,
    CLAIMS,
    beside_transfers,
    joining,
    judge,
)
from tests.programs.bench.peer import PEERS, interpreters
from tests.programs.bench.peers.serving import offsets


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
        contender = peer.contender(setting, interpreter, POOL_BYTES)
        assert does_every_work(contender)


def test_nixl_stands_beside_transfers_of_its_wire() -> None:
    """And beside no other operation; where nobody has it, that is said."""
    pull = OpsWork(verb="pull", nbytes=64 * KIB, count=3, layers=2, blocks=2)
    send = OpsWork(verb="send", nbytes=64 * KIB, count=3)
    read = replace(pull, verb="get")
    region = replace(send, verb="get")
    ours = [Contender("kvwire", "somebody")]
    cases = [
        Case(name=work.verb, work=work, unit=MICROSECONDS, ours=ours)
        for work in (pull, send, read, region)
    ]
    plan = Benchmark(name="ops", cases=cases)
    found = replace(PEERS["nixl"], module="json")  # which every interpreter has
    for transport, name in (("tcp", "nixl tcp"), ("local", "nixl shm")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PEERS, "nixl", found)
            joined = beside_transfers(transport, [sys.executable])(plan)
        beside = [[one.name for one in case.beside] for case in joined.cases]
        assert beside == [[name], []] * 2
    nobody = beside_transfers("tcp", ["/no/python"])(plan)
    assert not nobody.cases[0].beside
    assert [str(one) for one in nobody.missing] == [str(found.missing)]


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
            pair.round(WORKS[0], checks=True)
    assert signals[2:4] == signals[-2:] == [signal.SIGCONT] * 2


def test_a_peer_that_ends_says_why(forged: Contender, tmp_path: Path) -> None:
    (tmp_path / "mooncake" / "engine.py").write_text("raise SystemExit('no libnuma')")
    with pytest.raises(BenchError, match=r"ended with status 1: no libnuma$"):
        forged.start()


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("work", WORKS)
def test_peers_have_their_fragments_where_kvwire_has_them(
    work: OpsWork, side: int
) -> None:
    """A program of a peer works it out by itself, without kvwire."""
    pool = Pool(np.empty(work.memory_bytes, np.uint8), work, side)
    nbytes = work.nbytes // work.fragments
    assert offsets(asdict(work), side).tolist() == (pool.rows * nbytes).tolist()


def test_what_is_not_installed_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.programs.bench.peer._has", lambda *_: False)
    join = joining(ALL_PEERS, [sys.executable])
    found = join(fragments(["tcp"], WORKS, "asyncio"))
    names = [absent.name for absent in found.missing]
    assert names == [*PEERS, "iperf3"]
    assert all("install" in absent.remedy for absent in found.missing)
    assert iperf3.missing() in found.missing
    names = [one.name for case in found.cases for one in case.contenders]
    assert set(names) == {"kvwire tcp"}


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
