"""Where an engine's blocks are in a store, and how they become rows of keys and values.

Most engines keep each token's keys and values together. vLLM's kernels for CPUs do not:
they keep a block's keys, and behind these its values, in the order that their
instructions read. These orders are known for the kernels in :data:`PACKINGS`; each has
a test that compares it with the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import AxisOrder
from kvwire.kv.spec import dtype_name

Rows: TypeAlias = npt.NDArray[Any]
"""Keys or values of one layer: (kv heads, tokens, elements)."""
Unpack: TypeAlias = Callable[[Rows, int], Rows]
"""Return packed blocks, (..., block tokens x elements), as (..., block tokens,
elements); called with the number of elements."""

PLAIN: Final = AxisOrder("head block token dim")
_VLLM: Final = AxisOrder("block head token (kv dim)")


class Shape(NamedTuple):
    """The sizes of the KV that a model keeps of each token.

    Attributes:
        layers: The number of layers.
        kv_heads: KV heads of each layer.
        width: Elements for a head of one token; keys and values have as many.
        dtype: The type of the elements.
        form: "" for keys and values as they were computed, otherwise the name of the
            form that they were quantised to.
    """

    layers: int
    kv_heads: int
    width: int
    dtype: str
    form: str = ""


class BlockRows(NamedTuple):
    """Memory for blocks.

    Attributes:
        paged: The blocks, for a store or a transfer.
        rows: Returns the keys and values of each layer that have landed.
    """

    paged: PagedCache
    rows: Callable[[], list[tuple[Rows, Rows]]]


class Source(NamedTuple):
    """The blocks of one engine.

    Attributes:
        name: The name under which the engine keeps them.
        block_tokens: Tokens per block.
        packing: A kernel of :data:`PACKINGS`, or "".
    """

    name: str
    block_tokens: int
    packing: str = ""

    def spec(self, shape: Shape) -> KVSpec:
        """Return the spec of the blocks."""
        return KVSpec(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.width,
            block_tokens=self.block_tokens,
            dtype=dtype_name(shape.dtype),
            fingerprint=f"{self.name} {shape.form}".rstrip(),
        )

    def landing(self, shape: Shape, blocks: int) -> BlockRows:
        """Return memory for a number of blocks."""
        size = self.block_tokens
        heads = shape.kv_heads
        width = shape.width
        dtype = raw_dtype(shape.dtype)
        if not self.packing:
            memory = np.empty((shape.layers, 2, heads, blocks, size, width), dtype)
            paged = PagedCache(self.spec(shape), [tuple(one) for one in memory], PLAIN)
            rows = memory.reshape(shape.layers, 2, heads, blocks * size, width)
            return BlockRows(paged, lambda: [(one[0], one[1]) for one in rows])
        memory = np.empty((shape.layers, blocks, heads, size, 2 * width), dtype)
        packed = memory.reshape(shape.layers, blocks, heads, 2, size * width)

        def unpacked() -> list[tuple[Rows, Rows]]:
            # (blocks, heads, tokens, elements) -> (heads, all tokens, elements)
            return [
                tuple(
                    unpack(layer[:, :, part], width)
                    .swapaxes(0, 1)
                    .reshape(heads, blocks * size, width)
                    for part, unpack in enumerate(PACKINGS[self.packing])
                )  # type: ignore[misc]  # there are two of them
                for layer in packed
            ]

        return BlockRows(PagedCache(self.spec(shape), list(memory), _VLLM), unpacked)


def vllm_sources(name: str) -> list[Source]:
    """Return the sources of vLLM under a name: each kernel and block size."""
    return [
        Source(f"{name} {kernel} with blocks of {size}", size, kernel)
        for kernel in PACKINGS
        for size in _BLOCK_TOKENS
    ]


def raw_dtype(name: str) -> npt.DTypeLike:
    """Return NumPy's type for elements; uint16 for bfloat16, which it lacks."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def _in_order(packed: Rows, width: int) -> Rows:
    return packed.reshape(*packed.shape[:-1], -1, width)


def _columns(packed: Rows, width: int) -> Rows:
    return packed.reshape(*packed.shape[:-1], width, -1).swapaxes(-1, -2)


def _amx_keys(packed: Rows, width: int) -> Rows:
    """Undo: of 16 tokens each, pairs of elements, token by token."""
    tiles = packed.reshape(*packed.shape[:-1], -1, width // 2, 16, 2)
    return tiles.swapaxes(-3, -2).reshape(*packed.shape[:-1], -1, width)


def _amx_values(packed: Rows, width: int) -> Rows:
    """Undo: of 16 elements each, pairs of tokens, element by element."""
    tiles = packed.reshape(*packed.shape[:-1], width // 16, -1, 16, 2)
    moved = np.moveaxis(tiles, (-3, -1, -4, -2), (-4, -3, -2, -1))
    return moved.reshape(*packed.shape[:-1], -1, width)


PACKINGS: Final[Mapping[str, tuple[Unpack, Unpack]]] = {
    "cpu_attn vec": (_columns, _in_order),
    "cpu_attn vec16": (_columns, _in_order),
    "cpu_attn amx": (_amx_keys, _amx_values),
}
"""How keys and values of a block are read, by vLLM's kernel."""
# What vLLM takes for CPUs, its default among them.
_BLOCK_TOKENS: Final = (16, 32, 64, 128)
