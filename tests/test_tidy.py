"""The house style, executed; each rule is shown to fail on bad examples of its own."""

from __future__ import annotations

import re

import pytest

from tests.support import tree
from tests.support.house import CHECKS, Check
from tests.support.tree import Source

_FOLDERS = {
    "kvwire",
    "backends",
    "examples",
    "tests",
    "docs",
    "changes",
    "deploy",
    "packages",
    ".ci",
}

# Rules about the text of files: `make check` runs them, and so does make test-all.
# The check that parses every file took 33 s alone, and over 60 s beside other work.
pytestmark = [pytest.mark.slow]

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


@every_check
def test_the_tree_keeps_the_rule(check: Check) -> None:
    """No finding but the excused ones, and no excuse without its finding."""
    files = check.files()
    assert files, f"{check.name!r} reads no file: {check.over}"
    found = list(check.find(files))
    broken = [str(finding) for finding in found if finding.place not in check.excused]
    if broken:
        pytest.fail("\n  ".join([check.name, *broken]), pytrace=False)
    stale = check.excused.keys() - {finding.place for finding in found}
    assert not stale, f"excused and no longer found: {sorted(stale)}"


@every_check
def test_bad_examples_are_found(check: Check) -> None:
    """Each bad example alone makes the rule fail."""
    assert check.bad
    for path, text in check.bad:
        assert list(check.find([Source(path, text)])), f"not found in:\n{text}"


@every_check
def test_good_examples_pass(check: Check) -> None:
    """What comes close to breaking the rule and does not."""
    assert check.good
    for path, text in check.good:
        assert not list(check.find([Source(path, text)])), f"found in:\n{text}"


@every_check
def test_examples_lie_where_the_rule_looks(check: Check) -> None:
    """An example outside the rule's own scope would prove nothing about it."""
    for path, _ in (*check.bad, *check.good):
        assert path.endswith(check.suffixes)


def test_no_other_folder_at_the_top() -> None:
    """Tools and benchmarks live in the package or in the tests."""
    assert tree.folders() <= _FOLDERS


def test_changes_wait_in_files_of_their_own() -> None:
    """A heading for them in CHANGELOG.md would be one that all branches write below."""
    text = (tree.ROOT / "CHANGELOG.md").read_text()
    assert "Unreleased" not in text
    # A merge that brings an old list back is noticed as well.
    longest = max(len(notes.splitlines()) for notes in text.split("\n## ["))
    assert longest <= 150, f"{longest} lines about one release: see changes/README.md"


@pytest.mark.parametrize("script", [".ci/run", ".ci/pythons", "Makefile"])
def test_tests_named_by_a_script_exist(script: str) -> None:
    """With processes of its own, pytest runs no test and names no folder it missed."""
    text = (tree.ROOT / script).read_text()
    named = set(
        re.findall(r"(?<![\w/])(?:packages/\w+/)?tests/[\w/.*]+\w\b(?!/?\*)", text)
    )
    assert named
    assert [path for path in sorted(named) if not any(tree.ROOT.glob(path))] == []


def test_excuses_are_sentences() -> None:
    """An excuse is an argument that a reviewer can disagree with."""
    for check in CHECKS:
        for place, reason in check.excused.items():
            assert len(reason.split()) >= 4, f"{place}: {reason!r} says too little"
