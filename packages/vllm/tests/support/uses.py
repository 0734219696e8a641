"""The names that kvwire reads of vLLM's objects, from the syntax of its modules.

vLLM is not typed, so what comes from it is annotated as ``Any`` (or ``object``). The
names are those of attributes of such arguments and fields, and of what is assigned
from them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_SHOWS = {"getattr", "hasattr"}
# What these return is a part of what they are given.
_PASSES = {"enumerate", "getattr", "iter", "list", "next", "sorted", "type", "zip"}
_BUILTIN = {name for one in (str, list, dict, type) for name in dir(one)}


def used(source: str) -> set[str]:
    """Return the names that a module reads of objects that are not typed."""
    tree = ast.parse(source)
    fields = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if _untyped(node.annotation)
    }
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    names = {name for one in functions for name in _Function(one, fields).names()}
    return names - _BUILTIN


class _Function:
    def __init__(self, node: ast.FunctionDef, fields: set[str]) -> None:
        self._node, self._fields = node, fields
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self._untyped = {one.arg for one in given if _untyped(one.annotation)}
        before = -1
        while before < len(self._untyped):
            before = len(self._untyped)
            self._untyped |= set(self._assigned())

    def names(self) -> Iterator[str]:
        for node in ast.walk(self._node):
            match node:
                case ast.Attribute(value, attr) if self._of_vllm(value):
                    yield attr
                case ast.Call(ast.Name(called), [first, ast.Constant(str(name)), *_]):
                    if called in _SHOWS and self._of_vllm(first):
                        yield name

    def _assigned(self) -> Iterator[str]:
        for node in ast.walk(self._node):
            match node:
                case ast.Assign(targets, value) if self._of_vllm(value):
                    yield from _variables(targets)
                case ast.NamedExpr(target, value) if self._of_vllm(value):
                    yield target.id
                case ast.For(target=target, iter=value) if self._of_vllm(value):
                    yield from _variables([target])
                case ast.comprehension(target, value) if self._of_vllm(value):
                    yield from _variables([target])

    def _of_vllm(self, node: ast.expr) -> bool:
        """Return whether an expression is an untyped object, or a part of one."""
        match node:
            case ast.Name(name):
                return name in self._untyped
            case ast.Attribute(value, attr):
                return attr in self._fields or self._of_vllm(value)
            case ast.Subscript(value):
                return self._of_vllm(value)
            case ast.Call(ast.Name(called), arguments) if called in _PASSES:
                return any(map(self._of_vllm, arguments))
            case ast.Call(called):
                return self._of_vllm(called)
            case ast.BoolOp(_, values) | ast.List(values):
                return any(map(self._of_vllm, values))
            case ast.IfExp(_, then, other):
                return self._of_vllm(then) or self._of_vllm(other)
        return False


def _untyped(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id in ("Any", "object")


def _variables(targets: Iterable[ast.expr]) -> Iterator[str]:
    """Return the variables among targets, not the attributes and items."""
    for target in targets:
        match target:
            case ast.Name(name):
                yield name
            case ast.Tuple(parts):
                yield from _variables(parts)
