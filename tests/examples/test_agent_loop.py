"""The agent on a store: the tokens of one without, and few computed again.

Needs torch and transformers, which `make test` does not bring; `make test-torch` does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_examples import run_example

_WHY = "not installed here; `make test-torch` installs torch and transformers"
pytest.importorskip("torch", reason=f"torch: {_WHY}")
pytest.importorskip("transformers", reason=f"transformers: {_WHY}")

pytestmark = pytest.mark.timeout(300)


def test_what_was_computed_once_is_not_computed_again(tmp_path: Path) -> None:
    """In the second process as well; the example compares the tokens."""
    size = ("--turns", "4", "--tool-tokens", "40")
    lines = run_example("agent_loop.py", tmp_path, *size, timeout_s=240).splitlines()
    rows = [list(map(int, re.findall(r"\b\d+\b", line))) for line in lines[1:5]]
    # turn, prompt, computed and ms without a store, computed and ms with one
    assert [row[1] for row in rows] == [40, 96, 152, 208]
    assert [row[2] for row in rows] == [40, 96, 152, 208]
    # All but the blocks of 16 that earlier turns have filled.
    assert [row[4] for row in rows] == [40, 48, 56, 48]
    assert "a new process" in lines[3]
    assert lines[5] == "224 tokens, equal with a store and without"
