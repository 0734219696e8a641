"""Who does what when: everybody in each round, checked first, stopped last."""

from __future__ import annotations

import pytest

from kvwire.cli.bench.pair import BenchError, Contender
from kvwire.cli.bench.turns import steps, take_turns
from tests.cli.bench.contenders import WORK, Log, Scripted, benchmark, case

ROUNDS = 4


def test_everybody_takes_turns_and_who_begins_changes() -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log)
    take_turns(benchmark(case(a, b)), ROUNDS, lambda _: None)
    timed = [name for name, call in log if call == "round"][2:]
    assert "".join(timed) == "abbaabba"


def test_the_bytes_are_checked_before_anything_is_timed() -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log)
    take_turns(benchmark(case(a, b), case(a)), ROUNDS, lambda _: None)
    calls = [call for _, call in log if call != "start"]
    assert [call for _, call in log].count("start") == 2
    assert calls[-2:] == ["stop", "stop"]
    # A check and a round that does not count, for each contender of each case.
    assert calls[:6] == ["check", "round"] * 3
    assert "check" not in calls[6:]


def test_samples_are_kept_round_by_round_without_the_first() -> None:
    warm_up = [99.0]
    a = Scripted("a", [warm_up, [1.0, 2.0], [3.0]])
    (finding,) = take_turns(benchmark(case(a)), 2, lambda _: None)
    found = finding.samples["a"]
    assert [list(sample.values) for sample in found.rounds] == [[1.0, 2.0], [3.0]]
    assert found.values == [1.0, 2.0, 3.0]


def test_progress_is_reported_as_often_as_announced() -> None:
    said: list[str] = []
    whole = benchmark(case(Scripted("a"), Scripted("b")), case(Scripted("a")))
    take_turns(whole, ROUNDS, said.append)
    assert len(said) == steps(whole, ROUNDS) == 3 * (ROUNDS + 1)
    assert set(said) == {"1 KiB send: a", "1 KiB send: b"}


def test_a_contender_of_two_cases_is_started_once() -> None:
    log: Log = []
    a = Scripted("a", log=log)
    take_turns(benchmark(case(a), case(a)), 1, lambda _: None)
    assert [call for _, call in log].count("start") == 1


def test_a_contender_beside_another_has_its_processes_and_a_work_of_its_own() -> None:
    log: Log = []
    a = Scripted("a", log=log)
    b = Contender("b", "", beside=a, asks={"count": 2 * WORK.count})
    (finding,) = take_turns(benchmark(case(a, b)), 1, lambda _: None)
    assert log.count(("a", "start")) == log.count(("a", "stop")) == 1
    moved = [finding.samples[name].rounds[0].moved_bytes for name in "ab"]
    assert moved == [WORK.moved_bytes, 2 * WORK.moved_bytes]


@pytest.mark.parametrize("failing", ["start", "check", "round"])
def test_everybody_is_stopped_when_what_is_judged_fails(failing: str) -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log, failing=failing)
    with pytest.raises(BenchError, match=f"b failed to {failing}"):
        take_turns(benchmark(case(a), case(b)), ROUNDS, lambda _: None)
    stopped = [name for name, call in log if call == "stop"]
    assert sorted(stopped) == ["a", "b"][: 1 + (failing != "start")]


@pytest.mark.parametrize("failing", ["start", "check", "round"])
def test_a_peer_that_fails_is_out_of_the_case_with_its_reason(failing: str) -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log, failing=failing)
    (finding,) = take_turns(benchmark(case(a, b)), ROUNDS, lambda _: None)
    assert len(finding.samples["a"].rounds) == ROUNDS
    assert "b" not in finding.samples
    assert finding.failures == {"b": f"b failed to {failing}"}
    # What has not started stops by itself.
    assert log.count(("b", "stop")) == (failing != "start")


def test_a_peer_that_failed_is_started_anew_for_its_next_case() -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log, failing="check")
    findings = take_turns(benchmark(case(a, b), case(a, b)), 1, lambda _: None)
    assert [list(f.failures) for f in findings] == [["b"], ["b"]]
    assert log.count(("b", "start")) == log.count(("b", "stop")) == 2


def test_a_peer_that_cannot_start_is_tried_once() -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", log=log, failing="start")
    findings = take_turns(benchmark(case(a, b), case(a, b)), 1, lambda _: None)
    assert [list(f.failures) for f in findings] == [["b"], ["b"]]
    assert log.count(("b", "start")) == 1


def test_an_interrupt_ends_it_with_what_there_is() -> None:
    log: Log = []
    a, b = Scripted("a", log=log), Scripted("b", [[1.0], [1.0], []])
    (finding,) = take_turns(benchmark(case(a, b)), ROUNDS, lambda _: None)
    # One round that does not count, one that does, and who began has done another.
    assert [len(s.rounds) for s in finding.samples.values()] == [1, 1]
    assert log[-1] == ("a", "stop")


def test_who_was_interrupted_before_the_first_round_has_failed() -> None:
    a, b = Scripted("a"), Scripted("b", [[1.0], []])
    (finding,) = take_turns(benchmark(case(a, b)), ROUNDS, lambda _: None)
    assert len(finding.samples["a"].rounds) == 1
    assert "interrupted" in finding.failures["b"]


def test_an_interrupt_before_anything_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        take_turns(benchmark(case(Scripted("a", [[]]))), 1, lambda _: None)
