"""A paged KV cache: the mapping from its elements to bytes of tensors.

For any shape of the tensors, a cache group is described by a table of base addresses
(one per layer and component) and four strides (block, token, head, dim). The *memory
order* is the list of axes sorted by stride, outermost first. If two caches have the
same memory order, the same elements are neighbours in memory, however the tensors are
cut and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from kvwire import limits
from kvwire.errors import UsageError, check_name, wrong_type
from kvwire.kv.blocks import DEFAULT_GROUP, BlockLists, Blocks, block_lists
from kvwire.kv.inferred import SpecFields, inferred
from kvwire.kv.layout import (
    AXES,
    Axis,
    Layout,
    check_layout,
    choose_dims,
    overlapping,
    read_axes,
)
from kvwire.kv.spec import KVSpec
from kvwire.kv.tensors import TensorView, tensor_view
from kvwire.types import Device, MemoryKind, Uncopied

T = TypeVar("T")
GroupSource: TypeAlias = "tuple[KVSpec, object] | tuple[KVSpec, object, str]"
"""The description of one group: spec, tensors and, if it is not the default, layout."""


class PagedCache(Uncopied):
    """One process's KV cache, in blocks, over memory that the caller owns.

    Args:
        spec: The cache's layers, heads, tokens and element type.
        tensors: One tensor per layer, or one cross-layer tensor; in either case a
            tensor may be replaced by a (keys, values) pair. They can be NumPy, torch or
            CuPy objects, or anything else that :func:`kvwire.kv.tensors.tensor_view`
            accepts, all on one device. They are kept alive, and never copied or
            resized.
        layout: The axis order of each tensor; see :mod:`kvwire.kv.layout`.

    Attributes:
        groups: The cache's groups by name; a plain cache has one, ``"kv"``.
        device: The device that holds the cache; None for host memory.
        writable: Whether every tensor is writable, so that the cache can receive.

    Raises:
        UsageError: A tensor does not fit spec or layout; the message names both.
    """

    groups: Mapping[str, CacheGroup]
    device: Device | None
    writable: bool

    def __init__(self, spec: KVSpec, tensors: object, layout: Layout = "NHD") -> None:
        self._hold({DEFAULT_GROUP: CacheGroup(DEFAULT_GROUP, spec, tensors, layout)})

    @classmethod
    def of(
        cls,
        tensors: object,
        layout: Layout = "NHD",
        *,
        block_tokens: int | None = None,
        **fields: Unpack[SpecFields],
    ) -> PagedCache:
        """Describe a cache whose spec follows from the shape of its tensors.

        Args:
            tensors: A list, or a mapping as in vLLM, with one item per layer in order:
                a tensor, or a pair of keys and values. Shapes are (blocks, 2, tokens,
                heads, dim) or (2, blocks, tokens, heads, dim), without the 2 for a
                pair, and (blocks, tokens, dim) for MLA. Alternatively a transformers
                ``StaticCache`` for one sequence, whose tokens are divided into blocks.
            layout: "HND" if heads precede tokens; or an axis order, for other shapes.
            block_tokens: For a transformers cache: the tokens per block.
            fields: Fields of :class:`~kvwire.KVSpec` that tensors do not determine:
                ``fingerprint``, ``shard``, ``first_layer``, ...; and ``dtype`` if the
                elements are stored as raw integers.

        Raises:
            UsageError: A shape is ambiguous or unknown, so the axes have to be named;
                or as for the class.
        """
        spec, entries, order = inferred(tensors, layout, block_tokens, fields)
        return cls(spec, entries, order)

    @classmethod
    def grouped(
        cls, groups: Mapping[str, GroupSource], *, layout: Layout = "NHD"
    ) -> PagedCache:
        """Describe a hybrid model's cache: each group has its own spec and tensors.

        Args:
            groups: {name: (spec, tensors)} or {name: (spec, tensors, layout)}. Both
                sides of a transfer must use the same names.
            layout: The layout of groups that do not name one.

        Raises:
            UsageError: An error of the class, for a group that the text names; or there
                is no group, or a name is not allowed.
        """
        if not isinstance(groups, Mapping):
            raise wrong_type("PagedCache.grouped", groups, "{name: (spec, tensors)}")
        for name, source in groups.items():
            if not isinstance(source, tuple):
                raise wrong_type(f"group {name!r}", source, "(spec, tensors)")
        if not 1 <= len(groups) <= limits.KV_GROUPS_MAX:
            raise UsageError(
                f"PagedCache: {len(groups)} groups; 1 to {limits.KV_GROUPS_MAX} are "
                "allowed"
            )
        made = {
            name: CacheGroup(
                name, source[0], source[1], source[2] if len(source) == 3 else layout
            )
            for name, source in groups.items()
        }
        cache = cls.__new__(cls)
        cache._hold(made)  # noqa: SLF001 - of its own class
        return cache

    @property
    def kind(self) -> MemoryKind:
        """Return the kind of memory that holds the cache."""
        return MemoryKind.HOST if self.device is None else self.device.kind

    @property
    def spec(self) -> KVSpec:
        """Return the spec of a cache with one group."""
        return self._only().spec

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of a cache with one group."""
        return self._only().num_blocks

    def block_lists(self, blocks: Blocks, *, least: int = 1) -> BlockLists:
        """Check block ids against this cache; see :func:`kvwire.kv.blocks.block_lists`.

        Raises:
            UsageError: A block id is out of range; the error names the group, the id
                and the range. Or there are fewer than ``least`` blocks.
        """
        if isinstance(blocks, BlockLists) and blocks.pools is self._pools:
            blocks.check_total(least)
            return blocks
        return block_lists(blocks, self._pools, least=least)

    def __repr__(self) -> str:
        return f"PagedCache({'; '.join(map(repr, self.groups.values()))})"

    def _hold(self, groups: Mapping[str, CacheGroup]) -> None:
        self.groups = groups
        self.device = next(iter(groups.values())).device
        for group in groups.values():
            _check_device(group.device, self.device, f"group {group.name!r}", "group")
        self._pools = {name: group.num_blocks for name, group in groups.items()}
        self.writable = all(group.writable for group in groups.values())
        self._known: dict[object, Any] = {}

    def _only(self) -> CacheGroup:
        if len(self.groups) != 1:
            raise UsageError(
                f"PagedCache: this cache has the groups {', '.join(self.groups)}; use "
                "cache.groups[name]"
            )
        return next(iter(self.groups.values()))


def computed_once(cache: PagedCache, key: object, compute: Callable[[], T]) -> T:
    """Return a value derived from a cache; it is computed once for each key."""
    known = cache._known  # noqa: SLF001 - of this file's class
    found: T | None = known.get(key)
    if found is None:
        found = compute()
        while len(known) >= limits.KV_TEMPLATES_MAX:
            # Another thread, with its own loop, may add or drop one at this moment.
            with suppress(KeyError, RuntimeError):
                del known[next(iter(known))]
        known[key] = found  # bounded: KV_TEMPLATES_MAX
    return found


class CacheGroup:
    """One group of layers that share a block table.

    ``bases``, shape (layers, components), contains the address of block 0, token 0,
    head 0 for each layer and component. ``strides`` are the bytes between steps along
    the other axes, 0 for an axis with one element. ``order`` lists all axes, outermost
    first.
    """

    def __init__(self, name: str, spec: KVSpec, tensors: object, layout: str) -> None:
        check_name("PagedCache: group name", name)
        if not isinstance(spec, KVSpec):
            raise wrong_type("PagedCache", spec, "a kvwire.KVSpec")
        entries = _entries(tensors, spec, name)
        self.name: str = name
        self.spec: KVSpec = spec
        check_layout(layout)
        bases, axes, views = _place(entries, spec, layout, name)
        self.bases: Addresses = bases
        self.num_blocks: int = axes["block"].extent
        self.strides: dict[str, int] = {axis: axes[axis].stride for axis in _INNER}
        self.device: Device | None = views[0].device
        self.writable: bool = all(view.writable for view in views)
        self.owners: tuple[object, ...] = tuple(view.owner for view in views)
        nested = _nested_axes(bases, axes, spec.item_bytes, f"group {name!r}")
        self.order: tuple[str, ...] = _memory_order(nested)

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"{self.name!r}: {spec.layers} layers x {self.num_blocks} blocks of "
            f"{spec.block_tokens} tokens, {spec.dtype}, {' '.join(self.order)}"
        )


Addresses: TypeAlias = npt.NDArray[np.int64]

# The axes of the table of bases, in order; and the axes that have one stride each.
_TABLE: Final = ("layer", "kv")
_INNER: Final = ("block", "token", "head", "dim")


def _entries(tensors: object, spec: KVSpec, group: str) -> list[tuple[object, ...]]:
    """Return one tuple per layer, or one for all: (both,) or (keys, values)."""
    if not isinstance(tensors, list | tuple):
        return [(tensors,)]
    if len(tensors) not in (1, spec.layers):
        raise UsageError(
            f"group {group!r}: {len(tensors)} tensors for layers={spec.layers}; pass "
            "one for each layer, or one tensor with a 'layer' axis"
        )
    entries = [tuple(e) if isinstance(e, list | tuple) else (e,) for e in tensors]
    for index, entry in enumerate(entries):
        if len(entry) != len(entries[0]) or len(entry) not in (1, spec.components):
            raise UsageError(
                f"group {group!r}: tensors[{index}] is {len(entry)} tensors; pass one "
                f"for each layer, or {spec.components} (components) for each"
            )
    return entries


def _place(
    entries: Sequence[tuple[object, ...]], spec: KVSpec, layout: str, group: str
) -> tuple[Addresses, dict[str, Axis], list[TensorView]]:
    """Read all tensors; return the table of bases, the shared axes, and the views."""
    layered = len(entries) == 1
    apart = len(entries[0]) > 1
    bases = np.zeros((spec.layers, spec.components), np.int64)
    views: list[TensorView] = []
    shared: dict[str, Axis] = {}
    for index, entry in enumerate(entries):
        for part, tensor in enumerate(entry):
            where = f"group {group!r}: {_tensor_name(index, part, layered, apart)}"
            view = tensor_view(tensor, where)
            view.require_dtype(spec.dtype, where)
            dims = choose_dims(
                layout, spec, view.shape, layered=layered, apart=apart, where=where
            )
            axes = read_axes(dims, spec, view.shape, view.strides, where=where)
            if not views:
                shared = axes
            _check_alike(shared, axes, where)
            if views:
                _check_device(view.device, views[0].device, where, "tensor")
            rows = slice(None) if layered else slice(index, index + 1)
            columns = slice(part, part + 1) if apart else slice(None)
            bases[rows, columns] = view.address + _steps(axes, bases[rows, columns])
            views.append(view)
    return bases, shared, views


def _steps(axes: Mapping[str, Axis], table: Addresses) -> Addresses:
    """Return the distance of each entry of a table from its first, in bytes."""
    layers, components = table.shape
    by_layer = np.arange(layers, dtype=np.int64) * axes["layer"].stride
    by_component = np.arange(components, dtype=np.int64) * axes["kv"].stride
    return by_layer[:, None] + by_component


def _check_alike(
    first: Mapping[str, Axis], axes: Mapping[str, Axis], where: str
) -> None:
    for axis in _INNER:
        if axes[axis].extent != first[axis].extent:
            raise UsageError(
                f"{where}: it has {axes[axis].extent} {axis}s, and the first tensor "
                f"has {first[axis].extent}"
            )
        if axes[axis].stride != first[axis].stride:
            raise UsageError(
                f"{where}: axis {axis!r} has a stride of {axes[axis].stride} bytes, "
                f"and the first tensor's is {first[axis].stride}; make one cache "
                "group per kind of tensor"
            )


def _check_device(
    device: Device | None, first: Device | None, where: str, what: str
) -> None:
    if device != first:
        raise UsageError(
            f"{where}: it is in memory of {device or 'the host'}, the first {what} is "
            f"in memory of {first or 'the host'}; put all tensors of a cache on one "
            "device"
        )


def _nested_axes(
    bases: Addresses, axes: Mapping[str, Axis], item_bytes: int, where: str
) -> dict[str, Axis]:
    """Return the axes that nest; ``layer`` and ``kv`` are among them if they do."""
    inner = {axis: axes[axis] for axis in _INNER}
    table = {axis: _table_axis(bases, dim) for dim, axis in enumerate(_TABLE)}
    nested = inner | {axis: found for axis, found in table.items() if found}
    # Separate tensors may happen to be equally far apart while they are interleaved, or
    # have others between them. In that case layers and components count as scattered.
    if overlapping(nested, item_bytes)[0]:
        nested = inner
    sharing = _sharing(bases, nested, item_bytes)
    if sharing and not _sharing(bases, inner, item_bytes):
        return inner
    if sharing:
        raise UsageError(f"{where}: {sharing} share memory")
    return nested


def _table_axis(bases: Addresses, dim: int) -> Axis | None:
    """Return a dimension of the table as an axis, or None if its steps differ."""
    extent = bases.shape[dim]
    if extent == 1:
        return Axis(1, 0)
    steps = np.diff(bases, axis=dim)
    stride = int(steps.flat[0])
    # A negative stride counts as scattered, because following it gains nothing.
    return Axis(extent, stride) if stride > 0 and (steps == stride).all() else None


def _sharing(bases: Addresses, nested: Mapping[str, Axis], item_bytes: int) -> str:
    """Return the names of two table entries that share memory, or ""."""
    span = item_bytes + sum((a.extent - 1) * a.stride for a in nested.values())
    rows = slice(0, 1) if "layer" in nested else slice(None)
    columns = slice(0, 1) if "kv" in nested else slice(None)
    table = bases[rows, columns]
    order = np.argsort(table, axis=None, kind="stable")
    near = np.flatnonzero(np.diff(table.flat[order]) < span)
    if not near.size:
        return ""
    pair = (np.unravel_index(order[near[0] + i], table.shape) for i in (0, 1))
    return " and ".join(f"layer {int(at[0])} component {int(at[1])}" for at in pair)


def _memory_order(nested: Mapping[str, Axis]) -> tuple[str, ...]:
    """Return the axes by descending stride; scattered ones come first."""
    wide = [axis for axis, found in nested.items() if found.extent > 1]
    order = [axis for axis in _TABLE if axis not in nested]
    order += sorted(wide, key=lambda axis: -nested[axis].stride)
    # An axis with one element has no stride; it is placed where a plain layout has it.
    for index, axis in enumerate(AXES):
        if axis not in order:
            order.insert(order.index(AXES[index - 1]) + 1 if index else 0, axis)
    return tuple(order)


def _tensor_name(index: int, part: int, layered: bool, apart: bool) -> str:
    if apart:
        return f"tensors[{index}][{part}]"
    return "the cross-layer tensor" if layered else f"tensors[{index}]"
