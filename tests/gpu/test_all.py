"""The program that a machine with a GPU runs, without one: every step, and its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.all import FAILED, NOT_RUN, PASSED, Step, run_step
from tests.support.runs import python


@pytest.mark.slow
def test_each_step_has_a_form_without_a_gpu(tmp_path: Path) -> None:
    done = python("-m", "tests.gpu.all", "--simulated", "--out", tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    states = {one["name"]: one["state"] for one in found["steps"]}
    assert FAILED not in states.values()
    assert states.pop("rates") == NOT_RUN
    notes = {one["name"]: one["output"] for one in found["steps"]}
    for name, state in states.items():
        assert state == PASSED or "is not installed" in notes[name], notes[name]
    page = (tmp_path / "gpu.md").read_text()
    assert all(name in page for name in states)


def test_a_step_ends_in_time() -> None:
    """One that hangs is killed, one that would not fit is not begun."""
    hangs = Step(
        "hangs", (), ("timeit", "-n", "1", "import time; time.sleep(60)"), "", 1
    )
    result = run_step(hangs, simulated=True, left_s=2.0)
    assert (result.state, result.seconds < 30) == (FAILED, True)
    assert "its time was over" in result.output
    late = run_step(hangs, simulated=True, left_s=0.1)
    assert late.state == NOT_RUN
    absent = Step("absent", (), ("timeit",), "no_such_module", 1)
    assert "no_such_module" in run_step(absent, simulated=True, left_s=9.0).output
