"""What the program makes of its rounds, without vLLM; a small one runs with it."""

from __future__ import annotations

import json
import random
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from packages.vllm.tests.programs.failover import __main__ as program
from packages.vllm.tests.programs.failover.arena import (
    BLOCK_TOKENS,
    Round,
    Workload,
    arena,
    pause_s,
    step_s,
)
from packages.vllm.tests.programs.failover.cost import Cost, Rates, cost_of_hooks
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.serving import NEEDS_VLLM

AT = [[0.0, 1.0, 1.1, 1.2], [0.0, 0.1, 0.2, 0.3]]


def round_of(**more: object) -> Round:
    said = {"engine": 1, "moved": 1, "at": 0.5, "tokens_at": AT, "pauses_s": [1.0, 0.1]}
    return Round(**{**said, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "bad"),
    [
        ({"computed": BLOCK_TOKENS}, False),
        ({"computed": 2 * BLOCK_TOKENS}, True),
        ({"computed": 2 * BLOCK_TOKENS, "moved": 2}, False),
        ({"wrong": 1}, True),
        ({"lost": 1}, True),
    ],
)
def test_a_round_is_bad_if_anything_happened_that_never_may(
    more: dict[str, int], bad: bool
) -> None:
    assert round_of(**more).bad is bad


def test_a_round_is_late_above_ten_steps_and_a_second() -> None:
    assert not round_of(step_s=0.01, pauses_s=[1.09, 0.1]).late
    assert round_of(step_s=0.01, pauses_s=[1.11, 0.1]).late


def test_streams_begin_somewhere_in_the_answers() -> None:
    answers = [list(range(100)), list(range(200, 300))]
    work = Workload([[7], [8, 9]], 100, answers)
    cut = work.cut(random.Random(1), 20)
    assert cut.tokens == 20
    for before, whole, ids, answer in zip(
        work.prompts, answers, cut.prompts, cut.answers, strict=True
    ):
        at = len(ids) - len(before)
        assert ids == [*before, *whole[:at]]
        assert answer == whole[at : at + 20]
        assert len(answer) == 20


def test_a_pause_counts_from_the_kill_on() -> None:
    assert pause_s(AT[0], 0.5) == 0.5
    assert pause_s(AT[0], 1.0) == pytest.approx(0.1)
    found = round_of(at=0.25)
    found.measure(AT)
    assert found.pauses_s == pytest.approx([0.75, 0.05])
    assert found.resumed_s == pytest.approx([0.75, 0.05])
    assert (found.around_s, found.before_s) == pytest.approx((1.0, 0.1))
    assert found.step_s == pytest.approx(0.1)
    assert pause_s([], 0.0) == 0


@pytest.mark.parametrize(
    ("step_s", "noticed_s", "slow"),
    [(0.1, 0.0, False), (0.05, 0.0, True), (0.05, 0.3, False)],
)
def test_a_stream_is_slow_from_the_moment_that_a_kill_was_noticed(
    step_s: float, noticed_s: float, slow: bool
) -> None:
    found = round_of(step_s=step_s, noticed_s=noticed_s, resumed_s=[0.75, 0.05])
    assert found.slow is slow


def test_a_step_is_a_mean_without_the_pause() -> None:
    assert step_s([0.0, 0.1, 0.1, 0.3, 5.0]) == pytest.approx(0.1)
    assert step_s([1.0]) == 0


def test_the_report(tmp_path: Path) -> None:
    rounds = [
        round_of(computed=100, step_s=0.1, noticed_s=0.25),
        round_of(computed=300, wrong=1, step_s=0.1, pauses_s=[2.1]),
    ]
    assert "wrong 1" in program.line(rounds[1])
    table = program.table(rounds)
    assert "| tokens computed again, per stream | 200 |" in table
    assert "| rounds above a block and a step for each stream | 1 |" in table
    assert "| rounds with no token for 10 steps after it was noticed | 0 |" in table
    assert "| rounds with a pause above 10 steps and a second | 1 |" in table
    assert "| longest pause from the kill on | 2.10 s |" in table
    assert "| a kill noticed after, at most | 0.25 s |" in table
    cost = Cost(4, Rates([96.0], [1.1]), Rates([100.0], [1.0]), Rates([98.0], [1.0]))
    said = program.cost_line(cost)
    assert "0.960 times as fast" in said
    assert "does nothing: 0.980" in said
    assert "a step of 40.00 ms takes 1.67 ms longer" in said
    program.plot(rounds, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_a_round_without_streams_counts_only_if_something_happened(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rounds.json"
    options = {"seed": 1, "model": "gqa"}
    rounds = program.Rounds.read(path, options)
    rounds.take(round_of())
    rounds.take(round_of(moved=0))
    lost = round_of(moved=0, lost=1)
    rounds.take(lost)
    path.write_text(json.dumps(rounds.document()))
    again = program.Rounds.read(path, options)
    assert again.counted == [round_of(), lost]
    assert (again.idle, again.played) == (1, 3)


def test_rounds_are_played_until_enough_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round with lost streams is bad, even if none of them moved."""
    rounds = [round_of(moved=0), round_of(step_s=0.1), round_of(moved=0, lost=1)]
    place = MagicMock()
    place.round.side_effect = rounds
    monkeypatch.setattr(program, "arena", lambda *_, **__: nullcontext(place))
    monkeypatch.setattr(Workload, "of", lambda *_: Workload([], 3600, []))
    monkeypatch.setattr(program, "make_model", lambda *_: tmp_path)
    command = ["failover", "--kills", "2", "--json", str(tmp_path / "rounds.json")]
    monkeypatch.setattr(sys, "argv", command)
    assert program.main() == 1
    printed = capsys.readouterr().out
    assert "| engines ended | 2 |" in printed
    assert "| streams lost | 1 |" in printed
    assert "1 more rounds, whose engine had no streams, do not count" in printed


def test_rounds_with_other_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps(program.Rounds({"seed": 1}).document()))
    with pytest.raises(SystemExit, match=r"'seed': 1.*'seed': 2"):
        program.Rounds.read(path, {"seed": 2})
    path.write_text('{"rounds": []}')
    with pytest.raises(SystemExit, match="options None"):
        program.Rounds.read(path, {"seed": 1})


def test_what_the_connector_takes_of_a_step(tmp_path: Path) -> None:
    found = cost_of_hooks(tmp_path, streams=2, steps=3 * BLOCK_TOKENS)
    assert 0 < found.engine_s < 1
    assert found.process_s > 0
    assert found.blocks == 6


@NEEDS_VLLM
@pytest.mark.timeout(900)
def test_a_kill_costs_a_step(tmp_path: Path) -> None:
    """Of real engines, streams and a store server."""
    model = make_model("gqa", tmp_path)
    with arena(model, tmp_path) as place:
        work = Workload.of(4, 600, 1, place.engines[0])
        found = place.round(work.cut(random.Random(1), 160), 90, signal.SIGKILL)
    assert not found.bad, program.line(found)
    assert found.moved > 0
