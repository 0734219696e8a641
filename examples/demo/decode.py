"""The decode process: pulls KV, computes what did not arrive, and generates.

The library's side of it is :meth:`DecodeRole.fetch`: pull into blocks of its own, watch
the layers land, look at the outcome, and ask the plan what is left to compute.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import kvwire
from examples.demo.blocks import FreeList, blocks_for
from examples.demo.lines import (
    Arrived,
    Decode,
    Landed,
    Recomputed,
    Token,
    Up,
    orders,
    say,
)
from examples.demo.llama import Forward, Llama
from examples.demo.settings import BLOCK_TOKENS
from kvwire.integrations.transformers import PagedSequence

NUM_BLOCKS = 320


async def main() -> None:
    """Take orders until standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", required=True, help="address to pull from")
    address = parser.parse_args().prefill
    llama = Llama()
    llama.warm_up()
    with ThreadPoolExecutor(1) as compute:
        async with kvwire.open(name="decode") as comm:
            role = DecodeRole(await comm.connect(address), llama, compute)
            say(Up("decode"))
            async with asyncio.TaskGroup() as tasks:
                async for order in orders():
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
        self._pool = llama.pool(NUM_BLOCKS)
        self._free = FreeList(NUM_BLOCKS, seed=2)

    async def serve(self, order: Decode) -> None:
        """One request, from its KV to its last token."""
        prompt = order.tokens
        blocks = self._free.take(blocks_for(len(prompt) + order.new))
        outcome, ranges = await self.fetch(order.request, len(prompt) - 1, blocks)
        sequence = PagedSequence(self._pool, blocks, length=outcome.usable_tokens)
        for start, stop in ranges:
            done = await self._forward(prompt[start:stop], sequence)
            say(Recomputed(order.request, done.spans))
        token = prompt[-1]
        for _ in range(order.new):
            token, spans = await self._forward([token], sequence)
            say(Token(order.request, token, spans[0].start, spans[-1].stop))
        self._free.give_back(blocks)

    async def fetch(
        self, request: str, tokens: int, blocks: list[int]
    ) -> tuple[kvwire.Outcome, list[tuple[int, int]]]:
        """Pull the KV of a prompt.

        Returns:
            How the transfer ended, and the token ranges that are left to compute.
        """
        pulled = blocks[: blocks_for(tokens)]
        inc = self._conn.pull(request, self._pool.cache, pulled, tokens=tokens)
        watching = asyncio.create_task(watch(inc, request))
        outcome = await inc
        at = time.monotonic()
        await watching
        plan = kvwire.plan_prefill(
            [
                kvwire.PrefillRequest(
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
                wire_s=outcome.timings.wire_s,
                layers_grouped=outcome.layers_grouped,
                transport=self._conn.transport,
            )
        )
        # What landed may be read from here on. Decode also writes: to the blocks that
        # did not land, and behind the prompt in the last one.
        await inc.drained()
        return outcome, ranges

    async def _forward(self, tokens: list[int], sequence: PagedSequence) -> Forward:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compute, self._llama.forward, tokens, sequence
        )


async def watch(inc: kvwire.Incoming, request: str) -> None:
    """Say when each layer has landed, until one does not."""
    for layer in inc.cache.spec.layer_indices:
        try:
            await inc.layer(layer)
        except kvwire.KVWireError:
            return
        say(Landed(request, layer, time.monotonic()))


if __name__ == "__main__":
    asyncio.run(main())
