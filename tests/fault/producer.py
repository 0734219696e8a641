"""A producer that marks half of its layers, and then computes for ever."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import kvwire

SPEC = kvwire.KVSpec(layers=4, kv_heads=1, head_dim=64, block_tokens=2, dtype="float32")


def cache() -> kvwire.PagedCache:
    return kvwire.PagedCache(SPEC, [np.ones((4, 2, 2, 1, 64), "f4") for _ in range(4)])


async def main(pushes: bool) -> None:
    async with kvwire.open(name="producer") as comm:
        print((await comm.listen("127.0.0.1:0")).port, flush=True)
        conn = await comm.accept()
        out = (conn.push if pushes else comm.publish)("x", cache(), [0, 1])
        out.ready(layers=slice(0, 2))
        await out


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] == "push"))
