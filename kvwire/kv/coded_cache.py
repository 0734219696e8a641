"""A cache of encoded rows, which a transfer with ``codec=`` moves instead of the cache.

The listed blocks of a transfer have a *shadow*: a cache in host memory with the same
layers, heads and tokens, which contains the encoded rows as ``uint8``. Block i of the
shadow corresponds to position i of the list. The transfer moves the shadow like any
other cache, so partial transfers, different block sizes and shards, resuming and exact
outcomes work for encoded rows without a change to the protocol. The producer encodes a
part before it marks the part as ready; the consumer decodes a part before it reports
the part as landed.

The shadow's fingerprint names the codec and the element type. Peers compare
fingerprints, which ensures that both ends use the same codec.

Groups whose tokens are not in floating point (recurrent states, an fp8 cache) have a
shadow too, with their bytes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits, BlockLists
from kvwire.kv.canonical import Canonical
from kvwire.kv.floats import FLOATS, Bytes, as_floats, put_floats
from kvwire.kv.fragments import Fragments
from kvwire.kv.layout import AXES, AxisOrder, extents_of
from kvwire.kv.mapping import GroupMap, Steps
from kvwire.kv.paged import GroupSource, PagedCache
from kvwire.kv.row_codec import RowCodec
from kvwire.kv.spec import KVSpec

Move: TypeAlias = Callable[["Fragments | memoryview", "Fragments | memoryview"], None]
"""Copies fragments to others of the same total length; either may be on a device."""

# The most elements encoded at once. With smaller pieces, threads would often wait for
# the interpreter's lock between the NumPy steps.
_PIECE_ELEMENTS: Final = 512 * 1024
_LAYOUT: Final = AxisOrder(" ".join(AXES))


class CodedCache:
    """The encoded rows of the listed blocks of a cache.

    Attributes:
        cache: The shadow.
        lists: The shadow's block lists: block i at position i.

    Raises:
        UsageError: No group of the cache has tokens in floating point.
    """

    def __init__(self, cache: PagedCache, lists: BlockLists, codec: RowCodec) -> None:
        if not any(_is_coded(group.spec) for group in cache.groups.values()):
            raise UsageError(
                f"codec={codec.name!r}: it needs a cache whose elements are "
                f"{', '.join(sorted(FLOATS))}; leave codec= out"
            )
        sources: dict[str, GroupSource] = {}
        for name, group in cache.groups.items():
            spec = _shadow_spec(group.spec, codec)
            extents = extents_of(spec) | {"block": max(1, lists[name].size)}
            shape = tuple(extents[axis] for axis in AXES)
            # One byte per element: NumPy has no float8, so float8 elements are uint8.
            dtype = np.int8 if spec.dtype == "int8" else np.uint8
            sources[name] = (spec, np.empty(shape, dtype), _LAYOUT)
        self.cache: PagedCache = PagedCache.grouped(sources)
        self.lists: BlockLists = self.cache.block_lists(
            {name: np.arange(ids.size) for name, ids in lists.items()}
        )
        self._real = cache
        self._codec = codec
        # A growing transfer fills in its ids later.
        self._ids = lists

    def encode(self, group: str, layers: range, blocks: range, move: Move) -> None:
        """Encode some list positions in some layers; both count from 0 in the group."""
        spec = self._real.groups[group].spec
        ids = self._ids[group]
        walk = Canonical(
            group=group,
            order=AXES,
            layers=spec.layer_indices,
            heads=spec.heads,
            components=spec.components,
            head_dim=spec.head_dim,
            item_bytes=spec.item_bytes,
            tokens=ids.size * spec.block_tokens,
            granule_tokens=spec.block_tokens,
            granules=ids.size,
        )
        named = range(spec.first_layer + layers.start, spec.first_layer + layers.stop)
        wanted = np.ones(ids.size, np.bool_)
        whole = slice(blocks.start, blocks.stop)
        for real, shadow in self._pieces(walk, named, whole, wanted):
            if not _is_coded(spec):
                move(real, shadow)
                continue
            image = np.empty(real.nbytes, np.uint8)
            move(real, image.data)
            rows = as_floats(image, spec.dtype).reshape(-1, spec.head_dim)
            encoded = np.empty(shadow.nbytes, np.uint8)
            self._codec.encode(rows, encoded.reshape(len(rows), -1))
            move(encoded.data, shadow)

    def decode(
        self, walk: Canonical, layers: range, granules: slice, wanted: Bits, move: Move
    ) -> None:
        """Decode some layers and granules that have landed."""
        spec = self._real.groups[walk.group].spec
        for real, shadow in self._pieces(walk, layers, granules, wanted):
            if not _is_coded(spec):
                move(shadow, real)
                continue
            encoded = np.empty(shadow.nbytes, np.uint8)
            move(shadow, encoded.data)
            coded_rows = encoded.reshape(-1, self._codec.row_bytes(spec.head_dim))
            rows = self._codec.decode(coded_rows, spec.head_dim)
            image: Bytes = np.empty(real.nbytes, np.uint8)
            put_floats(rows, spec.dtype, image)
            move(image.data, real)

    def _pieces(
        self, walk: Canonical, layers: range, granules: slice, wanted: Bits
    ) -> Iterator[tuple[Fragments, Fragments]]:
        """Yield pieces of the cache, each with the same rows of the shadow."""
        ends = [
            GroupMap(Steps(_walked(walk, memory.spec), memory), ids, wanted)
            for memory, ids in (
                (self._real.groups[walk.group], self._ids[walk.group]),
                (self.cache.groups[walk.group], self.lists[walk.group]),
            )
        ]
        elements = ends[0].granule_bytes // ends[0].memory.spec.item_bytes
        step = max(1, _PIECE_ELEMENTS // elements)
        for layer in layers:
            for first in range(granules.start, granules.stop, step):
                part = slice(first, min(first + step, granules.stop))
                if wanted[part].any():
                    real, shadow = (
                        end.fragments(range(layer, layer + 1), part) for end in ends
                    )
                    yield real, shadow


def _is_coded(spec: KVSpec) -> bool:
    return spec.kind == "tokens" and spec.dtype in FLOATS


def _shadow_spec(spec: KVSpec, codec: RowCodec) -> KVSpec:
    if not _is_coded(spec):
        return spec
    return replace(
        spec,
        dtype="uint8",
        head_dim=codec.row_bytes(spec.head_dim),
        fingerprint=f"{spec.fingerprint} codec={codec.name} of {spec.dtype}".lstrip(),
    )


def _walked(walk: Canonical, spec: KVSpec) -> Canonical:
    """Return a walk in the common axis order, with the row size of one cache."""
    return replace(walk, order=AXES, head_dim=spec.head_dim, item_bytes=spec.item_bytes)
