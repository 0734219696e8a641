"""Caches with known contents, in host memory.

:class:`Memory` is the cache of one side of a transfer: a producer's blocks hold values
that name their layer and block, a consumer's are filled with FREE. So what landed, what
did not, and what was written where it must not be are told apart by looking.
:class:`Filled` is a cache of random or no content, as a store is given them. A block of
a :class:`StampedCache` names its life.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import Layout
from kvwire.memory.arena import Arena
from kvwire_certify import oracle

Array = npt.NDArray[Any]

LAYERS, BLOCKS = 4, 32
SPEC = KVSpec(layers=LAYERS, kv_heads=2, head_dim=16, block_tokens=4, dtype="float32")
# One layer of a block is 1 MiB: more than sockets hold, and several chunks.
LARGE = KVSpec(
    layers=LAYERS, kv_heads=16, head_dim=128, block_tokens=64, dtype="float32"
)
# A head of a layer of SPEC for each of two ranks.
RANKS = [replace(SPEC, kv_heads=1, shard=(rank, 2)) for rank in range(2)]
FREE = -1.0
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
EVERY = slice(None)

# Of 512 bytes a block, so a slot of a store is one grain.
STORED = KVSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
# Of 64 KiB a block, so that a few hundred of them take a while.
STORED_LARGE = KVSpec(
    layers=4, kv_heads=4, head_dim=64, block_tokens=16, dtype="float16"
)


def chain(count: int, name: str = "") -> list[bytes]:
    """Names of blocks, each of what leads to it."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]


def shape_of(spec: KVSpec, blocks: int, layout: Layout = "NHD") -> tuple[int, ...]:
    """The shape of a layer of so many blocks."""
    inner = (spec.block_tokens, spec.kv_heads)
    if layout == "HND":
        inner = inner[::-1]
    return (blocks, spec.components, *inner, spec.head_dim)


def dtype_of(spec: KVSpec) -> np.dtype[Any]:
    """NumPy has no bfloat16 and no float8: such caches are kept as integers."""
    if spec.dtype in ("float16", "float32", "int8", "uint8"):
        return np.dtype(spec.dtype)
    return np.dtype({1: np.uint8, 2: np.uint16, 4: np.uint32}[spec.item_bytes])


class Memory:
    """A cache of one side, and the arrays behind it."""

    def __init__(
        self, spec: KVSpec = SPEC, blocks: int = BLOCKS, fill: float = FREE
    ) -> None:
        shape = shape_of(spec, blocks)
        self.tensors: list[Array] = [
            np.full(shape, fill, dtype_of(spec)) for _ in range(spec.layers)
        ]
        self.cache = PagedCache(spec, self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def stamp(self, blocks: Iterable[int], salt: int = 0) -> None:
        """Write what only these blocks hold: the oracle's bytes, each as a number."""
        picked = list(blocks)
        for layer, tensor in enumerate(self.tensors):
            size = tensor.size // oracle.WORD_BYTES
            places = np.arange(size).reshape(len(tensor), -1) + layer * size
            values = oracle.stamp(1, salt, places[picked]).view(np.uint8)
            tensor[picked] = values.reshape(tensor[picked].shape)

    def free(self, blocks: Iterable[int]) -> bool:
        """Whether nobody has written to these blocks."""
        picked = list(blocks)
        return all((tensor[picked] == FREE).all() for tensor in self.tensors)


def same(
    source: Memory,
    blocks: Iterable[int],
    target: Memory,
    landed: Iterable[int],
    layers: Iterable[int] = range(LAYERS),
) -> bool:
    """Whether these blocks of the target hold what those of the source do."""
    pairs = list(zip(blocks, landed, strict=True))
    return all(
        (source.tensors[layer][a] == target.tensors[layer][b]).all()
        for layer in layers
        for a, b in pairs
    )


class StampedCache:
    """A paged cache whose blocks are written and judged by the oracle.

    The life of a block is the number of its transfer, the generation that its window
    has offered it under, or its name; its place there is the position in a transfer.
    """

    def __init__(
        self,
        spec: KVSpec,
        blocks: int,
        *,
        arena: bool = False,
    ) -> None:
        shape, as_type = (spec.layers, *shape_of(spec, blocks)), dtype_of(spec)
        made = np.zeros(shape, as_type)
        if arena:
            made = Arena(2 * made.nbytes).numpy(shape, as_type)
        self.cache = PagedCache(spec, list(made))
        self.words: oracle.Words = made.reshape(spec.layers, blocks, -1).view(np.uint64)
        self._places = np.arange(self.words[:, 0].size).reshape(spec.layers, -1)
        self.poison(list(range(blocks)))

    def stamp(
        self, life: int, position: int = 0, layers: int | slice = EVERY
    ) -> oracle.Words:
        """What a block holds in these layers."""
        places = self._places + position * self._places.size
        return oracle.stamp(1, life, places[layers])

    def write(
        self, block: int, life: int, position: int = 0, layers: int | slice = EVERY
    ) -> None:
        self.words[layers, block] = self.stamp(life, position, layers)

    def wrong(self, block: int, life: int, position: int = 0) -> int:
        """How many bytes of a block are in words that it does not have."""
        expected = self.stamp(life, position)
        return 8 * int(np.count_nonzero(self.words[:, block] != expected))

    def poison(self, blocks: list[int]) -> None:
        self.words[:, blocks] = POISON

    def late(self, blocks: list[int]) -> int:
        """How many bytes of some blocks are in words without poison."""
        return 8 * int(np.count_nonzero(self.words[:, blocks] != POISON))


@dataclass
class Filled:
    """A cache of random bytes, or of zeros."""

    blocks: int = 16
    spec: KVSpec = STORED
    layout: Layout = "NHD"
    seed: int | None = None
    tensors: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        spec, as_type = self.spec, dtype_of(self.spec)
        shape = shape_of(spec, self.blocks, self.layout)
        rng = np.random.default_rng(self.seed)
        self.tensors = [
            np.zeros(shape, as_type)
            if self.seed is None
            else rng.integers(0, 256, (*shape[:-1], shape[-1] * spec.item_bytes))
            .astype(np.uint8)
            .view(as_type)
            for _ in range(spec.layers)
        ]

    @property
    def cache(self) -> PagedCache:
        return PagedCache(self.spec, self.tensors, self.layout)

    def tokens(self, blocks: list[int]) -> Array:
        """The tokens of some blocks: (layer, component, token, head, bytes)."""
        raw = np.stack([tensor.view(np.uint8)[blocks] for tensor in self.tensors])
        axes = (0, 2, 1, 3, 4, 5) if self.layout == "NHD" else (0, 2, 1, 4, 3, 5)
        together = raw.transpose(axes)
        return together.reshape(*together.shape[:2], -1, *together.shape[4:])
