"""Two processes and the lines between them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvwire.cli.bench import bare, pair
from kvwire.cli.bench.bare import SocketsSide
from kvwire.cli.bench.operations import OpsSide, OpsWork
from kvwire.cli.bench.pair import BenchError, Contender, SideProcess
from kvwire.limits import KIB, MIB
from tests.cli.bench.contenders import does

PING = OpsWork(verb="round trip", nbytes=64, count=3)
BULK = [
    OpsWork(verb=verb, nbytes=nbytes, count=6, in_flight=4)
    for verb in ("send", "put", "get")
    for nbytes in (64 * KIB, 3 * MIB)
]


@pytest.fixture
def side() -> Iterator[SideProcess]:
    found = SideProcess(Contender("it", SocketsSide), SocketsSide)
    yield found
    found.stop()


def test_two_processes_do_every_work() -> None:
    options = {"transport": "tcp", "loop": "uvloop"}
    with Contender("it", OpsSide, options=options).start() as found:
        for work in [PING, *BULK]:
            for _ in range(2):
                does(found, work, work.count if work.verb == "round trip" else 1)
        assert found.facts["loop"] == "uvloop"
        assert "tcp: taken" in found.facts["transport"]


@pytest.mark.usefixtures("threads")
def test_bytes_that_change_on_the_way_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Contender("it", SocketsSide).start() as found:
        receive = bare.receive_into

        def damaged(source: socket.socket, part: memoryview) -> None:
            receive(source, part)
            part[-1] ^= 1

        monkeypatch.setattr(bare, "receive_into", damaged)
        with pytest.raises(BenchError, match="what arrived is not what was sent"):
            found.check(BULK[0])


def test_a_connection_that_ends_midway_is_an_error() -> None:
    left, right = socket.socketpair()
    with left, right:
        right.sendall(b"ab")
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the other side has ended"):
            bare.receive_into(left, memoryview(bytearray(4)))


def test_what_fails_over_there_is_told_here(side: SideProcess) -> None:
    with pytest.raises(BenchError, match="connect: ConnectionRefusedError"):
        side.call("connect", address=1)
    for call in ("__init__", "close", "work_type", "parts"):
        with pytest.raises(BenchError, match=f"there is no call '{call}'"):
            side.call(call)
    side.process.kill()
    with pytest.raises(BenchError, match="ended with status -9"):
        side.call("cpu")


def test_a_process_that_is_stuck_is_an_error(
    monkeypatch: pytest.MonkeyPatch, side: SideProcess
) -> None:
    side.call("listen")
    monkeypatch.setattr(pair, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(pair, "_END_TIMEOUT_S", 0.05)
    side.ask("accept")  # nobody ever connects
    with pytest.raises(BenchError, match=r"did not answer within 0\.05 s"):
        side.answer()


def test_a_pair_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(BenchError, match="carrier"):
        Contender("it", OpsSide, options={"transport": "carrier"}).start()
    with pytest.raises(BenchError, match=r"ended with status 1: .*CarrierPigeons"):
        Contender("it", "kvwire.cli.bench.bare:CarrierPigeons").start()
