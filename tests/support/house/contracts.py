"""What names and docstrings owe their reader."""

from __future__ import annotations

import ast
import posixpath
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.support.house import check
from tests.support.tree import CODE, Source


def cancel_safety(source: Source) -> Iterator[check.Finding]:
    """Everything public that is awaited says what cancelling the await does.

    That is every coroutine, and every function that returns a ``Request``. An
    ``@override`` inherits the promise of what it overrides, and an ``@overload`` has
    that of the function below it.
    """
    for name, node in check.functions(source.syntax):
        if not _is_awaited(node) or not _is_public(name):
            continue
        marks = {check.dotted(d).rpartition(".")[2] for d in node.decorator_list}
        if marks & {"override", "overload"}:
            continue
        if "Cancel safety:" not in (ast.get_docstring(node) or ""):
            yield check.Finding(
                source.path, node.lineno, name, 'no "Cancel safety:" section'
            )


def _is_awaited(node: check.AnyFunction) -> bool:
    if isinstance(node, ast.AsyncFunctionDef):
        return True
    match node.returns:
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            return name in {"Request", "Awaitable", "Coroutine"}
        case _:
            return False


def _is_public(name: str) -> bool:
    return not any(part.startswith(("_", "<")) for part in name.split("."))


def classes_of_one_name(files: Sequence[Source]) -> Iterator[check.Finding]:
    """A public class that is called as another one is, wherever that stands."""
    seen: dict[str, str] = {}
    for source in files:
        for node in ast.walk(source.syntax):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if node.name in seen:
                text = f"{seen[node.name]} has a class of this name"
                yield check.Finding(source.path, node.lineno, node.name, text)
            seen[node.name] = source.path


# Of named tuples, which have no other name for them.
_NAMEDTUPLE = {"_replace", "_make", "_asdict", "_fields"}
_OWN = {"self", "cls", "mcs"}


def private_reaches(files: Sequence[Source]) -> Iterator[check.Finding]:
    """A private name of an object whose class is in another folder.

    Modules of others are left alone, and so is what a class inherits.
    """
    defined: dict[str, set[str]] = defaultdict(set)
    for source in files:
        defined[posixpath.dirname(source.path)].update(_defined(source.syntax))
    for source in files:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(source.syntax)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        known = defined[posixpath.dirname(source.path)] | _NAMEDTUPLE
        for node in ast.walk(source.syntax):
            owner, name = _reached(node)
            if not name.startswith("_") or name.endswith("__") or name in known:
                continue
            if owner not in _OWN | imported | {"super()"}:
                text = f"{owner}.{name} is private to another folder"
                yield check.Finding(source.path, getattr(node, "lineno", 0), name, text)


def _reached(node: ast.AST) -> tuple[str, str]:
    """The owner and the name of an attribute; both empty where it is none."""
    match node:
        case ast.Attribute(value=owner, attr=name):
            return ast.unparse(owner), name
        case ast.Call(
            func=ast.Name(id="getattr" | "setattr" | "hasattr"),
            args=[owner, ast.Constant(value=str(name)), *_],
        ):
            return ast.unparse(owner), name
        case _:
            return "", ""


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of functions and classes, and of attributes that a class gives itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()):
                if owner in _OWN:
                    yield name


_TIERS = (
    "coded",
    "disk",
    "object",
    "redis",
    "remote",
    "sharded",
    "values",
)
_DIRECTORIES = ("dns", "file", "kubernetes", "nats", "ray", "redis")
_SAID = '"""Send it.\n\n    Cancel safety:\n        Safe.\n    """'

CHECKS = (
    check.Check(
        name="no two classes are called the same",
        over=CODE,
        find=classes_of_one_name,
        bad=[("kvwire/a.py", "class A: ...\nclass B:\n    class A: ...")],
        good=[("kvwire/a.py", "class A: ...\nclass _A: ...\nclass B: ...")],
    ),
    check.Check(
        name="private names stay in their folder",
        over=CODE,
        find=private_reaches,
        bad=[
            ("kvwire/a.py", "def f(store):\n    return store._tiers"),
            ("kvwire/a.py", "class A:\n    def f(self):\n        self.x._y()"),
            ("kvwire/a.py", "state = getattr(connection, '_state', None)"),
        ],
        good=[
            ("kvwire/a.py", "class A:\n    def f(self):\n        return self._x"),
            ("kvwire/a.py", "class A:\n    def _g(self, other): other._g(1)"),
            ("kvwire/a.py", "rows = rows._replace(a=1)\nsuper()._clear()"),
            ("kvwire/a.py", "import threading\nthreading._register_atexit(f)"),
        ],
        excused={
            "packages/vllm/kvwire_vllm/identity.py::_get_attn_isa": "it is vLLM's, "
            "which has no other name for it",
            "packages/vllm/kvwire_vllm/scheduler.py::_all_token_ids": "it is vLLM's, "
            "which has no call that takes the last token off",
        },
    ),
    check.Check(
        name="public coroutines state their cancel safety",
        over=tuple(prefix for prefix in CODE if prefix != "backends/"),
        # Commands are run, not awaited, and only the kit itself awaits its checks. The
        # core's requests are records that nobody can await. What is behind a facade
        # keeps the promise that the facade states, a tier those of Tier, a kind of
        # directory those of Directory, and what is certified those of End.
        beyond=(
            "kvwire/cli/",
            "kvwire/endpoint/",
            "kvwire/proto/",
            "packages/certify/kvwire_certify/bench/",
            "packages/certify/kvwire_certify/targets/",
            "packages/certify/kvwire_certify/conformance/",
            "packages/certify/kvwire_certify/tiers.py",
            *(f"packages/store/kvwire_store/tiers/{name}.py" for name in _TIERS),
            *(f"kvwire/directory/{name}.py" for name in _DIRECTORIES),
        ),
        find=check.each(cancel_safety),
        bad=[
            ("kvwire/a.py", 'async def send():\n    """Send it."""'),
            ("kvwire/a.py", "class A:\n    async def send(self): ..."),
            ("kvwire/a.py", "def send() -> Request[int]: ..."),
        ],
        good=[
            ("kvwire/a.py", f"async def send():\n    {_SAID}"),
            ("kvwire/a.py", "async def _send(): ..."),
            ("kvwire/a.py", "def main():\n    async def run(): ..."),
            ("kvwire/a.py", "class _A:\n    async def send(self): ..."),
            ("kvwire/a.py", "class A:\n    @override\n    async def send(self): ..."),
            ("kvwire/a.py", "@overload\ndef send() -> Request[int]: ..."),
            ("kvwire/a.py", "def send() -> int: ..."),
        ],
    ),
)
