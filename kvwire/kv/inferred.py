"""Infers a cache's spec from its tensors.

A five-dimensional tensor has axes for blocks, keys and values, tokens, heads and
elements, so its shape and a layout give every number of a spec. Ambiguous shapes are
refused: a wrong guess would move the right bytes to the wrong place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict

from kvwire.errors import UsageError
from kvwire.kv.layout import (
    ALIASES,
    AxisOrder,
    Dims,
    Layout,
    check_layout,
    parse_layout,
)
from kvwire.kv.spec import DType, KVSpec, dtype_name
from kvwire.kv.tensors import TensorView, tensor_view

_KEYS_AND_VALUES: Final = 2
# The number of dimensions with an axis for keys and values, and without one.
_BOTH: Final = 5
_ONE: Final = 4
_LATENT: Final = 3


class SpecFields(TypedDict, total=False):
    """The fields of :class:`kvwire.KVSpec` that tensors do not determine."""

    dtype: DType
    shard: tuple[int, int]
    fingerprint: str
    model_kv_heads: int | None
    first_layer: int
    model_layers: int | None


def inferred(
    tensors: object, layout: Layout, block_tokens: int | None, fields: SpecFields
) -> tuple[KVSpec, object, Layout]:
    """Return the spec, the tensors for PagedCache, and their axis order.

    Raises:
        UsageError: The tensors' shape is not a cache's, or is ambiguous.
    """
    check_layout(layout)
    entries: Any
    if hasattr(tensors, "layers"):
        entries = _of_transformers(tensors, block_tokens)
        layout = _PAGED_ROW
    else:
        entries = list(tensors.values()) if isinstance(tensors, Mapping) else tensors
        if block_tokens is not None:
            raise UsageError(
                "PagedCache.of: block_tokens is only for a cache of the transformers "
                "library; other tensors have a dimension for it"
            )
    alone = not isinstance(entries, list | tuple)
    if not alone and not entries:
        raise UsageError("PagedCache.of: pass at least one tensor")
    first = entries if alone else entries[0]
    apart = isinstance(first, list | tuple)
    if apart and not first:
        raise UsageError("PagedCache.of: the first layer has no tensor")
    view = tensor_view(first[0] if apart else first, "PagedCache.of: the first tensor")
    dims = _dims(view, layout, alone=alone, apart=apart)
    extents = _extents(view, dims)
    fields = {**fields, "dtype": _dtype(view, fields)}
    components = len(first) if apart else extents.get("kv", 1)
    spec = KVSpec(
        layers=extents["layer"] if alone else len(entries),
        kv_heads=extents.get("head", 1),
        head_dim=extents.get("dim", 1),
        block_tokens=extents.get("token", 1),
        components=components,
        **fields,
    )
    order = " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)
    return spec, entries, AxisOrder(order)


def _dims(view: TensorView, layout: Layout, *, alone: bool, apart: bool) -> Dims:
    """Return the axes of each dimension of the first tensor."""
    shape = view.shape
    if layout not in ALIASES:
        dims = parse_layout(layout)
        if len(dims) != len(shape):
            raise UsageError(
                f"PagedCache.of: shape {shape} has {len(shape)} dimensions, and "
                f"layout {layout!r} has {len(dims)}"
            )
        if alone and "layer" not in {axis for dim in dims for axis in dim}:
            raise UsageError(
                f"PagedCache.of: got one tensor, but layout {layout!r} has no axis "
                "'layer'; pass a list with one tensor per layer"
            )
        return dims
    if alone:
        raise UsageError(
            "PagedCache.of: for one tensor of all layers, name its axes, such as "
            "layout='block layer kv token head dim'"
        )
    names = [name for name in ALIASES[layout].split() if name != "kv"]
    if apart and len(shape) == _ONE:
        return tuple((name,) for name in names)
    if not apart and len(shape) == _LATENT:
        return ("block",), ("token",), ("dim",)
    if not apart and len(shape) == _BOTH:
        at = [n for n in (0, 1) if shape[n] == _KEYS_AND_VALUES]
        if len(at) == 1:
            names.insert(at[0], "kv")
            return tuple((name,) for name in names)
    raise UsageError(
        f"PagedCache.of: shape {shape}{' of a pair' if apart else ''} is ambiguous or "
        "fits no known layout; name its axes, such as layout='kv block token head "
        "dim'"
    )


def _extents(view: TensorView, dims: Dims) -> dict[str, int]:
    """Return each axis's extent; all but one folded axis must be known."""
    extents: dict[str, int] = {}
    for axes, size in zip(dims, view.shape, strict=True):
        others = [axis for axis in axes if axis != "kv"]
        both = _KEYS_AND_VALUES if len(others) < len(axes) else 1
        if not others:
            extents["kv"] = size
            continue
        if len(others) > 1 or size % both:
            raise UsageError(
                f"PagedCache.of: a dimension of {size} does not determine "
                f"{' and '.join(axes)}; pass a KVSpec to PagedCache instead"
            )
        if both > 1:
            extents["kv"] = both
        extents[others[0]] = size // both
    return extents


def _dtype(view: TensorView, fields: SpecFields) -> DType:
    if "dtype" in fields:
        return fields["dtype"]
    try:
        return dtype_name(view.dtype)
    except UsageError:
        raise UsageError(
            f"PagedCache.of: the elements have type {view.dtype}; pass the type that "
            "they represent, such as dtype='bfloat16'"
        ) from None


# One row of the batch, whose tokens are cut into blocks.
_PAGED_ROW: Final = AxisOrder("head block token dim")


def _of_transformers(cache: Any, block_tokens: int | None) -> list[tuple[Any, Any]]:
    """Return a transformers cache's keys and values per layer, in blocks.

    They are views: shape (heads, blocks, block tokens, head dim).
    """
    if block_tokens is None:
        raise UsageError(
            "PagedCache.of: a cache of the transformers library has no blocks; pass "
            "block_tokens="
        )
    entries = []
    for index, layer in enumerate(cache.layers):
        pair = []
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is None or len(tensor.shape) != _ONE:
                raise UsageError(
                    f"PagedCache.of: layer {index} has no {name} of four dimensions; "
                    f"they are allocated by the first forward pass, or by "
                    f"early_initialization()"
                )
            rows, _, tokens, _ = tensor.shape
            if rows != 1 or tokens % block_tokens:
                raise UsageError(
                    f"PagedCache.of: {name} of layer {index} hold {rows} sequences of "
                    f"{tokens} tokens; pass one sequence whose length is a multiple "
                    f"of {block_tokens}, as in StaticCache"
                )
            pair.append(tensor.detach()[0].unflatten(1, (-1, block_tokens)))
        entries.append((pair[0], pair[1]))
    return entries
