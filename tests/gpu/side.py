"""One of two processes that share a GPU: ``python -m tests.gpu.side``.

The consumer listens and prints its address; the producer gets it as an argument. Both
print, at last, the transport and how their transfers ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import kvwire
from kvwire import KVSpec, PagedCache

LAYERS, BLOCKS, TRANSFERS = 4, 64, 3
SHAPE = (BLOCKS, 2, 16, 8, 128)
SPEC = KVSpec(layers=LAYERS, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")
# Runs and single blocks, so that a chunk is a payload of one piece or of many.
SOURCE = [*range(3, 40), 63, 1, 50]
TARGET = [*range(20, 57), 0, 62, 2]


def caches(fill: int) -> list[Any]:
    import torch

    return [torch.full(SHAPE, fill, dtype=torch.float16).cuda() for _ in range(LAYERS)]


async def consume(comm: kvwire.Communicator) -> str:
    print(await comm.listen("127.0.0.1:0"), flush=True)
    connection = await comm.accept()
    for number in range(TRANSFERS):
        target = caches(0)
        inc = comm.expect(number, PagedCache(SPEC, target), TARGET)
        outcome = await inc
        assert outcome.complete, outcome.missing
        await inc.drained()
        for layer, tensor in enumerate(target):
            for at, block in enumerate(SOURCE):
                values = tensor[TARGET[at]]
                assert (values == block + layer + number).all(), (layer, block, values)
            free = [block for block in range(BLOCKS) if block not in TARGET]
            assert not tensor[free].any()
    await connection.send(1, b"seen")
    return connection.transport


async def produce(comm: kvwire.Communicator, address: str, transport: str) -> str:
    import torch

    connection = await comm.connect(address, transport=transport)
    rows = torch.arange(BLOCKS, dtype=torch.float16).cuda()[:, None, None, None, None]
    for number in range(TRANSFERS):
        source = caches(0)
        cache = PagedCache(SPEC, source)
        async with connection.push(number, cache, SOURCE) as out:
            for layer, tensor in enumerate(source):
                tensor.copy_((rows + layer + number).expand_as(tensor))
                written = torch.cuda.Event()
                written.record()
                out.ready(layers=layer, after=written)
        assert (await out).complete
        await out.drained()
    assert bytes(await connection.recv(1)) == b"seen"
    return connection.transport


async def main(transport: str, address: str) -> None:
    limits = {"start_timeout_s": "30", "move_timeout_s": "30"}
    async with kvwire.open(backends={"nccl": limits}) as comm:
        done = produce(comm, address, transport) if address else consume(comm)
        print(await done)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
