"""What a house rule is: a function over files, and examples that prove it can fail."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.tree import Source, sources

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that breaks a rule; ``name`` is the function, class or word there."""

    path: str
    line: int
    name: str
    text: str

    @property
    def place(self) -> str:
        """How an excuse names this place; without the line, which moves."""
        return f"{self.path}::{self.name}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.text}"


Find = Callable[[Sequence[Source]], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule over part of the tree.

    Attributes:
        beyond: Path prefixes among those that it leaves alone.
        excused: Places that may break it, each with the reason.
    """

    name: str
    over: tuple[str, ...]
    beyond: tuple[str, ...] = ()
    find: Find
    bad: Sequence[tuple[str, str]]
    good: Sequence[tuple[str, str]] = ()
    suffixes: tuple[str, ...] = (".py",)
    excused: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> tuple[Source, ...]:
        """The files of the tree that this rule reads."""
        return tuple(
            source
            for source in sources(*self.over)
            if source.path.endswith(self.suffixes)
            and not source.path.startswith(self.beyond)
        )


def each(find: Callable[[Source], Iterator[Finding]]) -> Find:
    """Lift a check of one file to a check of many."""

    def find_all(files: Sequence[Source]) -> Iterator[Finding]:
        for source in files:
            yield from find(source)

    return find_all


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, AnyFunction]]:
    """Every function with its dotted name, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, AnyFunction):
            yield prefix + node.name, node
        if isinstance(node, AnyFunction):
            yield from functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute chain; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""
