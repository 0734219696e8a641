"""The glossary has every word once, and no word that the code has not."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import kvwire
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()
CODE = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", PAGE))
PACKAGES = [ROOT / "kvwire", *sorted((ROOT / "backends").glob("kvwire_*"))]

# Events and messages are named after the frames and the calls that they report.
STATE_FILES = sorted(
    {
        *(ROOT / "kvwire" / "proto").glob("*.py"),
        *(ROOT / "kvwire" / "store" / "operations").glob("*.py"),
        ROOT / "kvwire" / "transfers" / "state.py",
        ROOT / "kvwire" / "driver" / "lanes" / "state.py",
        *(
            ROOT / "kvwire" / "store" / name
            for name in (
                "index.py",
                "namespace.py",
                "tier_stack.py",
                "server/buffers.py",
                "server/client.py",
                "server/server.py",
                "server/session.py",
                "tiers/base.py",
                "tiers/disk.py",
                "tiers/memory.py",
                "tiers/object.py",
                "tiers/remote.py",
                "tiers/slabs.py",
            )
        ),
    }
    - {ROOT / "kvwire" / "proto" / "events.py"}
)


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


@pytest.mark.parametrize("path", STATE_FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_class_of_a_state_file_is_explained(path: Path) -> None:
    assert not classes(path) - CODE


def test_every_class_on_the_page_exists() -> None:
    files = [f for package in PACKAGES for f in package.rglob("*.py")]
    assert not CODE - set().union(*map(classes, files))


def test_every_word_is_there_once() -> None:
    words = Counter(re.findall(r"^\* \*\*([^*]+)\*\*", PAGE, re.MULTILINE))
    assert len(words) > 100
    assert set(words.values()) == {1}
