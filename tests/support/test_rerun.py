"""A test that fails by chance is named; one that fails again fails the run."""

from __future__ import annotations

import pytest

from tests.support.rerun import RERUN_MAX
from tests.support.tree import ROOT

_SECTION = "failed, and passed when run by themselves"
_TESTS = """
from pathlib import Path
import pytest

def by_chance(name):
    if not Path(name).exists():
        Path(name).touch()
        raise AssertionError(name)

def test_good():
    with Path("good").open("a") as file:
        file.write("once ")

@pytest.mark.parametrize("which", range(4))
def test_chance(which):
    by_chance(f"chance{which}")

@pytest.fixture
def leaves():
    yield
    by_chance("teardown")

def test_teardown(leaves):
    pass

def test_bad():
    assert False
"""


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize(
    ("chosen", "most", "passes", "named"),
    [
        pytest.param("good", "3", True, 0, id="none failed"),
        pytest.param("good or chance0", "3", True, 1, id="one by chance"),
        pytest.param("good or teardown", "3", True, 1, id="what it leaves behind"),
        pytest.param("good or chance0", "0", False, 0, id="not allowed"),
        pytest.param("good or chance", "3", False, 0, id="more than allowed"),
        pytest.param("good or chance0 or bad", "3", False, 0, id="one fails again"),
    ],
)
def test_a_run_passes_if_what_failed_passes_alone(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    processes: str,
    chosen: str,
    most: str,
    passes: bool,
    named: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(RERUN_MAX, most)
    file = pytester.makepyfile(_TESTS)
    chosen = chosen.replace("chance0", "chance and 0")
    plugins = "--disable-plugin-autoload -p xdist -p tests.support.rerun"
    result = pytester.runpytest_subprocess(
        *plugins.split(), "--numprocesses", processes, "-k", chosen, file
    )
    assert (result.ret == pytest.ExitCode.OK) == passes
    lines = result.outlines
    shown = [at for at, line in enumerate(lines) if _SECTION in line]
    assert len(shown) == named
    if named:
        assert "::test_" in lines[shown[0] + 2]
    # The others are not run again.
    assert (pytester.path / "good").read_text() == "once "
