"""A peer in a process of its own, with NIXL lanes; see tests/support/child.py."""

from __future__ import annotations

import asyncio
import sys

import kvwire
from tests.support.child import stay


async def _main(address: str, ping_interval_s: float) -> None:
    async with kvwire.open(name="child", ping_interval_s=ping_interval_s) as comm:
        await stay(await comm.connect(address, transport="nixl"))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
