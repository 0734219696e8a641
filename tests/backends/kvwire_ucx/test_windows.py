"""What a UCX lane makes of windows before anything is read; see test_windows.py above.

Both lanes are in this process here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvwire.backend.lane import LaneContext
from kvwire.backend.window import BlockRead, WindowMemory
from kvwire.errors import BackendUnavailable, ConnectionLost, ProtocolError
from kvwire.kv.blocks import Bits
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire.types import OneSidedWindows, Role
from kvwire_ucx import UcxBackend
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.windows import PORTION
from tests.backends.kvwire_ucx.support import SHARED_MEMORY, TCP, needs_reading
from tests.backends.recorders import LaneRecorder

pytestmark = needs_reading

RUN = 64


@asynccontextmanager
async def pair(
    tls: str = SHARED_MEMORY, windows: OneSidedWindows = "peers"
) -> AsyncIterator[tuple[UcxLane, UcxLane]]:
    """An owner's lane and a reader's."""
    backend = UcxBackend()
    lanes = []
    for role in (Role.SERVER, Role.CLIENT):
        made = backend.open_lane(
            LaneContext(
                role=role,
                number=1,
                secret=bytes(32),
                settings={"TLS": tls},
                windows=windows,
            )
        )
        assert isinstance(made, UcxLane)
        lanes.append(made)
    owner, reader = lanes
    await owner.join(reader.bootstrap, LaneRecorder())
    await reader.join(owner.bootstrap, LaneRecorder())
    try:
        yield owner, reader
    finally:
        await backend.aclose()


class Pool:
    """Blocks of one tensor, their table, and memory to read them to."""

    def __init__(self, blocks: int) -> None:
        self.data = np.random.default_rng(1).integers(0, 256, (blocks, RUN), np.uint8)
        self.table = np.arange(1, blocks + 1, dtype=np.uint64)
        self.mine = np.zeros_like(self.data)
        self.memory = WindowMemory(
            spans=((start(self.data), self.data.nbytes),),
            table=(start(self.table), self.table.nbytes),
        )

    def batch(self, ids: Any, **changes: Any) -> BlockRead:
        ids = np.asarray(ids, np.uint64)
        offsets = ids * np.uint64(RUN)
        made = BlockRead(
            pieces_from=np.array([start(self.data)], np.uint64),
            pieces_to=np.array([start(self.mine)], np.uint64),
            run=RUN,
            offsets_from=offsets,
            offsets_to=offsets,
            entries=ids,
            generations=ids + np.uint64(1),
            per_block=1,
            owner=self.mine,
        )
        return made._replace(**changes)


def start(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


async def test_more_gets_than_a_portion() -> None:
    """They are posted bit by bit, and looked at after the last one."""
    pool = Pool(5 * PORTION)
    ids = np.arange(0, 5 * PORTION, 2)  # no two of them touch
    async with pair() as (owner, reader):
        window = reader.window(owner.expose(pool.memory), pool.memory)
        assert (await read(window.read(pool.batch(ids)))).all()
        assert (pool.mine[ids] == pool.data[ids]).all()
        assert not pool.mine[ids + 1].any()


async def test_a_peer_is_trusted_by_a_setting_only() -> None:
    pool = Pool(4)
    async with pair(windows="user") as (owner, reader):
        with pytest.raises(BackendUnavailable, match='one_sided_windows="peers"'):
            owner.expose(pool.memory)
        with pytest.raises(BackendUnavailable, match='one_sided_windows="peers"'):
            reader.window(b"", pool.memory)


async def test_what_ucx_would_read_by_messages_is_not_exposed() -> None:
    """Over TCP, where UCX ends the owner's process if the reader goes away."""
    pool = Pool(4)
    async with pair(TCP) as (owner, reader):
        with pytest.raises(BackendUnavailable, match=r"network card or cma.* tcp"):
            owner.expose(pool.memory)
        with pytest.raises(BackendUnavailable, match="network card or cma"):
            reader.window(b"\0\x0bkey of tcp.", pool.memory)


async def test_a_lane_that_is_not_up_has_no_windows() -> None:
    pool = Pool(4)
    async with pair() as (owner, reader):
        description = owner.expose(pool.memory)
        window = reader.window(description, pool.memory)
        reader.abort()
        with pytest.raises(BackendUnavailable, match="not up"):
            reader.window(description, pool.memory)
        await reader.ended
        with pytest.raises(ConnectionLost, match="has ended"):
            window.read(pool.batch([1]))
        window.close()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_lane_that_ends_ends_its_reads(how: str) -> None:
    """When the future fails, nothing of this read touches memory any more."""
    pool = Pool(4 * PORTION)
    ids = np.arange(0, 4 * PORTION, 2)
    async with pair() as (owner, reader):
        window = reader.window(owner.expose(pool.memory), pool.memory)
        found = window.read(pool.batch(ids))
        getattr(reader, how)()
        with pytest.raises(ConnectionLost):
            await read(found)
        assert not window.busy
        pool.mine[:] = 7
        await reader.ended
        assert (pool.mine == 7).all()


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\0",
        b"\0\0",
        b"\0\5key",
        b"\0\3key",
        b"\0\3key" * 3,
        b"\0\3key\0\3key\0",
        b"\xff\xff" + b"k" * 2000,
        b"\0\3key\x03\xe9" + b"k" * 1001,
    ],
)
async def test_a_description_that_no_lane_makes(description: bytes) -> None:
    pool = Pool(4)
    async with pair() as (_, reader):
        with pytest.raises(ProtocolError, match="key"):
            reader.window(description, pool.memory)


async def test_addresses_that_no_process_has() -> None:
    pool = Pool(4)
    memory = WindowMemory(spans=((2**63, RUN),), table=pool.memory.table)
    async with pair() as (owner, reader):
        description = owner.expose(pool.memory)
        with pytest.raises(ProtocolError, match="a window with"):
            reader.window(description, memory)


async def test_a_window_in_too_many_pieces_is_not_exposed() -> None:
    """Nothing of it stays registered, and a window in one piece is."""
    count = DESCRIPTOR_BYTES_MAX // 8
    pool = Pool(2 * count)
    first, _ = pool.memory.spans[0]
    spans = tuple((first + 2 * at * RUN, RUN) for at in range(count))
    memory = WindowMemory(spans=spans, table=pool.memory.table)
    async with pair() as (owner, _):
        with pytest.raises(BackendUnavailable, match="allocate its tensors in one"):
            owner.expose(memory)
        assert owner.expose(pool.memory) == owner.expose(pool.memory)


async def read(found: Bits | asyncio.Future[Bits]) -> Bits:
    assert isinstance(found, asyncio.Future)
    return await found
