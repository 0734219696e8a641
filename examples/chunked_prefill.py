"""Chunked prefill: blocks are sent by chunks, and a failure loses only its part.

    python examples/chunked_prefill.py

A chunk may end within a block; LayerMarks marks the block with the chunk that fills it.
In the second run, prefill stops after two of four chunks. Decode keeps the blocks that
arrived, and computes the rest: exactly the tokens that the plan names.
"""

from __future__ import annotations

import asyncio

import kvwire
from kvwire.kv.marks import LayerMarks
from toy_model import SPEC, Pool, ToyModel, blocks_for, text_of, tokens_of

PROMPT = tokens_of(
    "the rest of the prompt is as long as the part before it, and so. " * 3
)
CHUNK = 50
NEW = 40


async def prefill(
    comm: kvwire.Communicator, model: ToyModel, name: str, chunks: int
) -> None:
    """Compute and publish the first ``chunks`` chunks; others are never computed."""
    tokens = PROMPT[:-1]
    pool = Pool()
    blocks = blocks_for(len(tokens), first=20)
    out = comm.publish(name, pool.cache, blocks, tokens=len(tokens))
    marks = LayerMarks(out, len(tokens), SPEC.block_tokens)
    for start in range(0, min(len(tokens), chunks * CHUNK), CHUNK):
        chunk = tokens[start : start + CHUNK]
        await asyncio.to_thread(model.forward, chunk, pool, blocks, start, marks)
    # The marked parts are sent, even though others were never marked.
    out.finish(partial=True)
    await out
    await out.drained()


async def decode(conn: kvwire.Connection, model: ToyModel, name: str) -> list[int]:
    tokens = len(PROMPT) - 1
    pool = Pool()
    blocks = blocks_for(len(PROMPT) + NEW)
    filled = blocks[: len(blocks_for(tokens))]
    inc = conn.pull(name, pool.cache, filled, tokens=tokens)
    outcome = await inc
    print(f"{name}: {len(outcome.landed)} of {len(filled)} blocks arrived")
    request = kvwire.PrefillRequest(
        id=name, num_tokens=tokens, blocks=filled, block_tokens=SPEC.block_tokens
    )
    plan = kvwire.plan_prefill([request], {name: outcome})
    await inc.drained()  # from here on, the blocks may also be written to
    for start, stop in plan.prefill.get(name, ()):
        print(f"{name}: decode computes tokens {start} to {stop - 1}")
        missing = PROMPT[start:stop]
        await asyncio.to_thread(model.forward, missing, pool, blocks, start)
    return await asyncio.to_thread(model.decode, PROMPT, pool, blocks, NEW)


async def main() -> None:
    model = ToyModel()
    alone = model.alone(PROMPT, NEW)
    async with kvwire.open(name="prefill") as p, kvwire.open(name="decode") as d:
        conn = await d.connect(await p.listen("127.0.0.1:0"))
        for name, chunks in (("whole", 4), ("broken", 2)):
            _, new = await asyncio.gather(
                prefill(p, model, name, chunks), decode(conn, model, name)
            )
            assert new == alone
            print(
                f"{name}: decode writes {text_of(new)!r}, the same as one process alone"
            )


if __name__ == "__main__":
    asyncio.run(main())
