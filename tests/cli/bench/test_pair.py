"""Two processes and the lines between them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest

from kvwire.cli.bench import pair
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.pair import PairContender, SideProcess
from kvwire.limits import KIB, MIB

# Each starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(60)

ROLES = {
    "kvwire": ["transport=tcp", "loop=uvloop"],
    "streams": ["loop=asyncio"],
    "sockets": [],
}
PING = Work(verb="round trip", nbytes=64, count=3)
BULK = [
    Work(verb=verb, nbytes=nbytes, count=6, in_flight=4)
    for verb in ("send", "put", "get")
    for nbytes in (64 * KIB, 3 * MIB)
]


@pytest.fixture
def side() -> Iterator[SideProcess]:
    found = SideProcess("sockets")
    yield found
    found.stop()


@pytest.mark.parametrize(
    ("role", "works"),
    [
        ("kvwire", [PING, *BULK]),
        # Both take part in `bench messages`, which is tested with threads as well.
        pytest.param("streams", [PING], marks=pytest.mark.slow),
        pytest.param("sockets", BULK, marks=pytest.mark.slow),
    ],
)
def test_each_role_does_its_works(role: str, works: list[Work]) -> None:
    """Checked, then timed twice; what a round reports is plausible."""
    contender = PairContender(role, role, ROLES[role])
    try:
        contender.start()
        for work in works:
            contender.check(work)
            for _ in range(2):
                sample = contender.round(work)
                expected = work.count if work.verb == "round trip" else 1
                assert len(sample.values) == expected
                assert min(sample.values) > 0
                assert sample.moved_bytes == work.nbytes * work.count
                assert sample.cpu_s > 0
        if role == "kvwire":
            assert contender.facts()["loop"] == "uvloop"
            assert "tcp: taken" in contender.facts()["transport"]
    finally:
        contender.stop()


@pytest.mark.usefixtures("threads")
def test_bytes_that_change_on_the_way_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contender = PairContender("sockets", "sockets")
    try:
        contender.start()
        digests = itertools.count()
        answer = SideProcess.answer

        def damaged(side: SideProcess) -> dict[str, object]:
            found = answer(side)
            return {"digest": str(next(digests))} if "digest" in found else found

        monkeypatch.setattr(SideProcess, "answer", damaged)
        with pytest.raises(BenchError, match=r"what arrived .* is not what was sent"):
            contender.check(BULK[0])
    finally:
        contender.stop()


def test_what_fails_over_there_is_told_here(side: SideProcess) -> None:
    with pytest.raises(BenchError, match="connect: ConnectionRefusedError"):
        side.call("connect", address=1)


def test_only_the_calls_of_a_half_can_be_made(side: SideProcess) -> None:
    with pytest.raises(BenchError, match="there is no call '__init__'"):
        side.call("__init__")


def test_a_process_that_ends_is_an_error(side: SideProcess) -> None:
    side._process.kill()
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


def test_an_unknown_role_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    found = SideProcess("carrier pigeons")
    with pytest.raises(BenchError, match="ended with status 1"):
        found.call("listen")
    found.stop()
    assert "carrier pigeons" in capfd.readouterr().err


def test_the_interpreter_is_this_one(side: SideProcess) -> None:
    assert side._process.args[0] == sys.executable  # type: ignore[index]
