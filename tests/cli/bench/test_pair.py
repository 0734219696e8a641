"""Two processes, what they are told and answer, where they run, and how they end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvwire.cli.bench import bare, pair, sides
from kvwire.cli.bench.command import operations
from kvwire.cli.bench.pair import BenchError, Contender, placements
from kvwire.cli.bench.work import Work
from kvwire.limits import KIB, MIB
from tests.cli.bench import contenders
from tests.cli.bench.contenders import WORK, does

BULK = [
    Work(verb=verb, nbytes=nbytes, count=6, in_flight=4)
    for verb in ("send", "put", "get")
    for nbytes in (64 * KIB, 3 * MIB)
]
SOCKETS = Contender("it", bare.sockets_left, bare.sockets_right)


def ours(**options: object) -> Contender:
    given = {"transport": "tcp", "loop": "uvloop", **options}
    return Contender("it", sides.left, sides.right, options=given)


def test_two_processes_do_every_work_on_the_cpus_that_are_asked_for() -> None:
    with ours().start() as found:
        for work in [*operations().values(), *BULK]:
            samples = work.count if work.in_flight == 1 else 1
            does(found, work, samples if work.verb != "ready" else work.layers - 1)
        assert found.facts["loop"] == "uvloop"
        assert "tcp: taken" in found.facts["transport"]
        for cpus in filter(None, placements().values()):
            found.turn(BULK[0], cpus=cpus)
            allowed = [os.sched_getaffinity(side.process.pid) for side in found.sides]
            assert allowed == [{cpu} for cpu in cpus]


def test_bare_sockets_and_a_copy_do_every_work() -> None:
    with SOCKETS.start() as found:
        for work in BULK:
            does(found, work)
    with Contender("it", bare.memcpy).start() as found:
        assert len(does(found, BULK[0]).cpu_s) == 1


@pytest.mark.parametrize(
    ("allowed", "siblings", "expected"),
    [
        ({3}, "3", {"both on CPU 3": (3, 3)}),
        (
            {0, 1, 2},
            "0-1",
            {"both on CPU 0": (0, 0), "on CPUs 0 and 2": (0, 2)},
        ),
        (
            {0, 4},
            "0,4",
            {"both on CPU 0": (0, 0), "on CPUs 0 and 4, one core": (0, 4)},
        ),
    ],
)
def test_two_places_are_one_cpu_and_two_of_different_cores(
    allowed: set[int],
    siblings: str,
    expected: dict[str, tuple[int, int]],
    tmp_path: Path,
) -> None:
    topology = tmp_path / f"cpu{min(allowed)}" / "topology"
    topology.mkdir(parents=True)
    (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert placements(allowed, tmp_path) == expected


def test_bytes_that_differ_are_found() -> None:
    options = {"left": "", "right": "", "digest": "cd"}
    it = Contender("it", contenders.left, contenders.right, options=options)
    with (
        it.start() as found,
        pytest.raises(BenchError, match=r"ab on the left, cd on the right$"),
    ):
        found.turn(WORK, checks=True)


def test_a_connection_that_ends_midway_is_an_error() -> None:
    left, right = socket.socketpair()
    with left, right:
        right.sendall(b"ab")
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the other side has ended"):
            bare.receive_into(left, memoryview(bytearray(4)))


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ("fails", "", "^OSError: no way$"),
        ("", "fails", "^OSError: no way$"),
        ("exits", "", "^ended with status 1: no luck$"),
        ("", "exits", "^ended with status 1: no luck$"),
        ("blocks", "", r"^no answer within 0\.05 s$"),
    ],
)
def test_a_side_that_fails_is_the_reason(
    left: str, right: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"left": left, "right": right}
    it = Contender("it", contenders.left, contenders.right, options=options)
    with it.start() as found:
        if left == "blocks":
            monkeypatch.setattr(pair, "ANSWER_TIMEOUT_S", 0.05)
            monkeypatch.setattr(pair, "END_TIMEOUT_S", 0.05)
        with pytest.raises(BenchError, match=text):
            found.turn(WORK)


@pytest.mark.parametrize("number", [0, 1])
def test_a_side_that_is_killed_is_the_reason(number: int) -> None:
    with ours().start() as found:
        found.sides[number].process.kill()
        with pytest.raises(BenchError, match="ended with status -9"):
            found.turn(WORK)


def test_a_pair_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(BenchError, match="carrier"):
        ours(transport="carrier").start()
    with pytest.raises(BenchError, match=r"ended with status 1: .*carrier_pigeons"):
        Contender("it", "kvwire.cli.bench.bare:carrier_pigeons").start()
