"""The Python of the pages: programs run as pasted, fragments say that they are some.

A block is a program unless ``<!-- fragment -->`` stands on the line before it, which no
reader sees. Programs run in a reader's environment: without the ``KVWIRE_*`` variables
that these tests run with, and with warnings being errors.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvwire
from kvwire.extras import NotInstalledError
from tests.support.runs import python
from tests.support.tree import Source, sources

_FENCE = re.compile(
    r"^ *```(?P<language>[^\n`]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_MARK = "<!-- fragment -->\n"
# What asyncio's debug mode says of a callback on a busy machine: time, no warning.
_SLOW_CALLBACK = re.compile(r"^Executing .* took [0-9.]+ seconds\n", re.MULTILINE)
# Longer than any example, shorter than pytest's own limit.
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code of a page."""

    place: str
    language: str
    text: str
    fragment: bool


def blocks(page: Source) -> Iterator[Block]:
    """Each block of code of a page, of any language."""
    for found in _FENCE.finditer(page.text):
        line = page.text.count("\n", 0, found.start("text")) + 1
        yield Block(
            place=f"{page.path}:{line}",
            language=found["language"],
            text=textwrap.dedent(found["text"]),
            fragment=page.text.endswith(_MARK, 0, found.start()),
        )


def expected_output(program: str) -> str:
    """What the ``# prints`` comments of a program promise, line by line."""
    return "".join(
        f"{line}\n" for line in re.findall(r"# prints (.*)$", program, re.MULTILINE)
    )


def unknown_names(fragment: str) -> Iterator[str]:
    """What a fragment takes from kvwire and kvwire does not have."""
    for node in ast.walk(ast.parse(fragment)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "kvwire" and not hasattr(kvwire, node.attr):
                yield f"kvwire.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "")[:6] == "kvwire":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    yield f"{node.module}.{alias.name}"


_PAGES = [
    page
    for page in sources(
        "README.md", "CONTRIBUTING.md", "docs/", "examples/", "packages/"
    )
    if page.path.endswith(".md")
]
_BLOCKS = [block for page in _PAGES for block in blocks(page)]
_PYTHON = [block for block in _BLOCKS if block.language == "python"]
_READERS = {k: v for k, v in os.environ.items() if not k.startswith("KVWIRE_")}


def _program(block: Block) -> pytest.ParameterSet:
    """README and tutorials are what everybody runs; the others are for test-all."""
    common = block.place.startswith(("README.md", "docs/tutorial/", "packages/"))
    return pytest.param(block, marks=() if common else pytest.mark.slow)


@pytest.mark.parametrize(
    "program",
    [_program(block) for block in _PYTHON if not block.fragment],
    ids=lambda block: block.place,
)
def test_a_program_runs_as_pasted(program: Block, tmp_path: Path) -> None:
    """What a reader pastes into a file does what the page says."""
    file = tmp_path / "example.py"
    file.write_text(program.text)
    done = python(
        "-W",
        "error",
        "-X",
        "dev",
        str(file),
        cwd=tmp_path,
        env=_READERS,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert not _SLOW_CALLBACK.sub("", done.stderr)
    assert done.stdout == expected_output(program.text)


@pytest.mark.parametrize(
    "fragment",
    [block for block in _PYTHON if block.fragment],
    ids=lambda block: block.place,
)
def test_a_fragment_is_python_and_knows_kvwire(fragment: Block) -> None:
    try:
        unknown = list(unknown_names(fragment.text))
    except NotInstalledError as exc:
        pytest.skip(str(exc))
    assert not unknown


def test_python_is_marked_as_python() -> None:
    """Under another name it would be neither run nor read."""
    languages = {block.language for block in _BLOCKS}
    assert {name for name in languages if name.startswith("py")} == {"python"}


def test_names_that_kvwire_does_not_have() -> None:
    wrong = "from kvwire.types import Addres\nawait kvwire.oppen(kvwire.Config())"
    assert sorted(unknown_names(wrong)) == ["kvwire.oppen", "kvwire.types.Addres"]
