"""What a public coroutine owes its caller in writing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.house.check import Check, Finding, dotted, each, functions
from tests.support.tree import Source


def cancel_safety(source: Source) -> Iterator[Finding]:
    """Every public coroutine says what happens when the await is cancelled.

    An ``@override`` inherits the promise of what it overrides.
    """
    for name, node in functions(source.syntax):
        if not isinstance(node, ast.AsyncFunctionDef) or not _is_public(name):
            continue
        if any(dotted(d).endswith("override") for d in node.decorator_list):
            continue
        if "Cancel safety:" not in (ast.get_docstring(node) or ""):
            yield Finding(source.path, node.lineno, name, 'no "Cancel safety:" section')


def _is_public(name: str) -> bool:
    return not any(part.startswith(("_", "<")) for part in name.split("."))


_SAID = '"""Send it.\n\n    Cancel safety:\n        Safe.\n    """'

CHECKS = (
    Check(
        name="public coroutines state their cancel safety",
        over=("kvwire/",),
        # Commands are run, not awaited.
        beyond=("kvwire/cli/",),
        find=each(cancel_safety),
        bad=[
            ("kvwire/a.py", 'async def send():\n    """Send it."""'),
            ("kvwire/a.py", "class A:\n    async def send(self): ..."),
        ],
        good=[
            ("kvwire/a.py", f"async def send():\n    {_SAID}"),
            ("kvwire/a.py", "async def _send(): ..."),
            ("kvwire/a.py", "def main():\n    async def run(): ..."),
            ("kvwire/a.py", "class _A:\n    async def send(self): ..."),
            ("kvwire/a.py", "class A:\n    @override\n    async def send(self): ..."),
        ],
    ),
)
