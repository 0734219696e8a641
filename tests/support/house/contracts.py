"""What names and docstrings owe their reader."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.support.house import check
from tests.support.tree import Source


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


_TIERS = (
    *("coded", "disk", "mooncake", "object"),
    *("redis", "remote", "sharded", "values"),
)
_DIRECTORIES = ("dns", "file", "kubernetes", "nats", "ray", "redis")
_SAID = '"""Send it.\n\n    Cancel safety:\n        Safe.\n    """'

CHECKS = (
    check.Check(
        name="no two classes are called the same",
        over=("kvwire/", "backends/"),
        find=classes_of_one_name,
        bad=[("kvwire/a.py", "class A: ...\nclass B:\n    class A: ...")],
        good=[("kvwire/a.py", "class A: ...\nclass _A: ...\nclass B: ...")],
    ),
    check.Check(
        name="public coroutines state their cancel safety",
        over=("kvwire/",),
        # Commands are run, not awaited, and only the kit itself awaits its checks. The
        # core's requests are records that nobody can await. What is behind a facade
        # keeps the promise that the facade states, a tier those of Tier, and a kind of
        # directory those of Directory.
        beyond=(
            "kvwire/cli/",
            "kvwire/endpoint/",
            "kvwire/proto/",
            "kvwire/testing/conformance/",
            *(f"kvwire/store/tiers/{name}.py" for name in _TIERS),
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
