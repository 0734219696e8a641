"""The memory contract names a test for each of its lines; the tests are there."""

from __future__ import annotations

import re

from tests.support.tree import python, sources

PAGE = "docs/topics/memory-contract.md"
_NAMED = re.compile(r"`(?:tests/(?:\w+/)*)?(test_\w+)(\.py)?`")
_FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)


def test_every_test_that_the_page_names_exists() -> None:
    (page,) = sources(PAGE)
    files = python("tests/")
    modules = {source.path.rpartition("/")[2] for source in files}
    functions = {name for source in files for name in _FUNCTION.findall(source.text)}
    named = {name + suffix for name, suffix in _NAMED.findall(page.text)}
    assert len(named) > 20
    assert named <= functions | modules, sorted(named - functions - modules)


def test_every_line_of_a_table_says_where_it_is_shown() -> None:
    (page,) = sources(PAGE)
    rows = [line for line in page.lines if line.startswith("| ")]
    headings = [row for row in rows if row.endswith("| shown by |")]
    for row in rows:
        if row not in headings:
            assert _NAMED.search(row) or row.endswith("| same |"), row
    assert len(headings) == 4
