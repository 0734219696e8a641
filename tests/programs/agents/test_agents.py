"""What the program makes of a trace, without vLLM; a small one is played with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.agents import __main__ as program
from tests.programs.agents.trace import ANSWER_TOKENS, Played, draw
from tests.support.engines.models import make_model
from tests.support.engines.serving import NEEDS_VLLM


def test_a_trace_is_that_of_its_seed() -> None:
    trace = draw(5, 2, 0.4, 1)
    assert trace == draw(5, 2, 0.4, 1)
    assert trace != draw(5, 2, 0.4, 2)
    assert [len(one.tools) for one in trace] == [2] * 5
    begins = [one.begins_s for one in trace]
    assert begins == sorted(begins)
    assert len({tuple(one.prompt) for one in trace}) == 5


def test_the_report() -> None:
    found = {
        "own cache": Played([0.2], [0.010, 0.020, 0.030]),
        "hints": Played([0.2], [0.020, 0.022, 0.040], tokens={"local_compute": 700}),
    }
    assert "after a call 22 ms" in program.line(found["hints"])
    table = program.table(found)
    assert "| hints | 22 ms | 1.10 |" in table
    assert "| 700 |" in table


@NEEDS_VLLM
@pytest.mark.timeout(900)
def test_hints_bring_a_session_back(tmp_path: Path) -> None:
    """After each pause an engine has all of it but what is new."""
    model = make_model("gqa", tmp_path)
    trace = draw(6, 1, 0.2, 1)
    found: dict[str, Played] = {}
    program.run(model, tmp_path, ["own cache", "hints"], trace, 1.0, found)
    own, hinted = found.values()
    assert hinted.answers == own.answers
    assert len(own.answers[0]) == 2 * ANSWER_TOKENS
    # Each announcement computes at most the last block that it names.
    assert hinted.tokens["local_compute"] - own.tokens["local_compute"] <= 128 * len(
        trace
    )
