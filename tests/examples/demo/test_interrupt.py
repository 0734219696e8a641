"""Ctrl-C at any moment of ``make demo``: no traceback, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwire.cli.main import FAILED, INTERRUPTED
from tests.support.tree import ROOT

pytestmark = [
    pytest.mark.skipif(
        not Path("/proc/self/stat").exists(), reason="finds the processes in /proc"
    ),
]

# What the demo has just said when it is interrupted; its next step is under way.
MOMENTS = [
    "starting three processes",
    *(
        pytest.param(moment, marks=pytest.mark.slow)
        for moment in ("prefill has", "requests start", "now the same")
    ),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_it_without_a_traceback(moment: str) -> None:
    """As a terminal sends it: to the process group that it shows."""
    with started("--requests", "2") as demo:
        read_until(demo, moment)
        family = [demo.pid, *children(demo.pid)]
        os.killpg(demo.pid, signal.SIGINT)
        rest, errors = demo.communicate(timeout=300)
    assert "Tokens:" not in rest
    assert (demo.returncode, errors) == (INTERRUPTED, "")
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_process_that_is_interrupted_by_itself_is_named() -> None:
    """Nor does one of the others show a traceback."""
    with started("--requests", "2") as demo:
        read_until(demo, "requests start")
        for pid in children(demo.pid):
            os.kill(pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=300)
    assert demo.returncode == FAILED
    (line,) = errors.splitlines()
    assert re.fullmatch(r"kvwire: the \w+ process ended with exit status -2", line)


def read_until(demo: subprocess.Popen[str], moment: str) -> None:
    assert demo.stdout is not None
    assert any(moment in line for line in demo.stdout), "it ended before"


def started(*arguments: str) -> subprocess.Popen[str]:
    # In a group of its own: what ends this group by mistake ends no test run.
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(ROOT / "examples/demo"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def children(parent: int) -> Iterator[int]:
    """The processes that a process has started."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                yield int(folder.name)
