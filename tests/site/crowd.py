"""A process with a thousand transfers and a peer whose names are markup.

``python -m tests.site.crowd FOLDER NUMBER`` prints a line when it has them.
"""

from __future__ import annotations

import asyncio
import sys

import kvwire
from tests.support.caches import Memory

HOSTILE = "<img src=x onerror=document.title='taken'>"


async def crowd(folder: str, number: int) -> None:
    """Open the transfers, and wait to be killed."""
    async with (
        kvwire.open(name=f"{HOSTILE}a", inspect=folder) as there,
        kvwire.open(name=f"<script>{HOSTILE}</script>") as here,
    ):
        connection = await here.connect(await there.listen("127.0.0.1:0"))
        cache = Memory().cache
        kept = [
            there.publish(f"{HOSTILE} {at}", cache, [0], lease_s=3600)
            for at in range(number)
        ]
        kept[0].ready(layers=0)
        inc = connection.pull(f"{HOSTILE} 0", Memory().cache, [0])
        await inc.layer(0)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(crowd(sys.argv[1], int(sys.argv[2])))
