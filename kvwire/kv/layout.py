"""Layouts: the cache axis of each tensor dimension, and the stride of each axis.

A layout is written as an axis order in the style of einops: ``"block kv token head
dim"``. Parentheses fold several axes into one dimension: in ``"block head token (kv
dim)"`` the key and the value of a token are side by side. An axis with one element may
be left out, so MLA is ``"block token dim"``. The text gives only the *names*; the
strides come from the tensor, so a transposed or padded view needs no special layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NewType, TypeAlias

from kvwire.errors import UsageError, nearest, wrong_type
from kvwire.kv.spec import KVSpec

AXES: Final = ("layer", "block", "kv", "token", "head", "dim")
"""Every axis of a cache, in the order of a plain layout."""

ALIASES: Final = {
    "NHD": "block kv token head dim",
    "HND": "block kv head token dim",
}
"""Common short names. In a cross-layer tensor the ``layer`` axis follows ``block``."""

AxisOrder = NewType("AxisOrder", str)
"""An axis order, marked as such for type checkers.

At run time a plain string works too, but a checker could not tell it from a misspelt
``"NHD"``.
"""
Layout: TypeAlias = Literal["NHD", "HND"] | AxisOrder

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension of a tensor, outermost first."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The extent of an axis in a tensor, and its stride in bytes (0 if extent is 1)."""

    extent: int
    stride: int


def parse_layout(text: str) -> Dims:
    """Parse an axis order such as ``"block head token (kv dim)"``.

    Raises:
        UsageError: An axis is unknown or listed twice, or ``block`` is missing.
    """
    dims: list[tuple[str, ...]] = []
    for folded, plain in _TOKEN.findall(text):
        dims.append(tuple(folded.split()) if folded else (plain,))
    named = [axis for dim in dims for axis in dim]
    for axis in named:
        if axis not in AXES:
            raise UsageError(
                f"layout {text!r}: unknown axis or short form {axis!r}; "
                f"{nearest(axis, (*AXES, *ALIASES))}"
            )
        if named.count(axis) > 1:
            raise UsageError(f"layout {text!r}: axis {axis!r} appears twice")
    if "block" not in named:
        raise UsageError(f"layout {text!r}: axis 'block' is missing")
    return tuple(dims)


def check_layout(layout: object) -> None:
    """Refuse a layout that is no text.

    Raises:
        UsageError: It is another value.
    """
    if not isinstance(layout, str):
        raise wrong_type("layout", layout, 'a text, such as "NHD"')


def choose_dims(
    layout: str,
    spec: KVSpec,
    shape: tuple[int, ...],
    *,
    layered: bool,
    apart: bool,
    where: str,
) -> Dims:
    """Return the axes of each dimension of a tensor with this layout and shape.

    An axis order is used as written. ``"NHD"`` and ``"HND"`` adapt: a cross-layer
    tensor has ``layer`` after ``block``, separate tensors for keys and values have no
    ``kv``, and axes with one element are dropped if the tensor has fewer dimensions.

    Raises:
        UsageError: The layout does not fit the shape or the spec.
    """
    if layout not in ALIASES:
        dims = parse_layout(layout)
        _check_axes(dims, layout, spec, layered=layered, apart=apart, where=where)
        return dims
    names = ALIASES[layout].split()
    if layered:
        names.insert(1, "layer")
    if apart:
        names.remove("kv")
    extents = extents_of(spec)
    single = [a for a in ("kv", "layer", "head") if a in names and extents[a] == 1]
    candidates = [names]
    for axis in single:
        candidates += [[n for n in names if n != axis] for names in list(candidates)]
    for candidate in candidates:
        if len(candidate) == len(shape) and all(
            axis == "block" or extents[axis] == size
            for axis, size in zip(candidate, shape, strict=True)
        ):
            return tuple((axis,) for axis in candidate)
    wanted = ", ".join(_with_extent(axis, extents) for axis in names)
    raise UsageError(
        f"{where}: shape {shape} does not fit layout {layout}, which is ({wanted}) "
        "for this spec; for another order name the axes, such as layout='kv block "
        "token head dim'"
    )


def read_axes(
    dims: Dims,
    spec: KVSpec,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    where: str,
) -> dict[str, Axis]:
    """Return each axis of a tensor with its extent and its stride in bytes.

    Raises:
        UsageError: Shape or strides do not fit the layout and the spec.
    """
    if len(dims) != len(shape):
        text = " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)
        raise UsageError(
            f"{where}: {len(shape)} dimensions {shape}, but the layout {text!r} has "
            f"{len(dims)}"
        )
    extents = extents_of(spec)
    axes = {axis: Axis(1, 0) for axis in AXES}
    for folded, size, innermost in zip(dims, shape, strides, strict=True):
        known = {axis: extents[axis] for axis in folded if axis != "block"}
        rest = math.prod(known.values())
        if "block" in folded:
            known["block"] = size // rest
        if size == 0 or math.prod(known.values()) != size:
            wanted = " x ".join(_with_extent(axis, extents) for axis in folded)
            raise UsageError(
                f"{where}: a dimension of {size} in shape {shape} should be {wanted}"
            )
        stride = innermost
        for axis in reversed(folded):
            axes[axis] = Axis(known[axis], stride if known[axis] > 1 else 0)
            stride *= known[axis]
    _check_strides(axes, spec.item_bytes, where)
    return axes


def extents_of(spec: KVSpec) -> dict[str, int]:
    """Return the extent of each axis; 0 for ``block``, which the spec lacks."""
    return {
        "layer": spec.layers,
        "block": 0,
        "kv": spec.components,
        "token": spec.block_tokens,
        "head": spec.kv_heads,
        "dim": spec.head_dim,
    }


def overlapping(axes: Mapping[str, Axis], item_bytes: int) -> tuple[str, int]:
    """Return the innermost axis whose stride makes elements overlap, or ``""``.

    The second value is the smallest stride in bytes that does not overlap.
    """
    span = item_bytes
    for stride, name in sorted((a.stride, n) for n, a in axes.items() if a.extent > 1):
        if stride < span:
            return name, span
        span += stride * (axes[name].extent - 1)
    return "", span


_TOKEN: Final = re.compile(r"\(([^()]*)\)|([^\s()]+)")


def _with_extent(axis: str, extents: Mapping[str, int]) -> str:
    return "blocks" if axis == "block" else f"{axis} {extents[axis]}"


def _check_axes(
    dims: Dims, layout: str, spec: KVSpec, *, layered: bool, apart: bool, where: str
) -> None:
    """Refuse a layout whose axes do not match the tensor's."""
    named = {axis for dim in dims for axis in dim}
    extents = extents_of(spec)
    elsewhere = {a for a, gone in (("layer", not layered), ("kv", apart)) if gone}
    for axis in AXES:
        if axis in named and axis in elsewhere and extents[axis] > 1:
            reason = "layer" if axis == "layer" else "key and value"
            raise UsageError(
                f"{where}: layout {layout!r} has axis {axis!r}, but you passed one "
                f"tensor for each {reason}"
            )
        if axis not in named | elsewhere and axis != "block" and extents[axis] > 1:
            raise UsageError(
                f"{where}: layout {layout!r} lacks axis {axis!r}; the spec gives it "
                f"size {extents[axis]}"
            )


def _check_strides(axes: Mapping[str, Axis], item_bytes: int, where: str) -> None:
    """Refuse elements that overlap, run backwards, or are not contiguous."""
    wide = {name: axis for name, axis in axes.items() if axis.extent > 1}
    for name, axis in wide.items():
        if axis.stride <= 0:
            raise UsageError(
                f"{where}: axis {name!r} has stride {axis.stride}; pass a tensor that "
                "is neither flipped nor expanded"
            )
    name, span = overlapping(wide, item_bytes)
    if name:
        raise UsageError(
            f"{where}: axis {name!r} has a stride of {wide[name].stride} bytes, less "
            f"than the {span} bytes of one step, so elements overlap"
        )
    inner = min(wide, key=lambda name: wide[name].stride, default="")
    if inner and wide[inner].stride != item_bytes:
        raise UsageError(
            f"{where}: the innermost axis {inner!r} has a stride of "
            f"{wide[inner].stride} bytes; its elements of {item_bytes} bytes must be "
            "contiguous"
        )
