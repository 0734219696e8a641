"""A process whose GPU fails under a transfer: ``python -m tests.gpu.broken``."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

import kvwire
from kvwire import KVSpec, PagedCache

_SHAPE = (64, 2, 16, 8, 128)
_SPEC = KVSpec(layers=2, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")


async def main() -> None:
    """A kernel reads beyond its array, behind which a layer is marked."""
    source: list[Any] = [
        torch.zeros(_SHAPE, dtype=torch.float16).cuda() for _ in range(2)
    ]
    target = [torch.zeros(_SHAPE, dtype=torch.float16) for _ in range(2)]
    far = torch.full((1 << 16,), 1 << 40).cuda()
    torch.cuda.synchronize()
    async with kvwire.open() as near, kvwire.open() as other:
        address = await other.listen("127.0.0.1:0")
        connection = await near.connect(address)
        inc = connection.pull("t", PagedCache(_SPEC, target), range(64))
        async with other.publish("t", PagedCache(_SPEC, source), range(64)) as out:
            out.ready(layers=0)
            await inc.layer(0)
            source[1].view(-1).index_select(0, far)
            event = torch.cuda.Event()
            event.record()
            out.ready(layers=1, after=event)
        outcome = await inc
        print("complete" if outcome.complete else outcome.missing)
        print((await out).complete)
        await inc.drained()
        print(out.is_drained)
        again = connection.pull("u", PagedCache(_SPEC, target), range(64))
        async with other.publish("u", PagedCache(_SPEC, source), range(64)) as more:
            more.ready()
        outcome = await again
        print("complete" if outcome.complete else outcome.missing)
        # The connection ended with the device's failure, and no other does.
        anew = await near.connect(address)
        await anew.send(1, b"alive")
        for end in (await other.accept(), await other.accept()):
            if not end.closed:
                print(bytes(await end.recv(1)).decode())


if __name__ == "__main__":
    asyncio.run(main())
