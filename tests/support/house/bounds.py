"""Every container that lives on and grows names its bound (goal R22).

The name stands where the container is made, which is where a reader looks for it::

    self._grants: dict[GrantId, Grant] = {}  # bounded: GRANTS_MAX

or, where the line is full, as a comment of its own above it. Each name is one of
``kvwire/limits.py``. A ``deque(maxlen=...)`` bounds itself. Locals end with their call,
so only attributes count, and locals that are another name for one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests.support.house.check import Check, Finding, functions
from tests.support.tree import Source, python

GROWING = {
    *("append", "appendleft", "extend", "extendleft", "insert"),
    *("add", "update", "setdefault", "push", "heappush"),
}
_MARK = re.compile(r"#\s*bounded:\s*([A-Z][A-Z0-9_]*(?:,\s*[A-Z][A-Z0-9_]*)*)")
_CONTAINERS = {
    *("list", "dict", "set", "deque", "bytearray", "defaultdict", "OrderedDict"),
    *("Counter",),
}


def unbounded(files: Sequence[Source]) -> Iterator[Finding]:
    """Attributes that grow somewhere and whose definition names no limit."""
    for source in files:
        yield from _wrong_names(source)
    made = [
        (source, attribute, node)
        for source in files
        for attribute, node in _definitions(source.syntax)
    ]
    containers = {name for _, name, node in made if _is_container(node.value)}
    grown: dict[str, tuple[str, int]] = {}
    for source in files:
        for attribute, line in _grown(source, containers):
            grown.setdefault(attribute, (source.path, line))
    for source, attribute, node in made:
        if attribute in grown and not (
            _is_scalar(node) or _answers_itself(node.value) or _is_marked(source, node)
        ):
            text = f"grows at {':'.join(map(str, grown[attribute]))}; # bounded: NAME?"
            yield Finding(source.path, node.lineno, attribute, text)
    for attribute in grown.keys() - {name for _, name, _ in made}:
        text = "grows and is not defined in these files"
        yield Finding(*grown[attribute], attribute, text)


def _wrong_names(source: Source) -> Iterator[Finding]:
    known = _limit_names()
    for number, line in enumerate(source.lines, 1):
        if mark := _MARK.search(line):
            for name in re.split(r",\s*", mark[1]):
                if name not in known:
                    yield Finding(source.path, number, name, "is no name of limits.py")


def _limit_names() -> set[str]:
    (limits,) = python("kvwire/limits.py")
    return {
        node.target.id
        for node in limits.syntax.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _definitions(tree: ast.AST) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """Where attributes are made: a field in a class body, or in ``__init__``."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                for field in body:
                    match field:
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            yield name, field
            case ast.FunctionDef(name="__init__" | "__post_init__"):
                yield from _made_in(node)


def _made_in(init: ast.FunctionDef) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    for node in ast.walk(init):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)]):
                yield name, node
            case ast.AnnAssign(target=ast.Attribute(attr=name)):
                yield name, node


def _is_marked(source: Source, node: ast.stmt) -> bool:
    last = node.end_lineno or node.lineno
    above = source.lines[node.lineno - 2].strip() if node.lineno > 1 else ""
    candidates = source.lines[node.lineno - 1 : last]
    if above.startswith("#"):
        candidates = [above, *candidates]
    return any(_MARK.search(line) for line in candidates)


def _is_scalar(node: ast.Assign | ast.AnnAssign) -> bool:
    """Made as a number or a text: another attribute of the same name is meant."""
    match node:
        case ast.AnnAssign(annotation=ast.Name(id="int" | "float" | "bool" | "str")):
            return True
        case ast.Assign(value=ast.Constant(value=int() | float() | str())):
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


def _is_container(value: ast.expr | None) -> bool:
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.Constant(value=bytes()):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _CONTAINERS
        case _:
            return False


def _grown(source: Source, containers: set[str]) -> set[tuple[str, int]]:
    """Attributes that some statement makes longer, and the line of it."""
    found: set[tuple[str, int]] = set()
    for _, function in functions(source.syntax):
        aliases = _aliases(function)
        for node in ast.walk(function):
            for grown in _growth(node, containers):
                if isinstance(grown, ast.Attribute):
                    found.add((grown.attr, grown.lineno))
                elif isinstance(grown, ast.Name) and grown.id in aliases:
                    found.add((aliases[grown.id], grown.lineno))
    return found


def _aliases(function: ast.AST) -> dict[str, str]:
    """Locals that are only another name for an attribute: ``queue = self._queue``."""
    return {
        node.targets[0].id: node.value.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
    }


def _growth(node: ast.AST, containers: set[str]) -> Iterator[ast.expr]:
    """What a node makes longer: ``x.append(y)``, ``x[k] = y``, ``x += y``."""
    match node:
        case ast.Call(func=ast.Attribute(value=grown, attr=verb)) if verb in GROWING:
            yield node.args[0] if verb == "heappush" else grown
        case ast.Assign(targets=targets):
            yield from (t.value for t in targets if isinstance(t, ast.Subscript))
        case ast.AugAssign(target=ast.Attribute(attr=name) as grown, op=ast.Add()):
            if name in containers:
                yield grown


_TABLE = """
class Table:
    def __init__(self):
        self.rows = {}%s

    def insert(self, key, row):
        self.rows[key] = row
"""
_BUFFER = """
class Decoder:
    def __init__(self):
        self.pending = bytearray()

    def feed(self, data):
        self.pending += data
"""
_NUMBER = """
class Credits:
    left: int

def give(credits, more):
    left = [more]
    credits.left += more
"""
_OBJECT = """
class Window:
    def __init__(self):
        self.left = Credits(1)

    def give(self, more):
        self.left.add(more)
"""
_ALIAS = """
class Queue:
    def __init__(self):
        self.waiting = deque()

    def put(self, item):
        waiting = self.waiting
        waiting.append(item)
"""
_ABOVE = """
class Table:
    # bounded: GRANTS_MAX
    rows: dict[int, list[bytes]]

def insert(table, key):
    table.rows.setdefault(key, [])
"""

CHECKS = (
    Check(
        name="containers that grow name their bound",
        over=("kvwire/wire/", "kvwire/proto/", "kvwire/connection.py"),
        find=unbounded,
        bad=[
            ("kvwire/proto/a.py", _TABLE % ""),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: NO_SUCH_LIMIT"),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: by the peer's goodwill"),
            ("kvwire/proto/a.py", _ALIAS),
            ("kvwire/proto/a.py", "def f(self):\n    self.seen.add(1)"),
            ("kvwire/proto/a.py", "def f(self):\n    heapq.heappush(self.due, 1)"),
            ("kvwire/proto/a.py", _BUFFER),
        ],
        good=[
            ("kvwire/proto/a.py", _TABLE % "  # bounded: GRANTS_MAX"),
            ("kvwire/proto/a.py", _TABLE % "  # bounded: GRANTS_MAX, REGIONS_MAX"),
            ("kvwire/proto/a.py", _ABOVE),
            ("kvwire/proto/a.py", _ALIAS.replace("deque()", "deque(maxlen=9)")),
            ("kvwire/proto/a.py", "def f():\n    found = []\n    found.append(1)"),
            ("kvwire/proto/a.py", _NUMBER),
            ("kvwire/proto/a.py", _OBJECT),
        ],
    ),
)
