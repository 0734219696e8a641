"""What the pages about the structure name is there."""

from __future__ import annotations

import re

import pytest

from tests.support.tree import ROOT, python

_PAGES = ("docs/topics/architecture.md", "CONTRIBUTING.md")
_FOLDERS = ("", "kvwire", "backends", "packages")


def _named(page: str) -> list[str]:
    """What stands in backticks on a page, outside of programs."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def test_every_file_that_the_page_names_is_there() -> None:
    files = [name for name in _named(_PAGES[0]) if re.fullmatch(r"[\w/]+\.py", name)]
    assert files
    assert [
        name
        for name in files
        if not any((ROOT / folder / name).exists() for folder in _FOLDERS)
    ] == []


@pytest.mark.parametrize("page", _PAGES)
def test_every_class_that_a_page_names_is_there(page: str) -> None:
    code = python("kvwire/", "backends/", "packages/")
    text = "\n".join(source.text for source in code)
    classes = set(re.findall(r"^class (\w+)", text, re.MULTILINE))
    named = {
        name.partition(".")[0]
        for name in _named(page)
        if re.match(r"(?:[A-Z][a-z]+){2,}(?:\.\w+)?$", name)
    }
    assert named - classes - {"NewType", "UsageError"} == set()
