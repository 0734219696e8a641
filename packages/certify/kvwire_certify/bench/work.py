"""The work of a round, and the memory that one side moves.

A cache's blocks are scattered: each side's memory is a pool with twice as many blocks
as travel. Which blocks travel, and in which order, is drawn at random on each side. No
two of them are adjacent, so no transport can merge two fragments into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.kv.fragments import Fragments
from kvwire.memory.arena import Arena
from kvwire.types import in_bytes

CONNECT: Final = "connect"
PULL: Final = "pull"
PUSH: Final = "push"
READY: Final = "ready"
ROUND_TRIP: Final = "round trip"
SEND: Final = "send"
PUT: Final = "put"
GET: Final = "get"

# Memory that the other side can map.
ARENA: Final = "arena"
# The left and the right side have their blocks in different places.
LEFT: Final = 1
RIGHT: Final = 2

# 2 components x 16 tokens x 8 heads x 2 bytes; the rest of a block's size are its dims.
_TOKENS: Final = 16
_HEADS: Final = 8
_BESIDE: Final = 0xA5
_DIGEST_BYTES: Final = 16

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a contender in a round: ``count`` operations of ``nbytes``.

    Up to ``in_flight`` of them run at a time. ``ready`` is a push whose layers are
    marked one by one; a ``get`` of a work with layers reads from a window.
    """

    verb: str
    nbytes: int
    count: int
    in_flight: int = 1
    # The number of layers of the cache; 0 without a cache.
    layers: int = 0
    # The number of blocks that travel in an operation.
    blocks: int = 1
    # Every other block of the pool travels, so no two are adjacent. With 1, all of them
    # travel, side by side.
    spread: int = 2
    # Whether a block has all its layers side by side and is one fragment; otherwise
    # each layer of a block is one fragment.
    cross_layer: bool = False

    @property
    def name(self) -> str:
        """The work's name in the output."""
        if self.verb == READY:
            return f"ready of a layer, {in_bytes(self.layer_bytes)}"
        layers = f", {self.layers} layers" if self.layers else ""
        size = f", {in_bytes(self.nbytes)}" if self.nbytes else ""
        return f"{self.verb}{size}{layers}"

    @property
    def moved_bytes(self) -> int:
        """The bytes that a round moves."""
        return self.nbytes * self.count

    @property
    def fragments(self) -> int:
        """The number of fragments in an operation."""
        return self.blocks * (1 if self.cross_layer else self.layers)

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of one block."""
        return self.nbytes // (self.layers * self.blocks)

    @property
    def layout(self) -> str:
        """The layout's name in the output."""
        return "cross-layer" if self.cross_layer else "per-layer"

    @property
    def memory_bytes(self) -> int:
        """The bytes of each side's memory: its pool, or the operations in flight."""
        return self.nbytes * (self.spread if self.layers else self.in_flight)


class Pool:
    """One side's memory, as the cache of a work."""

    def __init__(self, memory: Bytes, work: Work, side: int) -> None:
        self.memory = memory
        self._side = side
        pool_blocks = work.spread * work.blocks
        self.cache: kvwire.PagedCache = _paged(
            memory, work.layers, pool_blocks, cross_layer=work.cross_layer
        )
        blocks = np.arange(work.blocks) * work.spread
        if work.spread > 1:
            np.random.default_rng(side).shuffle(blocks)
        # The blocks that travel, and the places of their fragments, layer after layer.
        self.blocks: list[int] = blocks.tolist()
        first = np.arange(1 if work.cross_layer else work.layers) * pool_blocks
        self.rows: npt.NDArray[np.int64] = (first[:, None] + blocks).ravel()
        self._fragments = memory.reshape(work.spread * work.fragments, -1)
        # The memory between them must stay unchanged.
        self._beside = np.delete(np.arange(len(self._fragments)), self.rows)

    @property
    def chosen(self) -> tuple[kvwire.PagedCache, list[int]]:
        """Return the cache and the blocks that travel, as arguments for a transfer."""
        return self.cache, self.blocks

    @property
    def lent(self) -> Fragments:
        """The memory of the travelling blocks, in the same order."""
        size = self._fragments.shape[1]
        return Fragments.uniform(
            np.uint64(self.memory.ctypes.data) + self.rows.astype(np.uint64) * size,
            size,
            owner=self.memory,
            writable=True,
        )

    def mark_beside(self) -> None:
        """Write a pattern to all memory that does not travel."""
        self._fragments[self._beside] = _BESIDE

    def fragments(self) -> Bytes:
        """Copy the travelling fragments, layer after layer."""
        return self._fragments[self.rows]

    def digest(self) -> str:
        """Return a digest of the travelling fragments.

        It differs from any other side's if memory beside them has changed.
        """
        found = digest(self.fragments())
        if (self._fragments[self._beside] == _BESIDE).all():
            return found
        side = "left" if self._side == LEFT else "right"
        return f"{found} and more on the {side} side"


def _paged(
    memory: Bytes, layers: int, blocks: int, *, cross_layer: bool
) -> kvwire.PagedCache:
    """Make a cache over memory: blocks of 16 tokens, or of one if they are tiny.

    With ``cross_layer``, all layers of a block are contiguous.
    """
    nbytes = memory.size // (layers * blocks)
    whole = nbytes % (4 * _TOKENS * _HEADS) == 0
    tokens, heads = (_TOKENS, _HEADS) if whole else (1, 1)
    dim = nbytes // (4 * tokens * heads)
    spec = kvwire.KVSpec(
        layers=layers,
        kv_heads=heads,
        head_dim=dim,
        block_tokens=tokens,
        dtype="float16",
    )
    numbers = memory.view(np.float16)
    block = (2, tokens, heads, dim)
    if cross_layer:
        return kvwire.PagedCache(spec, numbers.reshape(blocks, layers, *block))
    return kvwire.PagedCache(spec, list(numbers.reshape(layers, blocks, *block)))


class BenchMemory:
    """The memory that one side moves, for one work at a time.

    All works use the same pages, so no round has to allocate any.

    Attributes:
        bytes: The whole memory.
        parts: The part for each operation in flight.
        pool: The work's pool, if it has a cache.
    """

    def __init__(self, side: int, options: Mapping[str, Any]) -> None:
        self._side = side
        self.bytes: Bytes = np.zeros(0, np.uint8)
        self.parts: Sequence[Bytes] = ()
        self.pool: Pool | None = None
        self._in_arena = options.get("memory") == ARENA
        self._arenas: list[Arena] = []
        self._room = self.bytes
        self._work: Work | None = None

    @property
    def chosen(self) -> tuple[kvwire.PagedCache, list[int]]:
        """Return the arguments for a transfer of the pool's travelling blocks."""
        assert self.pool is not None
        return self.pool.chosen

    def have(self, work: Work, *, checks: bool) -> None:
        """Prepare the memory for a work; with ``checks``, fill it with random bytes.

        Call it on a thread: a loop that is blocked for long looks dead to the peer.
        """
        if self._work != work:
            self._forget()
            self._take(work.memory_bytes)
            self.parts = np.split(self.bytes, work.in_flight)
            if work.layers:
                self.pool = Pool(self.bytes, work, self._side)
            self._work = work
        if checks:
            words = np.random.default_rng().integers(0, 256, self.bytes.size, np.uint8)
            self.bytes[:] = words
            if self.pool is not None:
                self.pool.mark_beside()

    def _take(self, nbytes: int) -> None:
        """Allocate memory, after freeing the previous one."""
        if self._room.size < nbytes:
            self._room = np.zeros(0, np.uint8)
            if self._in_arena:
                self._arenas.append(Arena(nbytes, populate=True))
                self._room = self._arenas[-1].buffer(nbytes)
            else:
                self._room = np.empty(nbytes, np.uint8)
            # Written to first, so that timing includes no page faults.
            self._room[:] = 1
        self.bytes = self._room[:nbytes]

    def _forget(self) -> None:
        """Drop all views of the memory."""
        self._work = None
        self.pool = None
        self.parts = ()
        self.bytes = np.zeros(0, np.uint8)

    async def digest(self) -> str:
        """Return a digest of the travelling blocks, or of one operation's bytes."""
        if self.pool is not None:
            return await asyncio.to_thread(self.pool.digest)
        return await asyncio.to_thread(digest, self.parts[0])

    def close(self) -> None:
        """Unmap the arenas."""
        self._forget()
        self._room = self.bytes
        for arena in self._arenas:
            # Transfers may still have arrays in it, which keep it mapped.
            with contextlib.suppress(kvwire.UsageError):
                arena.close()


def digest(data: Bytes | memoryview) -> str:
    """Return a digest, which is compared with that of the other side."""
    raw = np.frombuffer(data, np.uint8).data
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()
