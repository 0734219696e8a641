"""Pull: decode requests the KV of a prompt, and gets each layer as it is computed.

    python examples/prefill_decode_pull.py

Both roles run in this one process; the code is the same for two processes or two hosts.
"""

from __future__ import annotations

import asyncio

import kvwire
from toy_model import SPEC, Pool, ToyModel, blocks_for, text_of, tokens_of

PROMPT = tokens_of(
    "one block after the other, said the mouse, and none of them twice. "
)
NEW = 40


async def prefill(comm: kvwire.Communicator, model: ToyModel) -> None:
    # Decode computes the prompt's last token, because it needs that token's output.
    tokens = PROMPT[:-1]
    pool = Pool()
    blocks = blocks_for(len(tokens), first=20)
    async with comm.publish("r1", pool.cache, blocks, tokens=len(tokens)) as out:
        await asyncio.to_thread(
            model.forward,
            tokens,
            pool,
            blocks,
            on_written=lambda layer, start, stop: out.ready(layers=layer),
        )
    await out
    await out.drained()  # from here on, the blocks are free


async def decode(conn: kvwire.Connection, model: ToyModel) -> list[int]:
    tokens = len(PROMPT) - 1
    pool = Pool()
    blocks = blocks_for(len(PROMPT) + NEW)
    filled = blocks[: len(blocks_for(tokens))]
    inc = conn.pull("r1", pool.cache, filled, tokens=tokens)
    for layer in SPEC.layer_indices:
        await inc.layer(layer)
        print(f"layer {layer} has landed")
    outcome = await inc
    assert outcome.complete
    await inc.drained()  # from here on, the blocks may also be written to
    return await asyncio.to_thread(model.decode, PROMPT, pool, blocks, NEW)


async def main() -> None:
    model = ToyModel()
    async with kvwire.open(name="prefill") as p, kvwire.open(name="decode") as d:
        conn = await d.connect(await p.listen("127.0.0.1:0"))
        _, new = await asyncio.gather(prefill(p, model), decode(conn, model))
    assert new == model.alone(PROMPT, NEW)
    print(f"decode writes {text_of(new)!r}, the same as one process alone")


if __name__ == "__main__":
    asyncio.run(main())
