"""One statement says one thing: what was squeezed together only saves lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.house import check
from tests.support.tree import CODE, Source


def unrelated_pairs(source: Source) -> Iterator[check.Finding]:
    """``a, b = 1, 2``, where nothing hangs on both being assigned at once.

    A swap, and any later value that reads an earlier target, is another matter.
    """
    for node in ast.walk(source.syntax):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)
            ):
                if len(targets) == len(values) and not _related(targets, values):
                    name = ast.unparse(node.targets[0])
                    text = "assign each in a statement of its own"
                    yield check.Finding(source.path, node.lineno, name, text)


def _related(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    if any(isinstance(one, ast.Starred) for one in (*targets, *values)):
        return True
    written: set[str] = set()
    for target, value in zip(targets, values, strict=True):
        if written & _names(value):
            return True
        written |= (
            {target.attr} if isinstance(target, ast.Attribute) else _names(target)
        )
    return False


def _names(tree: ast.expr) -> set[str]:
    """Names and attributes in an expression."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def unpacked_rows(source: Source) -> Iterator[check.Finding]:
    """``*("a", "b")``: a row of a literal, which holds its members as well."""
    for node in ast.walk(source.syntax):
        match node:
            case ast.Starred(value=ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_])):
                text = "write its members where it stands"
                yield check.Finding(source.path, node.lineno, "*(...)", text)


_OVER = (*CODE, "examples/")
# Files that are rewritten anyway; they follow.
_BEYOND = tuple(
    f"kvwire/transfers/{name}.py" for name in ("event_wait", "ready_log", "transfer")
)

CHECKS = (
    check.Check(
        name="a statement assigns one thing",
        over=_OVER,
        beyond=_BEYOND,
        find=check.each(unrelated_pairs),
        bad=[
            ("kvwire/kv/a.py", "a, b = 1, 2"),
            ("kvwire/kv/a.py", "self.queue, self.size = [], len(items)"),
            ("kvwire/kv/a.py", "queue, self.queue = self.queue, []"),
        ],
        good=[
            ("kvwire/kv/a.py", "a, b = b, a"),
            ("kvwire/kv/a.py", "a, b = b, a + b"),
            ("kvwire/kv/a.py", "self.last, gone = now, now - self.last"),
            ("kvwire/kv/a.py", "a, b = pair"),
            ("kvwire/kv/a.py", "first, *rest = 1, *others"),
            ("kvwire/kv/a.py", "pair = 1, 2"),
        ],
    ),
    check.Check(
        name="a literal has its members in it",
        over=_OVER,
        beyond=_BEYOND,
        find=check.each(unpacked_rows),
        bad=[
            ("kvwire/kv/a.py", "KNOWN = {*('a', 'b'), *('c',)}"),
            ("kvwire/kv/a.py", "call(*(1, 2))"),
        ],
        good=[
            ("kvwire/kv/a.py", "KNOWN = {*OTHERS, 'a'}"),
            ("kvwire/kv/a.py", "call(*(f(x) for x in xs))"),
        ],
    ),
)
