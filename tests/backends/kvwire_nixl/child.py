"""A peer in a process of its own, with NIXL lanes; see tests/support/child.py."""

from __future__ import annotations

import asyncio
import sys

import kvwire
from kvwire_nixl.library import NixlAgent
from kvwire_nixl.settings import parse
from kvwire_ucx.library import answer
from tests.support.child import stay

# Another UCX is in the process, as behind any look at all transports; NIXL must not
# call that in the place of its own.
answer()
# Its first agent takes a process longer than a lane may on a busy machine.
NixlAgent(parse({}), "first").close()


async def _main(address: str, ping_interval_s: float) -> None:
    async with kvwire.open(name="child", ping_interval_s=ping_interval_s) as comm:
        await stay(await comm.connect(address, transport="nixl"))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
