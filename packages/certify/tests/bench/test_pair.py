"""Two processes, what they are told and answer, where they run, and how they end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.limits import KIB, KV_LAYERS_MAX, MIB
from kvwire.memory.arena import arena_of
from kvwire.memory.copy import as_fragments
from kvwire_certify.bench import bare, pair, sides
from kvwire_certify.bench.command import VERBS, operations, work_of
from kvwire_certify.bench.pair import BenchError, Contender, placements
from kvwire_certify.bench.turns import steps, take_turns
from kvwire_certify.bench.work import ARENA, LEFT, RIGHT, BenchMemory, Pool, Work
from packages.certify.tests.bench import contenders
from packages.certify.tests.bench.contenders import (
    WORK,
    Log,
    Scripted,
    benchmark,
    case,
    does,
    measured,
)

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
        Contender("it", "kvwire_certify.bench.bare:carrier_pigeons").start()


# --- who does what when: everybody in each round, checked first, stopped last ---------


ROUNDS = 4


def test_everybody_takes_turns_after_a_check_and_a_round_that_does_not_count() -> None:
    log: Log = []
    said: list[str] = []
    a = Scripted("a", [[99.0], [99.0], [1.0, 2.0], [3.0]], log=log)
    b = Scripted("b", log=log)
    whole = benchmark(case(a, b), case(a))
    finding, _ = take_turns(whole, ROUNDS, said.append)
    assert len(said) == steps(whole, ROUNDS) == 3 * (ROUNDS + 1)
    assert set(said) == {"1 KiB send: a", "1 KiB send: b"}
    assert log.count(("a", "start")) == log.count(("a", "stop")) == 1
    calls = [(name, call) for name, call in log if call != "start"]
    assert [call for _, call in calls[:6]] == ["check", "round"] * 3
    assert [call for _, call in calls[6:]] == ["round"] * 3 * ROUNDS + ["stop"] * 2
    # Who begins changes; the third of each round is the other case.
    rounds = [name for name, call in calls[6:] if call == "round"]
    assert "".join(rounds) == "aba" + "baa" + "aba" + "baa"
    kept = finding.samples["a"].rounds
    assert list(kept[0]) == [1.0, 2.0]
    assert len(kept) == ROUNDS


@pytest.mark.parametrize(
    ("failing", "started"), [("start", 1), ("check", 2), ("round", 2)]
)
def test_who_fails_is_out_of_the_case_with_its_reason(
    failing: str, started: int
) -> None:
    """It is started anew for its next case, unless it is the start that failed."""
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log, failing=failing)
    for finding in measured(case(b, a), case(a, b), rounds=ROUNDS):
        assert len(finding.samples["a"].rounds) == ROUNDS
        assert "b" not in finding.samples
        assert finding.failures == {"b": f"b failed to {failing}"}
    assert log.count(("b", "start")) == started
    # What has not started stops by itself.
    assert log.count(("b", "stop")) == (0 if failing == "start" else started)
    assert log[-1] == ("a", "stop")


def test_an_interrupt_ends_it_with_what_there_is() -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", [[1.0], [1.0], []])
    (finding,) = measured(case(a, b), rounds=ROUNDS)
    # One round that does not count, one that does, and who began has done another.
    assert [len(s.rounds) for s in finding.samples.values()] == [1, 1]
    assert log[-1] == ("a", "stop")
    (finding,) = measured(case(Scripted("a"), Scripted("b", [[1.0], []])))
    assert list(finding.samples) == ["a"]
    assert "interrupted" in finding.failures["b"]


def test_an_interrupt_before_anything_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(case(Scripted("a", [[]])))


# --- memory of a work: its blocks lie apart, where kvwire and the digest read them ----


WORKS = [
    work_of(verb, 4 * KIB, cross_layer=cross, round_bytes=1 * MIB)
    for verb in VERBS
    for cross in (False, True)
]


@pytest.mark.parametrize("in_arena", [False, True])
def test_a_pool_lies_in_an_arena_if_it_is_asked_for(in_arena: bool) -> None:
    memory = BenchMemory(LEFT, {"memory": ARENA} if in_arena else {})
    memory.have(WORKS[0], checks=False)
    assert (arena_of(as_fragments(memory.bytes.data)) is not None) is in_arena
    memory.close()


works = st.builds(
    work_of,
    st.sampled_from(VERBS),
    st.sampled_from([4 * KIB, 64 * KIB, 1 * MIB, 4 * MIB]),
    cross_layer=st.booleans(),
    round_bytes=st.sampled_from([1 * MIB, 10 * MIB]),
)


@given(works, st.sampled_from([LEFT, RIGHT]))
def test_no_two_fragments_meet_or_follow_each_other(work: Work, side: int) -> None:
    assert work.nbytes == work.blocks * work.layers * work.layer_bytes
    assert 1 <= work.layers <= KV_LAYERS_MAX
    pool = Pool(np.empty(work.memory_bytes, np.uint8), work, side)
    places = np.sort(pool.rows)
    assert len(places) == work.fragments
    assert 0 <= places[0] <= places[-1] < work.spread * work.fragments
    assert np.all(np.diff(places) > 1)


@pytest.mark.parametrize("work", WORKS[:2], ids=lambda work: work.layout)
def test_rows_are_where_the_cache_has_its_blocks(work: Work) -> None:
    """What kvwire reads off its tensors, and where the bytes are compared."""
    pool, other = (
        Pool(np.zeros(work.memory_bytes, np.uint8), work, side)
        for side in (LEFT, RIGHT)
    )
    assert pool.blocks != other.blocks
    group = pool.cache.groups["kv"]
    starts = group.bases[:, 0][:, None] + np.array(pool.blocks) * group.strides["block"]
    if work.cross_layer:
        starts = starts[:1]
    nbytes = work.nbytes // work.fragments
    expected = pool.rows * nbytes + pool.memory.ctypes.data
    assert starts.ravel().tolist() == expected.tolist()


@pytest.mark.parametrize("beside", [False, True])
def test_a_digest_shows_a_byte_that_has_changed_in_a_block_or_beside_it(
    beside: bool,
) -> None:
    work = WORKS[0]
    memory = np.zeros(work.memory_bytes, np.uint8)
    pool = Pool(memory, work, RIGHT)
    pool.mark_beside()
    before = pool.digest()
    first = int(pool.rows[0]) ^ beside
    memory[first * work.layer_bytes] ^= 1
    after = pool.digest()
    assert after != before
    assert after.endswith(" and more on the right side") is beside
