"""Functions that only pass a call on, callbacks as parameters, loops of attempts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.support.house.check import AnyFunction, dotted, functions
from tests.support.tree import Source

_SIMPLE = ast.Name | ast.Attribute | ast.Constant
_OF_TUPLES: Final = ("_replace", "_asdict", "_fields", "_make")


def forwarders(source: Source) -> Iterator[str]:
    """Functions that are one call of another with all their own parameters.

    What is passed beside those is a name, an attribute or a constant.
    """
    for name, function in functions(source.syntax):
        dunder = function.name.startswith("__")
        if not dunder and (call := _only_call(function)) and _passes_on(function, call):
            yield f"{source.path}:{function.lineno}: {name}: {ast.unparse(call)}"


def _only_call(function: AnyFunction) -> ast.Call | None:
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    match body:
        case [ast.Return(value=value) | ast.Expr(value=value)]:
            called = value.value if isinstance(value, ast.Await) else value
            return called if isinstance(called, ast.Call) else None
        case _:
            return None


def _passes_on(function: AnyFunction, call: ast.Call) -> bool:
    given = [a.value if isinstance(a, ast.Starred) else a for a in call.args]
    given += [keyword.value for keyword in call.keywords]
    if not all(isinstance(one, _SIMPLE) for one in given):
        return False
    own = [parameter.arg for parameter in _parameters(function)]
    if own and own[0] in {"self", "cls"}:
        own = own[1:]
    return set(own) <= {one.id for one in given if isinstance(one, ast.Name)}


def callbacks(source: Source) -> Iterator[str]:
    """Parameters that are annotated as something to call."""
    for name, function in functions(source.syntax):
        for parameter in _parameters(function):
            annotation = parameter.annotation
            if annotation and any(
                dotted(node).rpartition(".")[2] == "Callable"
                for node in ast.walk(annotation)
            ):
                yield f"{source.path}:{parameter.lineno}: {name}: {parameter.arg}"


def _parameters(function: AnyFunction) -> list[ast.arg]:
    listed = function.args
    rest = [one for one in (listed.vararg, listed.kwarg) if one is not None]
    return [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, *rest]


def backoffs(source: Source) -> Iterator[str]:
    """Loops that catch an error and wait by themselves before they try again.

    What comes back after a failure is for ``kvwire.aio.Upkeep``. Loops that look again
    at a fixed interval, and catch something on the way, count as well.
    """
    for loop in ast.walk(source.syntax):
        if not isinstance(loop, ast.While | ast.For | ast.AsyncFor):
            continue
        inside = list(ast.walk(loop))
        if any(isinstance(node, ast.ExceptHandler) for node in inside) and any(
            map(_waits, inside)
        ):
            yield f"{source.path}:{loop.lineno}"


def _waits(node: ast.AST) -> bool:
    """Whether this sleeps, and not only for a turn of the event loop."""
    match node:
        case ast.Call(func=function, args=[ast.Constant(value=0)]):
            return False
        case ast.Call(func=function, args=[_]):
            return dotted(function).rpartition(".")[2] == "sleep"
        case _:
            return False


def patches(source: Source) -> Iterator[str]:
    """What a test replaces in code that offers no parameter for it."""
    for node in ast.walk(source.syntax):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr"):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}"


def private_names(source: Source) -> Iterator[str]:
    """Members that a test takes from others, although their names begin with ``_``."""
    own = {ast.unparse(node) for node in ast.walk(source.syntax) if _is_own(node)}
    for node in ast.walk(source.syntax):
        if (
            isinstance(node, ast.Attribute)
            and node.attr[0] == "_" != node.attr[1:2]
            and node.attr not in _OF_TUPLES
            and not _is_own(node)
            and f"self.{node.attr}" not in own
        ):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}"


def _is_own(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )
