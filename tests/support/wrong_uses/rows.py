"""Reads the rows of the page, and does them."""

from __future__ import annotations

import ast
import re
from typing import Any, Final, NamedTuple

import kvwire
from tests.support.tree import ROOT
from tests.support.wrong_uses.steps import STEPS
from tests.support.wrong_uses.things import NAMES, Things

_ROW: Final = re.compile(r"^\| `?(.+?)`? \| `(\w+)` \| (.+) \|$", re.MULTILINE)
_VARIABLE: Final = re.compile(r"(KVWIRE_\w+)=(.*)")


class Row(NamedTuple):
    """Holds what is done, the error's class, and words that it has."""

    use: str
    error: str
    words: str


def rows() -> list[Row]:
    """Return the rows of the page."""
    page = (ROOT / "docs" / "reference" / "wrong-uses.md").read_text()
    return [Row(*found) for found in _ROW.findall(page)]


def do(use: str, t: Things) -> Any:
    """Do what a row says; what can be awaited is for the caller to await."""
    if use in STEPS:
        return STEPS[use](t)
    if variable := _VARIABLE.fullmatch(use):
        return kvwire.Config.load(environment={variable[1]: variable[2]})
    call = use.removeprefix("with ")
    value = _value(ast.parse(call, mode="eval").body, t)
    return value if call == use else value.__enter__()


def _value(node: ast.expr, t: Things) -> Any:
    match node:
        case ast.Name(id=name):
            return NAMES[name](t) if name in NAMES else getattr(kvwire, name)
        case ast.Attribute(value=inner, attr=name):
            return getattr(_value(inner, t), name)
        case ast.Call(func=func, args=given, keywords=options):
            arguments = [_value(one, t) for one in given]
            named = {str(one.arg): _value(one.value, t) for one in options}
            return _value(func, t)(*arguments, **named)
        case ast.Await(value=inner):
            return _value(inner, t)
        case _:
            return ast.literal_eval(node)
