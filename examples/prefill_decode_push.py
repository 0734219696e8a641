"""Push: prefill knows who will decode, and sends each layer as it is computed.

    python examples/prefill_decode_push.py

Here decode listens and prefill connects. Decode names the blocks for a request by
expecting it; the side that comes first waits for the other.
"""

from __future__ import annotations

import asyncio

import kvwire
from toy_model import Pool, ToyModel, blocks_for, text_of, tokens_of

PROMPT = tokens_of(
    "one block after the other, said the mouse, and none of them twice. "
)
NEW = 40


async def prefill(conn: kvwire.Connection, model: ToyModel) -> None:
    tokens = PROMPT[:-1]
    pool = Pool()
    blocks = blocks_for(len(tokens), first=20)
    async with conn.push("r1", pool.cache, blocks, tokens=len(tokens)) as out:
        await asyncio.to_thread(
            model.forward,
            tokens,
            pool,
            blocks,
            on_written=lambda layer, start, stop: out.ready(layers=layer),
        )
    outcome = await out
    print(f"prefill: {outcome.nbytes} bytes have landed at decode")
    await out.drained()  # from here on, the blocks are free


async def decode(comm: kvwire.Communicator, model: ToyModel) -> list[int]:
    tokens = len(PROMPT) - 1
    pool = Pool()
    blocks = blocks_for(len(PROMPT) + NEW)
    filled = blocks[: len(blocks_for(tokens))]
    inc = comm.expect("r1", pool.cache, filled, tokens=tokens)
    outcome = await inc
    assert outcome.complete
    await inc.drained()  # from here on, the blocks may also be written to
    return await asyncio.to_thread(model.decode, PROMPT, pool, blocks, NEW)


async def main() -> None:
    model = ToyModel()
    async with kvwire.open(name="prefill") as p, kvwire.open(name="decode") as d:
        conn = await p.connect(await d.listen("127.0.0.1:0"))
        _, new = await asyncio.gather(prefill(conn, model), decode(d, model))
    assert new == model.alone(PROMPT, NEW)
    print(f"decode writes {text_of(new)!r}, the same as one process alone")


if __name__ == "__main__":
    asyncio.run(main())
