"""The linters of `make manifests`, which are not installed everywhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.runs import ran
from tests.support.tree import ROOT

INSTALL = "not installed, or not for this machine: make manifests"


def checked(*command: str) -> None:
    """Run a linter of the environment on the tree; what it finds is the failure."""
    found = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{command[0]} is {INSTALL}")
    done = ran(found, *command[1:], cwd=ROOT)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
