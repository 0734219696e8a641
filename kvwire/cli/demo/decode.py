"""The decode process: pulls KV, computes what did not arrive, and generates.

The library's side of it is :meth:`DecodeRole.fetch`: pull into blocks of its own, watch
the layers land, look at the outcome, and ask the plan what is left to compute.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvwire
from kvwire import PrefillRequest, plan_prefill
from kvwire.cli.demo.free_list import FreeList
from kvwire.cli.demo.lines import (
    PATIENCE_S,
    Arrived,
    Connect,
    Decode,
    LayerLanded,
    NewToken,
    Recomputed,
    Up,
    orders,
    say,
)
from kvwire.cli.demo.llama import BLOCK_TOKENS, Forward, Llama, blocks_for, load

NUM_BLOCKS = 320


async def run(library: str) -> None:
    """Take orders until standard input closes."""
    llama = load(library, NUM_BLOCKS)
    llama.warm_up()
    todo = orders()
    first = await anext(todo)
    assert isinstance(first, Connect)
    with ThreadPoolExecutor(1) as compute:
        async with kvwire.open(name="decode", handshake_timeout_s=PATIENCE_S) as comm:
            role = DecodeRole(await comm.connect(first.address), llama, compute)
            say(Up("decode"))
            async with asyncio.TaskGroup() as tasks:
                async for order in todo:
                    assert isinstance(order, Decode)
                    tasks.create_task(role.serve(order))


class DecodeRole:
    """Serves requests at once; their forward passes take turns in one thread."""

    def __init__(
        self, conn: kvwire.Connection, llama: Llama, compute: ThreadPoolExecutor
    ) -> None:
        self._conn = conn
        self._llama = llama
        self._compute = compute
        self._free = FreeList(NUM_BLOCKS, seed=2)

    async def serve(self, order: Decode) -> None:
        """One request, from its KV to its last token."""
        prompt = order.tokens
        blocks = self._free.take(blocks_for(len(prompt) + order.new))
        outcome, ranges = await self.fetch(order.request, len(prompt) - 1, blocks)
        sequence = self._llama.sequence(blocks, length=outcome.usable_tokens)
        for start, stop in ranges:
            done = await self._forward(prompt[start:stop], sequence)
            say(Recomputed(order.request, done.spans))
        token = prompt[-1]
        for _ in range(order.new):
            token, spans = await self._forward([token], sequence)
            say(NewToken(order.request, token, spans[0].start, spans[-1].stop))
        self._free.give_back(blocks)

    async def fetch(
        self, request: str, tokens: int, blocks: list[int]
    ) -> tuple[kvwire.Outcome, list[tuple[int, int]]]:
        """Pull the KV of a prompt.

        Returns:
            How the transfer ended, and the token ranges that are left to compute.
        """
        pulled = blocks[: blocks_for(tokens)]
        inc = self._conn.pull(request, self._llama.cache, pulled, tokens=tokens)
        watching = asyncio.create_task(watch(inc, request, self._llama.cache))
        outcome = await inc
        at = time.monotonic()
        await watching
        plan = plan_prefill(
            [
                PrefillRequest(
                    id=request,
                    num_tokens=tokens,
                    blocks=pulled,
                    block_tokens=BLOCK_TOKENS,
                )
            ],
            {request: outcome},
        )
        ranges = [(r.start, r.stop) for r in plan.prefill.get(request, ())]
        missing = outcome.missing
        say(
            Arrived(
                request=request,
                at=at,
                blocks=len(pulled),
                missing=[pulled.index(block) for block in missing.ids().tolist()],
                why=next(iter(missing.values()), ""),
                tokens=tokens,
                usable_tokens=outcome.usable_tokens,
                to_prefill=ranges,
                nbytes=outcome.nbytes,
                wire_s=outcome.timings.wire_s + outcome.timings.mark_wait_s,
                commit_s=outcome.timings.commit_s,
                layers_grouped=outcome.layers_grouped,
                transport=self._conn.transport,
            )
        )
        # What landed may be read from here on. Decode also writes: to the blocks that
        # did not land, and behind the prompt in the last one.
        await inc.drained()
        return outcome, ranges

    async def _forward(self, tokens: list[int], sequence: Any) -> Forward:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compute, self._llama.forward, tokens, sequence
        )


async def watch(inc: kvwire.Incoming, request: str, cache: kvwire.PagedCache) -> None:
    """Say when each layer has landed, until one does not."""
    for layer in cache.spec.layer_indices:
        try:
            await inc.layer(layer)
        except kvwire.KVWireError:
            return
        say(LayerLanded(request, layer, time.monotonic()))
