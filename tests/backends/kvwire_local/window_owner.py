"""An owner in a process of its own that withdraws and overwrites blocks all the time.

Each word of a block is the block's generation, plus a number for its place. So a reader
that knows the ticket knows every word, and a word of an earlier or later life, of
another block or of another place is a different one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire.backend import WindowMemory, WindowReader
from kvwire.backend.lane import LaneContext
from kvwire.kv.fragments import Array
from kvwire.types import Role
from kvwire_local.lane import LocalLane
from tests.backends.kvwire_local.halves import SECRET, open_lane
from tests.backends.kvwire_local.window_rig import OwnersCache
from tests.backends.recorders import LaneRecorder
from tests.support.runs import Beside, beside

LAYERS = 4
BLOCKS = 4
RUN = 4096


class BusyOwner(Beside):
    """The reader's side of it.

    Attributes:
        memory: Its window.
        reader: A reader of that.
        offered: The generation of each block that the owner has offered last.
        recorder: What the reader's lane has told.
    """

    memory: WindowMemory
    reader: WindowReader
    offered: Array
    recorder: LaneRecorder

    async def gone(self) -> None:
        """Wait until the lane has noticed that it has ended."""
        await self.wait()
        await self.recorder.end()


@asynccontextmanager
async def busy_owner(folder: Path, *, in_arena: bool) -> AsyncIterator[BusyOwner]:
    """Start an owner, and open its window."""
    offered = np.memmap(folder / "offered", np.uint64, "w+", shape=(BLOCKS,))
    client = open_lane(Role.CLIENT)
    arguments = (
        SECRET.hex(),
        client.bootstrap.hex(),
        str(folder),
        "arena" if in_arena else "memory",
    )
    try:
        async with beside("-m", __name__, *arguments, kind=BusyOwner) as owner:
            said = json.loads(await owner.line())
            owner.offered = offered
            owner.recorder = LaneRecorder()
            await client.join(bytes.fromhex(said["bootstrap"]), owner.recorder)
            memory = WindowMemory(
                spans=tuple((first, nbytes) for first, nbytes in said["spans"]),
                table=tuple(said["table"]),
            )
            description = bytes.fromhex(said["description"])
            owner.memory = memory
            owner.reader = client.window(description, memory)
            await owner.reader.ready()
            assert await owner.line() == "busy"
            yield owner
            owner.reader.close()
    finally:
        client.abort()


def places(layer: int) -> Array:
    """What a block's words are, beside its generation."""
    words = np.arange(RUN // 8, dtype=np.uint64)
    return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(layer << 32)


async def _main(secret: str, bootstrap: str, folder: str, where: str) -> None:
    context = LaneContext(role=Role.SERVER, number=1, secret=bytes.fromhex(secret))
    lane = LocalLane(context)
    recorder = LaneRecorder()
    await lane.join(bytes.fromhex(bootstrap), recorder)
    cache = OwnersCache(LAYERS, BLOCKS, RUN, in_arena=where == "arena")
    offered = np.memmap(Path(folder, "offered"), np.uint64, "r+", shape=(BLOCKS,))
    said: dict[str, Any] = {
        "bootstrap": lane.bootstrap.hex(),
        "description": lane.expose(cache.memory).hex(),
        "spans": cache.memory.spans,
        "table": cache.memory.table,
    }
    print(json.dumps(said), flush=True)
    threading.Thread(target=_write, args=(cache, offered), daemon=True).start()
    await recorder.end()


def _write(cache: OwnersCache, offered: npt.NDArray[np.uint64]) -> None:
    """Withdraw a block, overwrite it, offer it again; and so on for ever."""
    ids = [np.array([block]) for block in range(BLOCKS)]
    numbers = [places(layer) for layer in range(LAYERS)]
    views = [layer.view(np.uint64) for layer in cache.layers]
    rounds = 0
    while True:
        for block in range(BLOCKS):
            cache.generations.renew(ids[block])
            generation = cache.generations.current(ids[block])
            for view, places_ in zip(views, numbers, strict=True):
                np.add(places_, generation, out=view[block])
            offered[block] = generation[0]
        rounds += 1
        if rounds == 1:
            print("busy", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
