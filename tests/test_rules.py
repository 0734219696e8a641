"""Every numbered protocol rule is shown kept and shown broken (goal Q1).

docs/topics/protocol.md defines a rule in a heading or in the first cell of a table row.
A test says which rules it shows, and which way::

    @pytest.mark.rule("KVW-HD-01", "keeps")     # the rule followed, and what it gives
    @pytest.mark.rule("KVW-HD-01", "KVW-HD-02", "breaks")    # and how it is refused
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.tree import CODE, TESTS, Source, python, sources

DOCUMENT = "docs/topics/protocol.md"
SIDES = ("keeps", "breaks")

_ID = re.compile(r"KVW-[A-Z]{2}-\d{2}")
# "### KVW-HD-01 ..." and "| KVW-HD-01 | ...", with or without code or bold marks.
_DEFINITION = re.compile(rf"^(?:#+ +|\| *)[`*]*({_ID.pattern})\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mark:
    """One rule of a ``pytest.mark.rule`` in the tests."""

    where: str
    rule: str
    side: str


def defined(document: str) -> list[str]:
    """The rules a document defines, in its order."""
    return _DEFINITION.findall(document)


def marks(source: Source) -> Iterator[Mark]:
    """Every ``pytest.mark.rule(...)`` of a file, on tests, classes and parameters."""
    for node in ast.walk(source.syntax):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="mark"), attr="rule"),
                args=arguments,
            ):
                said = [ast.unparse(argument).strip("'\"") for argument in arguments]
                *rules, side = said if len(said) > 1 else [*said, ""]
                for rule in rules:
                    yield Mark(f"{source.path}:{node.lineno}", rule, side)


def cited(source: Source) -> Iterator[tuple[str, str]]:
    """Where code names a rule, in a string, a comment or a docstring; and which."""
    for number, line in enumerate(source.lines, 1):
        for rule in _ID.findall(line):
            yield f"{source.path}:{number}", rule


def problems(
    rules: list[str], shown: Sequence[Mark], named: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """What keeps the document, the code and the tests from saying the same."""
    for rule, times in Counter(rules).items():
        if times > 1:
            yield f"{rule} is defined {times} times"
    seen = set()
    for mark in shown:
        if mark.side not in SIDES:
            yield f"{mark.where}: the side is one of {SIDES}, not {mark.side!r}"
        seen.add((mark.rule, mark.side))
    for where, rule in [*named, *((mark.where, mark.rule) for mark in shown)]:
        if rule not in rules:
            yield f"{where}: {rule!r} is not in {DOCUMENT}"
    for rule, side in itertools.product(dict.fromkeys(rules), SIDES):
        if (rule, side) not in seen:
            yield f'{rule}: no test is marked rule("{rule}", "{side}")'


@pytest.mark.slow  # it reads all tests; `make check` runs it
def test_every_rule_is_shown_both_ways() -> None:
    """The document, the code and the tests name the same rules."""
    documents = sources(DOCUMENT)
    if not documents:
        pytest.fail(f"{DOCUMENT} does not exist; it numbers the protocol's rules")
    rules = defined(documents[0].text)
    assert rules, f"{DOCUMENT} defines no rule: KVW-XX-00 in a heading or a first cell"
    shown = [mark for source in python(*TESTS) for mark in marks(source)]
    named = [place for source in python(*CODE) for place in cited(source)]
    if found := list(problems(rules, shown, named)):
        pytest.fail("\n  ".join(["protocol rules:", *found]), pytrace=False)


def test_each_kind_of_problem_is_named() -> None:
    """A mention in running text defines nothing, a string in a test marks nothing."""
    document = (
        "# Protocol\n\n### KVW-HD-01 Header checksum\n\nSee KVW-HD-09.\n\n"
        "| rule | text |\n|---|---|\n| `KVW-HS-02` | x |\n| **KVW-HS-02** | x |\n"
    )
    tests = """
@pytest.mark.rule("KVW-HD-01", "keeps")
def test_a(): ...

@pytest.mark.rule("KVW-HD-05", "KVW-HD-01", "breaks")
class TestB: ...

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.rule("KVW-HD-03"))])
def test_c(x): "pytest.mark.rule('KVW-HS-02', 'keeps')"
"""
    code = 'raise MalformedFrame("KVW-HD-04", "bad")  # KVW-HD-01 as well\n'
    shown = list(marks(Source("t.py", tests)))
    assert sorted(problems(defined(document), shown, cited(Source("k.py", code)))) == [
        "KVW-HS-02 is defined 2 times",
        'KVW-HS-02: no test is marked rule("KVW-HS-02", "breaks")',
        'KVW-HS-02: no test is marked rule("KVW-HS-02", "keeps")',
        "k.py:1: 'KVW-HD-04' is not in docs/topics/protocol.md",
        "t.py:5: 'KVW-HD-05' is not in docs/topics/protocol.md",
        "t.py:8: 'KVW-HD-03' is not in docs/topics/protocol.md",
        "t.py:8: the side is one of ('keeps', 'breaks'), not ''",
    ]
