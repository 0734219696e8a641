"""The coverage check fails on a missing branch, a missing test file, a failing test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.module_coverage import Pair, pairs, shortfall

pytestmark = pytest.mark.slow  # pytest within coverage, in processes of their own

_MODULE = """
def sign(x: int) -> int:
    if x < 0:
        return -1
    return 1
"""
_SETTINGS = """
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = ["--disable-plugin-autoload"]
"""
_HALF = "from kvwire.wire.a import sign\ndef test_a(): assert sign(1) == 1\n"
_WHOLE = _HALF + "def test_b(): assert sign(-1) == -1\n"
_WRONG = _WHOLE + "def test_c(): assert sign(0) == 0\n"


def _pair(root: Path, test: str | None) -> Pair:
    """A tree with one module in it, and its test file if there is to be one."""
    (root / "pyproject.toml").write_text(_SETTINGS)
    (root / "kvwire/wire").mkdir(parents=True)
    (root / "tests/wire").mkdir(parents=True)
    # Packages of their own, or the installed kvwire would be the one imported.
    (root / "kvwire/__init__.py").touch()
    (root / "kvwire/wire/__init__.py").touch()
    (root / "kvwire/wire/a.py").write_text(_MODULE)
    if test is not None:
        (root / "tests/wire/test_a.py").write_text(test)
    (pair,) = pairs(root)
    return pair


def test_full_branch_coverage_passes(tmp_path: Path) -> None:
    """Every branch of the module, by its own test file."""
    assert shortfall(_pair(tmp_path, _WHOLE), tmp_path) == ""


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        (_HALF, "less than fail-under=100"),
        (_WRONG, "assert 1 == 0"),
        (None, "test_a.py does not exist"),
    ],
    ids=["a branch is missing", "a test fails", "no test file"],
)
def test_each_shortfall_is_told(
    test: str | None, complaint: str, tmp_path: Path
) -> None:
    """In the words of the tool that found it."""
    assert complaint in shortfall(_pair(tmp_path, test), tmp_path)
