"""Values for the fields of control bodies, made from the types of the fields.

:func:`values` are all that a type allows, :func:`plain` and :func:`longest` are two of
them, and :func:`beyond` are values one step off each of its bounds, or of another type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

# What no field of a body takes.
_NEVER: tuple[Any, ...] = (None, {"a": 1}, msgspec.Raw(b"\xc1"))


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value that a type allows; a type without bounds is an error."""
    match kind:
        case inspect.IntType(ge=int(low), le=int(high)):
            return st.integers(low, high)
        case inspect.BoolType():
            return st.booleans()
        case inspect.BytesType(min_length=low, max_length=int(high)):
            return st.binary(min_size=low or 0, max_size=min(high, 300))
        case inspect.StrType(max_length=int(high)):
            return st.text(max_size=min(high, 60))
        case inspect.VarTupleType(item_type=item, min_length=low, max_length=int(high)):
            size = min(high, 5)
            return st.lists(values(item), min_size=low or 0, max_size=size).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.NoneType():
            return st.none()
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, *(values(field.type) for field in fields))
    raise AssertionError(f"{kind} has no bound")


def plain(kind: inspect.Type) -> Any:
    """One value of a type as msgpack has it, with one item in every array."""
    match kind:
        case inspect.IntType(ge=low):
            return low
        case inspect.BoolType():
            return True
        case inspect.BytesType(min_length=low):
            return b"x" * (low or 1)
        case inspect.StrType():
            return "x"
        case inspect.VarTupleType(item_type=item):
            return [plain(item)]
        case inspect.TupleType(item_types=items):
            return [plain(item) for item in items]
        case inspect.UnionType():
            return plain(_unless_none(kind))
        case inspect.StructType(fields=fields):
            return [plain(field.type) for field in fields]
    raise AssertionError(f"no value of {kind}")


def longest(kind: inspect.Type) -> Any:
    """The value of a type that takes the most bytes."""
    match kind:
        case inspect.IntType(le=high):
            return high
        case inspect.BoolType():
            return True
        case inspect.BytesType(max_length=int(high)):
            return bytes(high)
        case inspect.StrType(max_length=int(high)):
            return "\U0001f980" * high
        case inspect.VarTupleType(item_type=item, max_length=int(high)):
            return [longest(item)] * high
        case inspect.TupleType(item_types=items):
            return [longest(item) for item in items]
        case inspect.UnionType():
            return longest(_unless_none(kind))
        case inspect.StructType(fields=fields):
            return [longest(field.type) for field in fields]
    raise AssertionError(f"{kind} has no bound")


def beyond(kind: inspect.Type) -> Iterator[Any]:
    """Values that a type does not allow, as msgpack has them."""
    if isinstance(kind, inspect.UnionType):
        yield from (v for v in beyond(_unless_none(kind)) if v is not None)
        return
    yield from _NEVER
    match kind:
        case inspect.IntType(ge=int(low), le=int(high)):
            yield from (low - 1, high + 1, -(2**63), 2**64 - 1, 1.5, "1", b"1", [1])
        case inspect.BoolType():
            yield from (0, 1, "true")
        case inspect.BytesType(min_length=low, max_length=int(high)):
            yield from (b"x" * (high + 1), 7, [1])
            yield from [b"x" * (low - 1)] if low else []
        case inspect.StrType(max_length=int(high)):
            yield from ("x" * (high + 1), 7, msgspec.Raw(b"\xa2\xff\xfe"))
        case inspect.VarTupleType():
            yield from _beyond_array(kind)
        case inspect.TupleType(item_types=items):
            yield from (plain(kind)[:-1], [*plain(kind), 0], 7)
            yield from _with_one_wrong(items)
        case inspect.StructType(fields=fields):
            required = sum(field.required for field in fields)
            yield from (plain(kind)[: required - 1], 7)
            yield from _with_one_wrong(tuple(field.type for field in fields))


def _unless_none(kind: inspect.UnionType) -> inspect.Type:
    """What a field is that may be left open."""
    (some,) = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    return some


def _beyond_array(kind: inspect.VarTupleType) -> Iterator[Any]:
    assert kind.max_length is not None
    yield [plain(kind.item_type)] * (kind.max_length + 1)
    yield 7
    if kind.min_length:
        yield []
    yield from ([wrong] for wrong in beyond(kind.item_type))


def _with_one_wrong(kinds: tuple[inspect.Type, ...]) -> Iterator[Any]:
    good = [plain(kind) for kind in kinds]
    for place, kind in enumerate(kinds):
        for wrong in beyond(kind):
            yield [*good[:place], wrong, *good[place + 1 :]]
