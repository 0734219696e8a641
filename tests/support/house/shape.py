"""Sizes, and what may be a subclass."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.support.house.check import Check, Finding, dotted, each
from tests.support.tree import Source

# Projects that set no cap have one file of thousands of lines and never split it.
FILE_LINES_MAX = 600


def long_files(source: Source) -> Iterator[Finding]:
    """A file that has become two."""
    length = len(source.lines)
    if length > FILE_LINES_MAX:
        text = f"{length} lines; {FILE_LINES_MAX} are allowed"
        yield Finding(source.path, length, "file", text)


def subclassed_values(files: Sequence[Source]) -> Iterator[Finding]:
    """Frozen dataclasses with slots are final: a frame or an event has no subkinds."""
    classes = [
        (source, node)
        for source in files
        for node in ast.walk(source.syntax)
        if isinstance(node, ast.ClassDef)
    ]
    values = {node.name for _, node in classes if _is_value(node)}
    for source, node in classes:
        for base in node.bases:
            if dotted(base).rpartition(".")[2] in values:
                text = f"subclasses the value type {dotted(base)}"
                yield Finding(source.path, node.lineno, node.name, text)


def _is_value(node: ast.ClassDef) -> bool:
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call):
            continue
        said = {
            keyword.arg
            for keyword in decorator.keywords
            if isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        }
        name = dotted(decorator.func).rpartition(".")[2]
        if name == "dataclass" and {"frozen", "slots"} <= said:
            return True
    return False


_CODE = ("kvwire/", "backends/", "tests/", "examples/")
_VALUE = "@dataclass(frozen=True, slots=True)\nclass Frame:\n    x: int\n"

CHECKS = (
    Check(
        name="files are short",
        over=(*_CODE, "docs/", "README.md", "CONTRIBUTING.md", "SECURITY.md"),
        suffixes=(".py", ".md"),
        find=each(long_files),
        bad=[("a.py", "x = 1\n" * (FILE_LINES_MAX + 1))],
        good=[("a.py", "x = 1\n" * FILE_LINES_MAX)],
    ),
    Check(
        name="value types are final",
        over=("kvwire/wire/", "kvwire/proto/"),
        find=subclassed_values,
        bad=[
            ("kvwire/wire/a.py", f"{_VALUE}class Data(Frame):\n    y: int\n"),
            ("kvwire/wire/a.py", f"{_VALUE}class Data(a.Frame):\n    y: int\n"),
        ],
        good=[("kvwire/wire/a.py", f"{_VALUE}class Data(NamedTuple):\n    y: int\n")],
    ),
)
