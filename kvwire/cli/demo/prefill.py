"""The prefill process: computes prompts, and publishes their KV while it computes.

The library's side of it is :func:`serve`. Publishing takes the blocks; prefill runs in
a thread and marks each layer as soon as it is written; finishing commits; the blocks
are free again once the transfer has drained.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import kvwire
from kvwire.cli.demo.free_list import FreeList
from kvwire.cli.demo.lines import (
    PATIENCE_S,
    LayerSpan,
    Prefill,
    Prefilled,
    Up,
    orders,
    say,
)
from kvwire.cli.demo.llama import BLOCK_TOKENS, Llama, blocks_for, load
from kvwire.integrations.marks import LayerMarks

NUM_BLOCKS = 256


async def run(library: str) -> None:
    """Take orders until standard input closes."""
    llama = load(library, NUM_BLOCKS)
    llama.warm_up()
    free = FreeList(NUM_BLOCKS, seed=1)
    # One prompt at a time: two at once on one core would only make both late.
    with ThreadPoolExecutor(1) as compute:
        async with (
            kvwire.open(name="prefill", handshake_timeout_s=PATIENCE_S) as comm,
            asyncio.TaskGroup() as tasks,
        ):
            say(Up("prefill", str(await comm.listen("127.0.0.1:0"))))
            async for order in orders():
                assert isinstance(order, Prefill)
                tasks.create_task(serve(order, comm, llama, free, compute))


async def serve(
    order: Prefill,
    comm: kvwire.Communicator,
    llama: Llama,
    free: FreeList,
    compute: ThreadPoolExecutor,
) -> None:
    """One prompt: publish, compute, commit, and wait until the blocks are free."""
    # The last token of a prompt is the first that decode computes.
    tokens = order.tokens[:-1]
    blocks = free.take(blocks_for(len(tokens)))
    # A layer of this small model is below the size at which layers travel alone.
    out = comm.publish(
        order.request, llama.cache, blocks, tokens=len(tokens), group_bytes=1
    )
    last_layer = llama.cache.spec.layer_indices[-1]
    marks = TimedMarks(out, order.lose, last_layer)
    loop = asyncio.get_running_loop()
    try:
        spans = await loop.run_in_executor(
            compute, prefill, llama, tokens, blocks, marks
        )
    except BaseException:
        out.abort("prefill failed")
        raise
    say(Prefilled(order.request, spans, marks.at))
    await out
    await out.drained()
    free.give_back(blocks)


def prefill(
    llama: Llama, tokens: list[int], blocks: list[int], marks: TimedMarks
) -> list[LayerSpan]:
    """Runs in the compute thread; the layers flow while it does."""
    on_written = LayerMarks(
        marks, len(tokens), BLOCK_TOKENS, last_layer=marks.last_layer
    )
    return llama.forward(tokens, llama.sequence(blocks, on_written=on_written)).spans


class TimedMarks:
    """Passes marks on, notes when, and keeps some blocks back on purpose.

    Args:
        out: The transfer.
        lose: Positions, first to before last, that are never marked.
        last_layer: The last layer of the model.

    Attributes:
        at: For each layer when it was marked.
        last_layer: With it the transfer is over.
    """

    def __init__(
        self, out: kvwire.Outgoing, lose: tuple[int, int], last_layer: int
    ) -> None:
        self._out = out
        self._lose = range(*lose)
        self.last_layer = last_layer
        self.at: list[float] = []

    def ready(self, *, layers: int, blocks: slice) -> None:
        """As Outgoing.ready, without the blocks that are to be lost."""
        # Before the mark: the layer may land before this thread goes on.
        self.at.append(time.monotonic())
        lose = self._lose
        for part in (
            slice(blocks.start, min(blocks.stop, lose.start)),
            slice(max(blocks.start, lose.stop), blocks.stop),
        ):
            if part.start < part.stop:
                self._out.ready(layers=layers, blocks=part)

    def finish(self) -> None:
        """As Outgoing.finish; with gaps where blocks are to be lost."""
        self._out.finish(partial=len(self._lose) > 0)
