"""What a NIXL lane makes of windows before anything is read; see test_windows.py above.

Both lanes are in this process here.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.backend.window import WindowMemory
from kvwire.errors import BackendUnavailable, ConnectionLost, ProtocolError
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB
from kvwire_nixl.windows import PART_BYTES
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.window_pairs import Pool, ended, pair, read

pytestmark = needs_nixl


@pytest.mark.parametrize("run", [4 * KIB, 64 * KIB], ids=["staged", "in place"])
@pytest.mark.parametrize("client_owns", [False, True])
async def test_more_bytes_than_a_part(run: int, client_owns: bool) -> None:
    """All parts are read before the generations, whichever side had an address."""
    count = 5 * PART_BYTES // 2 // run
    pool = Pool(count, run)
    ids = np.arange(0, count, 2)  # no two of them touch
    async with pair("nixl", {}) as lanes:
        owner, reader = reversed(lanes) if client_owns else lanes
        window = reader.window(owner.expose(pool.memory), pool.memory)
        batch = pool.batch(ids)
        batch.generations[1] += np.uint64(1)
        landed = await read(window.read(batch))
        assert landed.tolist() == [at != 1 for at in range(ids.size)]
        assert (pool.mine[ids] == pool.data[ids]).all()
        assert not pool.mine[ids[:-1] + 1].any()


async def test_memory_in_place_may_be_that_of_a_payload() -> None:
    """It is registered twice, and the one does not end with the other."""
    pool = Pool(4, 64 * KIB)
    async with pair("nixl", {}) as (owner, reader):
        window = reader.window(owner.expose(pool.memory), pool.memory)
        owner.send(pool.data.data.cast("B"), 1)
        owner.conceal(pool.memory)
        again = reader.window(owner.expose(pool.memory), pool.memory)
        assert (await read(again.read(pool.batch([1])))).all()
        window.close()
        with pytest.raises(ConnectionLost, match="ended"):
            window.read(pool.batch([1]))


async def test_a_peer_is_trusted_by_settings_only() -> None:
    pool = Pool(4)
    async with pair("nixl", {}, "user") as (owner, reader):
        with pytest.raises(BackendUnavailable, match='one_sided_windows="peers"'):
            owner.expose(pool.memory)
        with pytest.raises(BackendUnavailable, match='one_sided_windows="peers"'):
            reader.window(b"", pool.memory)
    async with pair("nixl", {"expose": "staging"}) as (owner, _):
        with pytest.raises(BackendUnavailable, match='expose="caches"'):
            owner.expose(pool.memory)


async def test_a_lane_that_has_ended_has_no_windows() -> None:
    pool = Pool(4)
    async with pair("nixl", {}) as (owner, reader):
        description = owner.expose(pool.memory)
        window = reader.window(description, pool.memory)
        found = window.read(pool.batch([1]))
        reader.abort()
        with pytest.raises(BackendUnavailable, match="the lane is not open"):
            reader.window(description, pool.memory)
        with pytest.raises(ConnectionLost, match="has ended"):
            window.read(pool.batch([1]))
        with pytest.raises(ConnectionLost):
            await read(found)
        assert not window.busy
        await ended(reader)
        owner.conceal(pool.memory)


async def test_a_description_that_no_lane_makes() -> None:
    pool = Pool(4)
    other = WindowMemory(spans=pool.memory.spans, table=(8, 32))
    nowhere = WindowMemory(spans=((2**63, 64),), table=pool.memory.table)
    async with pair("nixl", {}) as (owner, reader):
        description = owner.expose(pool.memory)
        forged = bytes([description[0] ^ 1]) + description[1:]
        for bad in (b"", description[:-1], forged):
            with pytest.raises(ProtocolError, match="a descriptor"):
                reader.window(bad, pool.memory)
        with pytest.raises(ProtocolError, match="belongs to another window"):
            reader.window(description, other)
        with pytest.raises(ProtocolError, match="a window with"):
            reader.window(description, nowhere)


async def test_a_window_in_too_many_pieces_is_not_exposed() -> None:
    """And a window in one piece is, once."""
    count = DESCRIPTOR_BYTES_MAX // 64
    pool = Pool(2 * count)
    first, _ = pool.memory.spans[0]
    spans = tuple((first + 2 * at * 64, 64) for at in range(count))
    memory = WindowMemory(spans=spans, table=pool.memory.table)
    async with pair("nixl", {}) as (owner, _):
        with pytest.raises(BackendUnavailable, match="allocate its tensors in one"):
            owner.expose(memory)
        assert owner.expose(pool.memory) == owner.expose(pool.memory)
