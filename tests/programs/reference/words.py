"""Docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from tests.support.docs_site import plain

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


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; its cells may hold no bar of their own."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |"
        for line in lines
    )
