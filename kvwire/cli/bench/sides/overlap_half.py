"""Prefill on the right, decode on the left, and compute that is a timer.

A GPU does not use the CPU while it computes, so neither does this: a thread sleeps for
as long as a layer would take and marks it. Both processes run on one machine, whose
monotonic clock they share, so an instant of one can be subtracted from one of the
other.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.sides.half import ConnectedHalf, digest, fill
from kvwire.limits import KIB

if TYPE_CHECKING:
    from kvwire.kv.paged import PagedCache

GO: Final = 1
# A block of 16 tokens with 8 heads of 128 in bfloat16: that of an 8B model of today.
TOKENS: Final = 16
HEADS: Final = 8
HEAD_DIM: Final = 128
BLOCK_BYTES: Final = 64 * KIB
assert 2 * TOKENS * HEADS * HEAD_DIM * 2 == BLOCK_BYTES


class Cache:
    """As many layers of as many bytes as a work says, all of them one request's.

    Attributes:
        cache: The cache.
        blocks: Every block of it.
        memory: Its bytes, layer after layer.
    """

    def __init__(self, layers: int, layer_bytes: int) -> None:
        tokens = TOKENS
        blocks, rest = divmod(layer_bytes, BLOCK_BYTES)
        if rest:  # a block of a toy model, to measure what is not payload
            blocks, tokens = 1, 1
        heads = HEADS if not rest else 1
        dim = HEAD_DIM if not rest else layer_bytes // 4
        self.memory: npt.NDArray[np.uint8] = np.zeros(layers * layer_bytes, np.uint8)
        spec = kvwire.KVSpec(
            layers=layers,
            kv_heads=heads,
            head_dim=dim,
            block_tokens=tokens,
            dtype="float16",
        )
        whole = self.memory.view(np.float16)
        tensors = list(whole.reshape(layers, blocks, 2, tokens, heads, dim))
        self.cache: PagedCache = kvwire.PagedCache(spec, tensors)
        self.blocks: list[int] = list(range(blocks))


class OverlapHalf(ConnectedHalf):
    """``work.count`` layers of ``work.nbytes`` bytes, moved as ``work.verb`` says.

    * ``streamed``: each layer is marked when it is computed;
    * ``whole``: all of them are marked when the last one is;
    * ``last``: only the last one is ever marked.
    """

    by_link = True

    def __init__(self, transport: str) -> None:
        super().__init__(transport)
        # The last one, since one of 80 layers is large.
        self._kept: tuple[tuple[int, int], Cache] | None = None

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        cache = self._cache(work)
        cache.memory[:] = 0
        await self._pull(cache, partial=False)
        return {"digest": digest(cache.memory.data)}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        cache = self._cache(work)
        sent = fill(cache.memory.data)
        await self._compute(cache, work, 0.0, None)
        return {"digest": sent}

    async def drive(self, work: Work, repeat: int = 1) -> dict[str, Any]:
        """Left: ``over`` says when each outcome was known."""
        cache, partial = self._cache(work), work.verb == "last"
        return {"over": [await self._pull(cache, partial) for _ in range(repeat)]}

    async def serve(
        self,
        work: Work,
        repeat: int = 1,
        compute_s: float = 0.0,
        group_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Right: ``first`` and ``last`` say when the first and last mark was made.

        Args:
            work: The work.
            repeat: How often.
            compute_s: How long a layer takes to compute.
            group_bytes: See ``publish``.
        """
        cache = self._cache(work)
        spans = [
            await self._compute(cache, work, compute_s, group_bytes)
            for _ in range(repeat)
        ]
        return {"first": [s[0] for s in spans], "last": [s[1] for s in spans]}

    def _cache(self, work: Work) -> Cache:
        key = work.count, work.nbytes
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self._kept = key, Cache(*key)
        return self._kept[1]

    async def _pull(self, cache: Cache, partial: bool) -> float:
        self._number += 1
        incoming = self._connection.pull(self._number, cache.cache, cache.blocks)
        await self._connection.send(GO, b"")
        outcome = await incoming
        over = time.monotonic()
        if not (outcome.complete or partial):
            raise RuntimeError(f"the transfer did not end well: {outcome!r}")
        await incoming.drained()
        return over

    async def _compute(
        self, cache: Cache, work: Work, compute_s: float, group_bytes: int | None
    ) -> tuple[float, float]:
        self._number += 1
        outgoing = self._communicator.publish(
            self._number, cache.cache, cache.blocks, group_bytes=group_bytes
        )
        # Behind it on the same link: the question for the transfer has been answered.
        await self._connection.recv(GO)
        if compute_s:
            span = await asyncio.to_thread(_mark, outgoing, work, compute_s)
        else:
            span = _mark(outgoing, work, compute_s)
        await outgoing
        await outgoing.drained()
        return span


def _mark(
    outgoing: kvwire.Outgoing, work: Work, compute_s: float
) -> tuple[float, float]:
    """Compute and mark layer by layer; when the first and the last mark was made."""
    began = time.monotonic()
    times = []
    for layer in range(work.count):
        # Until a fixed instant, so that what a sleep is late does not add up.
        left_s = began + (layer + 1) * compute_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        is_last = layer == work.count - 1
        if work.verb == "streamed" or is_last:
            times.append(time.monotonic())
            outgoing.ready(layers=None if work.verb == "whole" else layer)
    outgoing.finish(partial=work.verb == "last")
    return times[0], times[-1]
