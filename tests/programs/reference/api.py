"""docs/reference/api.md and the pages below it: every public name, by topic.

A page is written by hand as far as it has a title, a paragraph, the heading of each of
its names, and an example below ``<!-- example -->``. All else below a heading is
written from the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from inspect import getattr_static
from typing import Final

import kvwire
from tests.programs.reference import words
from tests.programs.reference.docstrings import (
    Links,
    defined,
    described,
    found,
    members,
)
from tests.programs.reference.words import FOLDER

_TOPIC: Final = re.compile(r"^## \[.*\]\((api/\w+\.md)\)$", re.MULTILINE)
_NAME: Final = re.compile(r'^(?=## <a id="([\w.]+)">)', re.MULTILINE)
_EXAMPLE: Final = re.compile(
    r"^<!-- example -->\n.*?^```$|^Example: .*?$", re.MULTILINE | re.DOTALL
)


@cache
def topics() -> dict[str, dict[str, str]]:
    """The names on each page, in the order of the index, each with its example."""
    index = (FOLDER / "api.md").read_text()
    return {page: dict(_examples(page)) for page in _TOPIC.findall(index)}


def names() -> dict[str, str]:
    """All names, each with its example."""
    return {name: one for page in topics().values() for name, one in page.items()}


def _examples(page: str) -> Iterator[tuple[str, str]]:
    _, *parts = _NAME.split((FOLDER / page).read_text())
    for name, section in zip(parts[::2], parts[1::2], strict=True):
        example = _EXAMPLE.search(section)
        assert example, f"{page}: {name} has no <!-- example -->"
        yield name, example[0]


def index() -> str:
    """The names of all topics."""
    return words.page(
        "api.md",
        *(
            words.table(("name", ""), (_row(name, where) for name in listed))
            for where, listed in topics().items()
        ),
    )


def page(where: str) -> str:
    """One topic: each of its names with its signature, its docstring, its example."""
    head = _NAME.split((FOLDER / where).read_text())[0]
    written = [described(*one, _links()) for one in topics()[where].items()]
    return head + "\n\n".join(written) + "\n"


@cache
def _links() -> Links:
    """Where each name is explained."""
    found_at: dict[str, str] = {}
    first: dict[object, str] = {}
    for page, listed in topics().items():
        for name in listed:
            found_at[name] = f"{page.removeprefix('api/')}#{name}"
            thing = found(name)
            for member in members(thing):
                whole = f"{name}.{member}"
                found_at[whole] = f"{page.removeprefix('api/')}#{whole}"
                first.setdefault(defined(getattr_static(thing, member)), whole)
    for name in kvwire.__all__:
        thing = getattr(kvwire, name)
        if inspect.isclass(thing) and issubclass(thing, kvwire.KVWireError):
            found_at[f"kvwire.{name}"] = f"../errors.md#{name}"
    return Links(found_at, first)


def _row(name: str, where: str) -> tuple[str, str]:
    short = name if name.count(".") > 1 else name.removeprefix("kvwire.")
    return f"[`{short}`]({where}#{name})", words.purpose(found(name))
