"""Real actors of a local Ray: see cases.py."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.support.runs import python
from tests.support.tree import ROOT

PROGRAM = Path(__file__).with_name("cases.py")
OWN = 3


def cases() -> list[str]:
    """The program's checks; the first are kvwire's own."""
    tree = ast.parse(PROGRAM.read_text()).body
    table = [
        str(key.value)
        for one in tree
        if isinstance(one, ast.AnnAssign) and isinstance(one.value, ast.Dict)
        for key in one.value.keys
        if isinstance(key, ast.Constant)
    ]
    return [
        one.name
        for one in tree
        if isinstance(one, ast.FunctionDef) and one.decorator_list
    ] + table


def test_the_page_counts_what_is_tried() -> None:
    page = (ROOT / "docs" / "howto" / "engines.md").read_text()
    assert f"repeats {len(cases()[OWN:])} of Ray's own cases" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tensors_go_from_actor_to_actor() -> None:
    for name in ("ray", "torch", "tensordict"):
        pytest.importorskip(name, reason=f"{name} is not installed; `make test-ray`")
    done = python(
        "-m",
        "packages.engines.tests.ray.cases",
        cwd=ROOT,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray has lines of its own there.
    assert set(cases()) <= set(done.stdout.splitlines())
