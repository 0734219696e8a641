"""kvwire moves blocks of a paged cache: pull and push, in both layouts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import (
    LEFT,
    RIGHT,
    FragmentWork,
    block_ids,
    offsets,
)
from kvwire.cli.bench.sides.half import ConnectedHalf, digest, over
from kvwire.memory.arena import Arena

if TYPE_CHECKING:
    from kvwire.kv.paged import PagedCache

GO: Final = 1
# A block is 2 components x 16 tokens x 8 heads of 2 bytes: what is left are its dims.
TOKENS: Final = 16
HEADS: Final = 8
_BYTES_PER_DIM: Final = 2 * TOKENS * HEADS * 2


class Pool:
    """The memory of one side as the cache of a work."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], work: FragmentWork, side: int
    ) -> None:
        dims = work.layer_bytes // _BYTES_PER_DIM
        block = (2, TOKENS, HEADS, dims)
        self.memory: npt.NDArray[np.uint8] = memory[: work.pool_bytes]
        whole = self.memory.view(np.float16)
        spec = kvwire.KVSpec(
            layers=work.layers,
            kv_heads=HEADS,
            head_dim=dims,
            block_tokens=TOKENS,
            dtype="float16",
        )
        tensors: npt.NDArray[np.float16] | list[npt.NDArray[np.float16]]
        if work.cross_layer:
            tensors = whole.reshape(work.pool_blocks, work.layers, *block)
        else:
            tensors = list(whole.reshape(work.layers, work.pool_blocks, *block))
        self.cache: PagedCache = kvwire.PagedCache(spec, tensors)
        self.blocks: Any = block_ids(work, side).tolist()
        self._fragments = offsets(work, side) // work.nbytes
        self._shape = (-1, work.nbytes)

    def fill(self) -> str:
        """Random bytes into every block; the digest of those that travel.

        For a thread: a loop that stands still for long is a dead peer to others.
        """
        rng = np.random.default_rng()
        self.memory.view(np.uint64)[:] = rng.integers(
            0, 2**63, self.memory.size // 8, np.uint64
        )
        return self.digest()

    def digest(self) -> str:
        """Of the bytes that travel, in their order."""
        return digest(self.fragments().data)

    def fragments(self) -> npt.NDArray[np.uint8]:
        """A copy of the fragments that travel, layer after layer."""
        return self.memory.reshape(self._shape)[self._fragments]


class FragmentsHalf(ConnectedHalf):
    """The left side pulls or pushes, the right one publishes or expects.

    Args:
        transport: Its name.
        pool_bytes: The largest pool of all works.
        arena: The pool lies in memory that the peer can map.

    Attributes:
        memory: Where the pools of all works lie.
    """

    work_type: ClassVar[type[Work]] = FragmentWork

    _pool: Pool

    def __init__(self, transport: str, pool_bytes: int, *, arena: bool = False) -> None:
        super().__init__(transport)
        self._arena = Arena(pool_bytes) if arena else None
        self.memory: npt.NDArray[np.uint8] = (
            self._arena.buffer(pool_bytes)
            if self._arena
            else np.empty(pool_bytes, np.uint8)
        )
        # Written to, so that no page is missing when it is timed.
        self.memory[:] = 1
        self._work: FragmentWork | None = None

    async def prepare(self, work: Work) -> dict[str, Any]:
        """See Half."""
        self._have(work, RIGHT)
        return {}

    async def use(self, work: Work, given: dict[str, Any]) -> dict[str, Any]:
        """See Half."""
        self._have(work, LEFT)
        return {}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        pool = self._have(work, LEFT)
        sent = await asyncio.to_thread(pool.fill) if work.verb == "push" else ""
        await self._ask(work, pool.cache, pool.blocks)
        return {"digest": sent or await asyncio.to_thread(pool.digest)}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        pool = self._have(work, RIGHT)
        sent = await asyncio.to_thread(pool.fill) if work.verb == "pull" else ""
        await self._offer(work, pool.cache, pool.blocks)
        return {"digest": sent or await asyncio.to_thread(pool.digest)}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Half."""
        pool = self._have(work, LEFT)
        elapsed_s = await self._ask(work, pool.cache, pool.blocks)
        return {"values": [work.count * work.nbytes / elapsed_s]}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        pool = self._have(work, RIGHT)
        await self._offer(work, pool.cache, pool.blocks)
        return {}

    async def close(self) -> None:
        """See Half."""
        await super().close()
        if self._arena is not None:
            # Transfers may still have arrays in it, which keep it mapped.
            with contextlib.suppress(kvwire.UsageError):
                self._arena.close()

    def _have(self, work: Work, side: int) -> Pool:
        assert isinstance(work, FragmentWork)
        if self._work != work:
            self._pool = Pool(self.memory, work, side)
            self._work = work
        return self._pool

    async def _ask(
        self, work: Work, cache: kvwire.PagedCache, blocks: list[int]
    ) -> float:
        """Left: one transfer; seconds from the first call to its outcome."""
        self._number += 1
        connection = self._connection
        await connection.recv(GO)
        began = time.perf_counter()
        end: kvwire.Incoming | kvwire.Outgoing
        if work.verb == "pull":
            end = connection.pull(self._number, cache, blocks)
        else:
            end = connection.push(self._number, cache, blocks)
            _mark_all(end)
        await end
        elapsed_s = time.perf_counter() - began
        await over(end)
        return elapsed_s

    async def _offer(
        self, work: Work, cache: kvwire.PagedCache, blocks: list[int]
    ) -> None:
        """Right: the other end of it, ready before the left one begins."""
        self._number += 1
        end: kvwire.Incoming | kvwire.Outgoing
        if work.verb == "pull":
            end = self._communicator.publish(self._number, cache, blocks)
            _mark_all(end)
        else:
            end = self._communicator.expect(self._number, cache, blocks)
        await self._connection.send(GO, b"")
        await over(end)


def _mark_all(outgoing: kvwire.Outgoing) -> None:
    outgoing.ready()
    outgoing.finish()
