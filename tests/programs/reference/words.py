"""Docstrings as Markdown, and pages with tables that are written from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Final

from tests.support.docs_site import plain
from tests.support.tree import ROOT

FOLDER: Final = ROOT / "docs" / "reference"
_BLOCK: Final = re.compile(
    r"(<!-- (?:diagram|example): ([\w, ]+) -->\n```\w+\n).*?(```\n)", re.DOTALL
)
_TABLE: Final = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)

# An attribute begins a line of its own: "name: text".
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*)$")


def purpose(thing: object) -> str:
    text = inspect.getdoc(thing)
    assert text is not None, f"{thing!r} has no docstring"
    return markdown(text.split("\n\n")[0])


def attributes(thing: type) -> dict[str, str]:
    """The ``Attributes:`` section of a class: each name with what it says of it."""
    found: dict[str, str] = {}
    lines = (inspect.getdoc(thing) or "").partition("Attributes:\n")[2].splitlines()
    name = ""
    for line in lines:
        if line and line[0] != " ":
            break  # the next section
        begins = _ATTRIBUTE.match(line)
        if begins is not None:
            name = begins[1]
            found[name] = begins[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return {name: markdown(text) for name, text in found.items()}


def markdown(text: str) -> str:
    """A paragraph of a docstring as one line of Markdown."""
    return plain(" ".join(text.split()))


def anchored(name: str) -> str:
    """A name in a table, to which pages can link as ``page.md#name``."""
    return f'<a id="{name}"></a>`{name}`'


def page(name: str, *tables: str) -> str:
    """A page with these tables in place of its own; the rest is written by hand."""
    texts = _TABLE.split((FOLDER / name).read_text())
    assert len(texts) == len(tables) + 1, f"{name} has {len(texts) - 1} tables"
    pairs = zip(texts, (*tables, ""), strict=True)
    return "".join(f"{text}{table}" for text, table in pairs)


def with_blocks(page: str, made: Mapping[str, str]) -> str:
    """A page of docs with these blocks in place of its own, each below its name."""
    text = (FOLDER.parent / page).read_text()
    assert sorted(block[2] for block in _BLOCK.finditer(text)) == sorted(made)
    return _BLOCK.sub(lambda block: block[1] + made[block[2]] + block[3], text)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; its cells may hold no bar of their own."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n"
        for line in lines
    )
