"""Who does what when: everybody in each round, checked first, stopped last."""

from __future__ import annotations

import pytest

from kvwire.cli.bench.turns import steps, take_turns
from tests.cli.bench.contenders import (
    Log,
    Scripted,
    benchmark,
    case,
    measured,
)

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
