"""Two processes, what they send each other, and how they end."""

from __future__ import annotations

import socket

import pytest

from kvwire.cli.bench import bare, pair
from kvwire.cli.bench.bare import sockets
from kvwire.cli.bench.operations import OpsWork, operations
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.side import Bench, BenchError, Work
from kvwire.limits import KIB, MIB
from tests.cli.bench.contenders import WORK, does

PING = OpsWork(verb="round trip", nbytes=64, count=3)
BULK = [
    OpsWork(verb=verb, nbytes=nbytes, count=6, in_flight=4)
    for verb in ("send", "put", "get")
    for nbytes in (64 * KIB, 3 * MIB)
]


def test_two_processes_do_every_work() -> None:
    options = {"transport": "tcp", "loop": "uvloop"}
    with Contender("it", operations, options=options).start() as found:
        for work in [PING, *BULK]:
            for _ in range(2):
                does(found, work, work.count if work.verb == "round trip" else 1)
        assert found.facts["loop"] == "uvloop"
        assert "tcp: taken" in found.facts["transport"]


@pytest.mark.usefixtures("threads")
def test_bytes_that_change_on_the_way_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Contender("it", sockets).start() as found:
        receive = bare.receive_into

        def damaged(source: socket.socket, part: memoryview) -> None:
            receive(source, part)
            part[-1] ^= 1

        monkeypatch.setattr(bare, "receive_into", damaged)
        with pytest.raises(BenchError, match="the received bytes differ"):
            found.round(BULK[0], checks=True)


def test_a_connection_that_ends_midway_is_an_error() -> None:
    left, right = socket.socketpair()
    with left, right:
        right.sendall(b"ab")
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the other side has ended"):
            bare.receive_into(left, memoryview(bytearray(4)))


async def sides_that(b: Bench) -> None:
    """Do what their options name, each side its own."""
    async for _ in b.works(Work):
        match b.options["left" if b.left else "right"]:
            case "fails":
                raise OSError("no way")
            case "waits":
                await b.receive()
            case "exits":
                raise SystemExit("no luck")
            case "blocks":
                socket.create_server(("127.0.0.1", 0)).accept()


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ("fails", "waits", "^OSError: no way$"),
        ("waits", "fails", "^the other side failed: OSError: no way$"),
        ("exits", "waits", "^ended with status 1: no luck$"),
        ("waits", "exits", "^ended with status 1: no luck$"),
        ("blocks", "waits", r"^no answer within 0\.05 s$"),
    ],
)
def test_a_side_that_fails_is_the_reason(
    left: str, right: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"left": left, "right": right}
    with Contender("it", sides_that, options=options).start() as found:
        if left == "blocks":
            monkeypatch.setattr(pair, "ANSWER_TIMEOUT_S", 0.05)
            monkeypatch.setattr(pair, "END_TIMEOUT_S", 0.05)
        with pytest.raises(BenchError, match=text):
            found.round(WORK)


def test_a_side_that_is_killed_is_the_reason() -> None:
    for number in (0, 1):
        options = {"left": "waits", "right": "waits"}
        with Contender("it", sides_that, options=options).start() as found:
            found.sides[number].process.kill()
            with pytest.raises(BenchError, match="ended with status -9"):
                found.round(WORK)


def test_a_pair_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(BenchError, match="carrier"):
        Contender("it", operations, options={"transport": "carrier"}).start()
    with pytest.raises(BenchError, match=r"ended with status 1: .*carrier_pigeons"):
        Contender("it", "kvwire.cli.bench.bare:carrier_pigeons").start()
