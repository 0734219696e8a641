"""How many lines of tests lie inside test functions, and how many around them.

What helps tests is counted with them. A state machine of Hypothesis is a test: its
rules and invariants are what a test function has inside. A *helper class* is each other
class whose name does not begin with Test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.support.tree import Source

# A folder has at most as many lines around its tests as inside them, but for these: so
# many of a hundred of their lines. It falls with each test that needs no helper.
AROUND_MAX: Final = 50
CEILINGS: Final[dict[str, int]] = {
    "packages/certify/tests": 75,
    "packages/engines/tests": 55,
    "packages/store/tests": 44,
    "packages/vllm/tests": 55,
    "tests/backend": 52,
    "tests/backends": 54,
    "tests/examples": 52,
    "tests/fault": 62,
    "tests/gpu": 75,
    "tests/programs": 96,
    "tests/protocol": 76,
    "tests/rdma": 88,
    "tests/site": 54,
    "tests/support": 95,
    "tests/wire": 64,
}
CLASSES_MAX: Final = 428


@dataclass(slots=True)
class Count:
    """What there is in a folder, in lines; a test with its decorators is inside."""

    lines: int = 0
    inside: int = 0
    tests: int = 0
    classes: int = 0

    @property
    def around(self) -> int:
        """Lines that are in no test."""
        return self.lines - self.inside

    def __str__(self) -> str:
        share = 100 * self.inside // max(self.lines, 1)
        each = self.around / max(self.tests, 1)
        return (
            f"{self.lines:6} lines, {share:3} % inside {self.tests:5} tests, "
            f"{each:6.1f} around each, {self.classes:4} helper classes"
        )


def folder(path: str) -> str:
    """The folder that a module of tests is counted in."""
    parts = path.split("/")
    if parts[0] == "packages":
        return "/".join(parts[:3])
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def counted(files: Iterable[Source]) -> dict[str, Count]:
    """What each folder has."""
    found: dict[str, Count] = {}
    for source in files:
        count = found.setdefault(folder(source.path), Count())
        count.lines += len(source.lines)
        for test in tests(source.syntax):
            decorators = [one.lineno for one in test.decorator_list]
            assert test.end_lineno is not None
            count.inside += test.end_lineno + 1 - min([test.lineno, *decorators])
            count.tests += 1
        count.classes += sum(
            not node.name.startswith("Test") and not is_machine(node)
            for node in ast.walk(source.syntax)
            if isinstance(node, ast.ClassDef)
        )
    return found


def tests(
    within: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Each test function that is in no other one, and each state machine."""
    for node in ast.iter_child_nodes(within):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test"):
                yield node
                continue
        elif isinstance(node, ast.ClassDef) and is_machine(node):
            yield node
            continue
        yield from tests(node)


def is_machine(node: ast.ClassDef) -> bool:
    """Whether Hypothesis runs this class."""
    return any(ast.unparse(base) == "RuleBasedStateMachine" for base in node.bases)


def above(found: dict[str, Count]) -> list[str]:
    """Folders with more than their ceiling, and the sum of helper classes."""
    classes = sum(count.classes for count in found.values())
    wrong = [
        f"{name}: {count.around} of {count.lines} lines are around tests, at most "
        f"{ceiling} %"
        for name, count in found.items()
        if 100 * count.around
        > count.lines * (ceiling := CEILINGS.get(name, AROUND_MAX))
    ]
    if classes > CLASSES_MAX:
        wrong.append(f"{classes} helper classes in tests, at most {CLASSES_MAX}")
    return wrong
