"""The glossary has every word once, and no word that the code has not."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import kvwire
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()
CODE = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", PAGE))
PACKAGES = [ROOT / "kvwire", *sorted((ROOT / "backends").glob("kvwire_*"))]


def classes(path: Path) -> set[str]:
    """The public classes at the top of a file."""
    body = ast.parse(path.read_text()).body
    names = {node.name for node in body if isinstance(node, ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def test_every_public_class_is_explained() -> None:
    names = [name for name in kvwire.__all__ if name[0].isupper()]
    public = {name for name in names if inspect.isclass(getattr(kvwire, name))}
    assert public
    assert not public - CODE


def test_every_class_on_the_page_exists() -> None:
    files = [f for package in PACKAGES for f in package.rglob("*.py")]
    assert not CODE - set().union(*map(classes, files))


def test_every_word_is_there_once() -> None:
    words = Counter(re.findall(r"^\* \*\*([^*]+)\*\*", PAGE, re.MULTILINE))
    assert len(words) > 100
    assert set(words.values()) == {1}
