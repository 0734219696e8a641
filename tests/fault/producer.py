"""A producer that marks half of its layers, and then computes for ever."""

from __future__ import annotations

import asyncio
import sys

import kvwire
from tests.support.caches import Memory


async def main(pushes: bool) -> None:
    async with kvwire.open(name="producer") as comm:
        print((await comm.listen("127.0.0.1:0")).port, flush=True)
        conn = await comm.accept()
        out = (conn.push if pushes else comm.publish)("x", Memory().cache, [0, 1])
        out.ready(layers=slice(0, 2))
        await out


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] == "push"))
