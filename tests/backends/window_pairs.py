"""Two lanes of this process, and blocks that the one exposes to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kvwire.backend import registry
from kvwire.backend.lane import Lane, LaneContext
from kvwire.backend.window import BlockRead, WindowMemory
from kvwire.kv.blocks import Bits
from kvwire.types import OneSidedWindows, Role
from tests.backends.recorders import LaneRecorder


@asynccontextmanager
async def pair(
    scheme: str, settings: Mapping[str, str], windows: OneSidedWindows = "peers"
) -> AsyncIterator[tuple[Lane, Lane]]:
    """An owner's lane and a reader's."""
    backend = registry.load(scheme)()
    owner, reader = (
        backend.open_lane(
            LaneContext(
                role=role,
                number=1,
                secret=bytes(32),
                settings=settings,
                windows=windows,
            )
        )
        for role in (Role.SERVER, Role.CLIENT)
    )
    try:
        await owner.join(reader.bootstrap, LaneRecorder())
        await reader.join(owner.bootstrap, LaneRecorder())
        yield owner, reader
    finally:
        await backend.aclose()


class Pool:
    """Blocks of one tensor, their table, and memory to read them to."""

    def __init__(self, blocks: int, run: int = 64) -> None:
        rng = np.random.default_rng(1)
        self.run = run
        self.data = rng.integers(0, 256, (blocks, run), np.uint8)
        self.table = np.arange(1, blocks + 1, dtype=np.uint64)
        self.mine = np.zeros_like(self.data)
        self.memory = WindowMemory(
            spans=((start(self.data), self.data.nbytes),),
            table=(start(self.table), self.table.nbytes),
        )

    def batch(self, ids: Any) -> BlockRead:
        """Blocks, each to its own place here."""
        ids = np.asarray(ids, np.uint64)
        offsets = ids * np.uint64(self.run)
        return BlockRead(
            pieces_from=np.array([start(self.data)], np.uint64),
            pieces_to=np.array([start(self.mine)], np.uint64),
            run=self.run,
            offsets_from=offsets,
            offsets_to=offsets,
            entries=ids,
            generations=ids + np.uint64(1),
            per_block=1,
            owner=self.mine,
        )


def start(array: Any) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])


async def read(found: Bits | asyncio.Future[Bits]) -> Bits:
    """What a read that was begun comes to."""
    assert isinstance(found, asyncio.Future)
    return await found


async def ended(lane: Any) -> None:
    """Wait until a lane touches no memory any more."""
    await lane.ended
