"""The work of the demo's three processes.

``prefill`` computes prompts and publishes their KV meanwhile; :func:`publish` shows how
to use the library. ``decode`` pulls KV, computes the tokens that did not arrive, and
generates: see :meth:`DecodeRole.fetch`. ``single`` computes everything alone, without
kvwire. Each process takes orders from its standard input until that is closed.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvwire
from demo.lines import (
    PATIENCE_S,
    Arrived,
    Connect,
    LayerLanded,
    NewToken,
    Prefilled,
    Prompt,
    Recomputed,
    Single,
    Up,
    orders,
    say,
)
from demo.llama import (
    BLOCK_TOKENS,
    Forward,
    Llama,
    blocks_for,
    load,
    scattered,
)
from kvwire import PrefillRequest, plan_prefill
from kvwire.kv.marks import LayerMarks

# The size of the pools: 8 requests need 256 blocks, and decode generates into some
# more.
NUM_BLOCKS = 320


def play(name: str, library: str) -> int:
    """Play one of the roles; return 1 if the reader of its output has gone."""
    role = {"prefill": prefill, "decode": decode, "single": single}[name]
    unheard = False
    try:
        asyncio.run(role(library))
    except* BrokenPipeError:
        unheard = True
    return int(unheard)


async def single(library: str) -> None:
    """Generate everything alone."""
    llama = load(library, num_blocks=2)
    say(Up("single"))
    async for order in orders():
        assert isinstance(order, Prompt)
        say(Single(order.name, llama.generate(order.tokens, order.new)))


async def prefill(library: str) -> None:
    """Compute prompts, and publish their KV."""
    llama = load(library, NUM_BLOCKS)
    llama.warm_up()
    free = scattered(NUM_BLOCKS, seed=1)
    # One prompt at a time: two at once on one core would only delay both.
    with ThreadPoolExecutor(1) as compute:
        async with (
            kvwire.open(name="prefill", handshake_timeout_s=PATIENCE_S) as comm,
            asyncio.TaskGroup() as tasks,
        ):
            say(Up("prefill", str(await comm.listen("127.0.0.1:0"))))
            async for order in orders():
                assert isinstance(order, Prompt)
                tasks.create_task(publish(order, comm, llama, free, compute))


async def publish(
    order: Prompt,
    comm: kvwire.Communicator,
    llama: Llama,
    free: list[int],
    compute: ThreadPoolExecutor,
) -> None:
    """Publish a prompt's blocks, fill them, commit, and wait until they are free.

    Prefill runs in a thread and marks each layer as soon as it is written.
    """
    # Decode computes the last token of a prompt.
    tokens = order.tokens[:-1]
    blocks = [free.pop() for _ in range(blocks_for(len(tokens)))]
    # A layer of this small model is smaller than the size at which layers are sent
    # alone.
    out = comm.publish(
        order.name, llama.cache, blocks, tokens=len(tokens), group_bytes=1
    )
    timed = TimedMarks(out, order.lose)
    last_layer = llama.cache.spec.layer_indices[-1]
    marks = LayerMarks(timed, len(tokens), BLOCK_TOKENS, last_layer=last_layer)
    sequence = llama.sequence(blocks, on_written=marks)
    loop = asyncio.get_running_loop()
    try:
        done = await loop.run_in_executor(compute, llama.forward, tokens, sequence)
    except BaseException:
        out.abort("prefill failed")
        raise
    say(Prefilled(order.name, done.spans, timed.at))
    await out
    await out.drained()
    free.extend(blocks)


class TimedMarks:
    """Passes marks on, records their times, and withholds some blocks on purpose."""

    def __init__(self, out: kvwire.Outgoing, lose: tuple[int, int]) -> None:
        self._out = out
        self._lose = range(*lose)
        self.at: list[float] = []

    def ready(self, *, layers: int, blocks: slice) -> None:
        """Mark like Outgoing.ready, except for the blocks that are to be lost."""
        # Recorded before the mark, because the layer may land before this thread
        # continues.
        self.at.append(time.monotonic())
        lose = self._lose
        for part in (
            slice(blocks.start, min(blocks.stop, lose.start)),
            slice(max(blocks.start, lose.stop), blocks.stop),
        ):
            if part.start < part.stop:
                self._out.ready(layers=layers, blocks=part)

    def finish(self) -> None:
        """Finish like Outgoing.finish, with gaps for the blocks that are to be lost."""
        self._out.finish(partial=len(self._lose) > 0)


async def decode(library: str) -> None:
    """Pull the KV of prompts, and generate."""
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
                    assert isinstance(order, Prompt)
                    tasks.create_task(role.serve(order))


class DecodeRole:
    """Serves concurrent requests; their forward passes take turns on one thread."""

    def __init__(
        self, conn: kvwire.Connection, llama: Llama, compute: ThreadPoolExecutor
    ) -> None:
        self._conn = conn
        self._llama = llama
        self._compute = compute
        self._free = scattered(NUM_BLOCKS, seed=2)

    async def serve(self, order: Prompt) -> None:
        """Serve one request, from its KV to its last token."""
        prompt = order.tokens
        wanted = blocks_for(len(prompt) + order.new)
        blocks = [self._free.pop() for _ in range(wanted)]
        outcome, ranges = await self.fetch(order.name, len(prompt) - 1, blocks)
        sequence = self._llama.sequence(blocks, length=outcome.usable_tokens)
        for start, stop in ranges:
            done = await self._forward(prompt[start:stop], sequence)
            say(Recomputed(order.name, done.spans))
        token = prompt[-1]
        for _ in range(order.new):
            token, _ = await self._forward([token], sequence)
            say(NewToken(order.name, token))
        self._free.extend(blocks)

    async def fetch(
        self, request: str, tokens: int, blocks: list[int]
    ) -> tuple[kvwire.Outcome, list[tuple[int, int]]]:
        """Pull a prompt's KV; return the outcome, and the token ranges to compute."""
        pulled = blocks[: blocks_for(tokens)]
        inc = self._conn.pull(request, self._llama.cache, pulled, tokens=tokens)
        watching = asyncio.create_task(watch(inc, request, self._llama.cache))
        outcome = await inc
        at = time.monotonic()
        await watching
        asked = PrefillRequest(
            id=request, num_tokens=tokens, blocks=pulled, block_tokens=BLOCK_TOKENS
        )
        plan = plan_prefill([asked], {request: outcome})
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
        # The landed blocks may be read already. Decode also writes: to the blocks that
        # did not land, and to the last block, after the prompt.
        await inc.drained()
        return outcome, ranges

    async def _forward(self, tokens: list[int], sequence: Any) -> Forward:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compute, self._llama.forward, tokens, sequence
        )


async def watch(inc: kvwire.Incoming, request: str, cache: kvwire.PagedCache) -> None:
    """Report when each layer has landed, until one does not."""
    for layer in cache.spec.layer_indices:
        try:
            await inc.layer(layer)
        except kvwire.KVWireError:
            return
        say(LayerLanded(request, layer, time.monotonic()))
