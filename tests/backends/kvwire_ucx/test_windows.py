"""What a UCX lane makes of windows before anything is read; the rest is the kit's.

Both lanes are in this process here.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from kvwire.backend.gets import WindowRanges
from kvwire.backend.lane import Lane
from kvwire.backend.window import WindowMemory
from kvwire.errors import BackendUnavailable, ConnectionLost, ProtocolError
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire.types import OneSidedWindows
from kvwire_ucx import lane
from kvwire_ucx.windows import PORTION, UcxWindow
from tests.backends.kvwire_ucx.support import SHARED_MEMORY, TCP, needs_reading
from tests.backends.window_pairs import Pool, ended, pair, read
from tests.support.compiled import need_compiled, without_compiled

pytestmark = needs_reading


def ucx_pair(
    tls: str = SHARED_MEMORY, windows: OneSidedWindows = "peers"
) -> AbstractAsyncContextManager[tuple[Lane, Lane]]:
    return pair("ucx", {"TLS": tls}, windows)


@pytest.fixture(params=["compiled", "python"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over gets: in C, or in Python as where there is no compiler."""
    if request.param == "python":
        without_compiled(monkeypatch)
    else:
        need_compiled()


@pytest.mark.usefixtures("loops")
async def test_more_gets_than_a_portion() -> None:
    """They are posted bit by bit, and looked at after the last one."""
    pool = Pool(5 * PORTION)
    ids = np.arange(0, 5 * PORTION, 2)  # no two of them touch
    async with ucx_pair() as (owner, reader):
        window = reader.window(owner.expose(pool.memory), pool.memory)
        assert (await read(window.read(pool.batch(ids)))).all()
        assert (pool.mine[ids] == pool.data[ids]).all()
        assert not pool.mine[ids + 1].any()


async def test_a_peer_is_trusted_by_a_setting_only() -> None:
    pool = Pool(4)
    async with ucx_pair(windows="user") as (owner, reader):
        with pytest.raises(BackendUnavailable, match='one_sided_windows="peers"'):
            owner.expose(pool.memory)
        with pytest.raises(BackendUnavailable, match='one_sided_windows="peers"'):
            reader.window(b"", pool.memory)


async def test_what_ucx_would_read_by_messages_is_not_exposed() -> None:
    """Over TCP, where UCX ends the owner's process if the reader goes away."""
    pool = Pool(4)
    async with ucx_pair(TCP) as (owner, reader):
        with pytest.raises(BackendUnavailable, match=r"network card or cma.* tcp"):
            owner.expose(pool.memory)
        with pytest.raises(BackendUnavailable, match="network card or cma"):
            reader.window(b"\0\x0bkey of tcp.", pool.memory)


async def test_a_ucx_that_emulates_gets_reads_no_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(4)
    async with ucx_pair() as (owner, reader):
        description = owner.expose(pool.memory)
        monkeypatch.setattr(lane, "VERSION_MIN", (9, 0))
        with pytest.raises(
            BackendUnavailable, match=r"windows need UCX 9\.0, and this"
        ):
            owner.expose(pool.memory)
        with pytest.raises(BackendUnavailable, match=r"windows need UCX 9\.0"):
            reader.window(description, pool.memory)


async def test_a_lane_that_is_not_up_has_no_windows() -> None:
    pool = Pool(4)
    async with ucx_pair() as (owner, reader):
        description = owner.expose(pool.memory)
        window = reader.window(description, pool.memory)
        reader.abort()
        with pytest.raises(BackendUnavailable, match="the lane is not open"):
            reader.window(description, pool.memory)
        await ended(reader)
        with pytest.raises(ConnectionLost, match="has ended"):
            window.read(pool.batch([1]))
        window.close()


@pytest.mark.usefixtures("loops")
async def test_memory_that_the_owner_has_unmapped_ends_the_lane() -> None:
    """The kernel reads nothing of it, and UCX gives its endpoint up for that."""
    pool = Pool(4)
    async with ucx_pair() as (owner, reader):
        window = reader.window(owner.expose(pool.memory), pool.memory)
        assert isinstance(window, UcxWindow)
        unmapped = WindowMemory(spans=((4096, 64),), table=(4160, 8))
        window.ranges = WindowRanges(unmapped)
        batch = pool.batch([0])._replace(pieces_from=np.array([4096], np.uint64))
        with pytest.raises(ConnectionLost, match="can no longer be read"):
            await read(window.read(batch))
        assert not window.busy
        await ended(reader)
        assert not pool.mine.any()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_lane_that_ends_ends_its_reads(how: str) -> None:
    """When the future fails, nothing of this read touches memory any more."""
    pool = Pool(40 * PORTION)  # more than one turn of the loop moves
    ids = np.arange(0, 40 * PORTION, 2)
    async with ucx_pair() as (owner, reader):
        window = reader.window(owner.expose(pool.memory), pool.memory)
        found = window.read(pool.batch(ids))
        getattr(reader, how)()
        with pytest.raises(ConnectionLost):
            await read(found)
        assert not window.busy
        pool.mine[:] = 7
        await ended(reader)
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
    async with ucx_pair() as (_, reader):
        with pytest.raises(ProtocolError, match="key"):
            reader.window(description, pool.memory)


async def test_addresses_that_no_process_has() -> None:
    pool = Pool(4)
    memory = WindowMemory(spans=((2**63, 64),), table=pool.memory.table)
    async with ucx_pair() as (owner, reader):
        description = owner.expose(pool.memory)
        with pytest.raises(ProtocolError, match="a window with"):
            reader.window(description, memory)


async def test_a_window_in_too_many_pieces_is_not_exposed() -> None:
    """Nothing of it stays registered, and a window in one piece is."""
    count = DESCRIPTOR_BYTES_MAX // 8
    pool = Pool(2 * count)
    first, _ = pool.memory.spans[0]
    spans = tuple((first + 2 * at * 64, 64) for at in range(count))
    memory = WindowMemory(spans=spans, table=pool.memory.table)
    async with ucx_pair() as (owner, _):
        with pytest.raises(BackendUnavailable, match="allocate its tensors in one"):
            owner.expose(memory)
        assert owner.expose(pool.memory) == owner.expose(pool.memory)
