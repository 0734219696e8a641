"""Every line that makes a lasting container longer names its bound (goal R22).

The name stands where the container grows, next to the check that keeps it::

    self._rows[row.id] = row  # bounded: GRANTS_MAX

or in a comment above the statement. It is some module's constant; words around it may
say whose bound it is. A ``deque(maxlen=...)`` bounds itself. Locals end with
their call, so only attributes count, and locals that are another name for one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests.support.house.check import AnyFunction, Check, Finding, functions
from tests.support.tree import Source, python

_GROWING = {
    "append",
    "appendleft",
    "extend",
    "extendleft",
    "insert",
    "heappush",
    "add",
    "update",
    "setdefault",
}
_CONTAINERS = {
    "list",
    "dict",
    "set",
    "deque",
    "bytearray",
    "defaultdict",
    "OrderedDict",
    "Counter",
}
_MARK = re.compile(r"#\s*bounded:(.*)")
_NAME = re.compile(r"\b[A-Z]+(?:_[A-Z]+)+\b")


def unbounded(files: Sequence[Source]) -> Iterator[Finding]:
    """Statements that make an attribute longer and name no limit."""
    known = _limit_names()
    made = [pair for source in files for pair in _made(source.syntax)]
    containers = {name for name, value in made if _is_container(value)}
    arrays = {name for name, value in made if _is_array(value)}
    harmless = {name for name, value in made if _answers_itself(value)} - containers
    for source in files:
        for attribute, statement in _growths(source, containers):
            is_item = isinstance(statement, ast.Assign)
            if attribute in harmless or (is_item and attribute in arrays):
                continue
            names = set(_NAME.findall(_mark(source, statement)))
            text = "grows without a limit's name (# bounded: NAME)"
            if names - known:
                text = f"{', '.join(sorted(names - known))}: no constant of kvwire"
            if not names or names - known:
                yield Finding(source.path, statement.lineno, attribute, text)


def _limit_names() -> set[str]:
    return {
        node.target.id
        for source in python("kvwire/", "backends/", "packages/")
        for node in source.syntax.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _mark(source: Source, statement: ast.stmt) -> str:
    """What the comment on a statement, or on the line above it, says of its bound."""
    first = statement.lineno - 1
    last = statement.end_lineno or statement.lineno
    above = source.lines[first - 1].strip() if first else ""
    candidates = source.lines[first:last]
    if above.startswith("#"):
        candidates = [above, *candidates]
    return " ".join(mark[1] for line in candidates if (mark := _MARK.search(line)))


def _made(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """What each attribute is made as: ``self.x = value``, ``self.x: T = value``."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Attribute(attr=name), value=value):
                yield name, value


def _is_container(value: ast.expr | None) -> bool:
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.Constant(value=bytes()):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _CONTAINERS and not _answers_itself(value)
        case _:
            return False


def _is_array(value: ast.expr | None) -> bool:
    """Made with a length that assigning to an item cannot change."""
    match value:
        case ast.Call(func=ast.Name(id="bytearray" | "list")) | ast.List():
            return True
        case _:
            return False


def _answers_itself(value: ast.expr | None) -> bool:
    """A ``deque(maxlen=...)``, or an object of a class, whose own attributes count."""
    match value:
        case ast.Call(func=ast.Name(id=name), keywords=keywords):
            of_a_class = name[0].isupper() and name not in _CONTAINERS
            return of_a_class or any(keyword.arg == "maxlen" for keyword in keywords)
        case _:
            return False


def _growths(source: Source, containers: set[str]) -> Iterator[tuple[str, ast.stmt]]:
    """Each attribute that a statement makes longer, with that statement."""
    for _, function in functions(source.syntax):
        aliases = _aliases(function)
        for statement in ast.walk(function):
            if isinstance(statement, ast.stmt) and statement is not function:
                grown = (
                    g for n in _own_nodes(statement) for g in _grown(n, containers)
                )
                for target in grown:
                    if isinstance(target, ast.Attribute):
                        yield target.attr, statement
                    elif isinstance(target, ast.Name) and target.id in aliases:
                        yield aliases[target.id], statement


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The statement and its expressions, but no statement inside it."""
    yield statement
    pending: list[ast.AST] = [statement]
    while pending:
        for child in ast.iter_child_nodes(pending.pop()):
            if not isinstance(child, ast.stmt):
                yield child
                pending.append(child)


def _aliases(function: AnyFunction) -> dict[str, str]:
    """Locals that are only another name for an attribute: ``queue = self._queue``."""
    return {
        node.targets[0].id: node.value.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
    }


def _grown(node: ast.AST, containers: set[str]) -> Iterator[ast.expr]:
    """What a node makes longer: ``x.append(y)``, ``x[k] = y``, ``x += y``."""
    match node:
        case ast.Call(func=ast.Attribute(attr="heappush"), args=[grown, *_]):
            yield grown
        case ast.Call(func=ast.Attribute(value=grown, attr=verb)) if verb in _GROWING:
            yield grown
        case ast.Assign(targets=targets):
            yield from (t.value for t in targets if isinstance(t, ast.Subscript))
        case ast.AugAssign(target=ast.Attribute(attr=name) as grown, op=ast.Add()):
            if name in containers:
                yield grown


_TABLE = """
class Table:
    def __init__(self):
        self.rows = {}

    def insert(self, key, row):
        self.rows[key] = row%s
"""
_ALIAS = """
class Queue:
    def __init__(self):
        self.waiting = deque()

    def put(self, item):
        waiting = self.waiting
        waiting.append(item)
"""
_BUFFER = """
class Decoder:
    def __init__(self):
        self.pending = bytearray()

    def feed(self, data):
        self.pending += data
"""
_ARRAY = """
class Arrivals:
    def __init__(self, count):
        self.arrived = bytearray(count)

    def note(self, index):
        self.arrived[index] = 1
"""
_NUMBER = """
class Credits:
    def __init__(self):
        self.left = 0

    def give(self, more):
        found = []
        found.append(more)
        self.left += more
"""
_OBJECT = """
class Window:
    def __init__(self):
        self.left = Credits(1)

    def give(self, more):
        self.left.add(more)
"""
_ABOVE = """
def insert(table, key):
    # bounded: GRANTS_MAX in all
    table.rows.setdefault(
        key, []
    )
"""
_WITHIN = """
def insert(table, key):
    if key not in table.rows:
        # bounded: GRANTS_MAX
        table.names.append(key)
        table.rows[key] = []
"""

CHECKS = (
    Check(
        name="containers that grow name their bound",
        over=("kvwire/wire/", "kvwire/proto/", "kvwire/endpoint/connection.py"),
        find=unbounded,
        bad=[
            ("kvwire/proto/a.py", _TABLE % ""),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: NO_SUCH_LIMIT"),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: GRANTS_MAX, NO_SUCH_LIMIT"),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: by the peer's goodwill"),
            ("kvwire/proto/a.py", _ALIAS),
            ("kvwire/proto/a.py", _BUFFER),
            ("kvwire/proto/a.py", _WITHIN),
            ("kvwire/proto/a.py", "def f(self):\n    heapq.heappush(self.due, 1)"),
        ],
        good=[
            ("kvwire/proto/a.py", _TABLE % "  # bounded: GRANTS_MAX"),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: GRANTS_MAX, REGIONS_MAX"),
            ("kvwire/proto/a.py", _ABOVE),
            ("kvwire/proto/a.py", _ALIAS.replace("deque()", "deque(maxlen=9)")),
            ("kvwire/proto/a.py", _ARRAY),
            ("kvwire/proto/a.py", _NUMBER),
            ("kvwire/proto/a.py", _OBJECT),
        ],
    ),
)
