"""Windows over UCX, whose lanes get ranges of memory, from another process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import ConnectionLost
from tests.backends.kvwire_ucx import support as ucx
from tests.backends.window_owner import BLOCKS, Owner, owner
from tests.support.pairs import turns, until

# A reader without the second look is wrong within the first hundreds of blocks.
BELIEVED_MAX = 200_000


pytestmark = ucx.needs_reading


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[Owner]:
    async with owner("ucx", {"TLS": ucx.SHARED_MEMORY}, tmp_path) as made:
        yield made


async def test_scattered_blocks_go_where_they_belong(there: Owner) -> None:
    blocks = [5, 6, 7, 40, 0, 63, 21]
    batch = there.batch(blocks, into=[10, 11, 12, 3, 1, 0, 50])
    assert (await there.read(batch)).tolist() == [True] * len(blocks)
    assert not there.wrong(batch).any()
    untouched = np.setdiff1d(np.arange(BLOCKS), [10, 11, 12, 3, 1, 0, 50])
    assert not any(one[untouched].any() for one in there.mine)


async def test_a_block_withdrawn_or_guessed_has_not_landed(there: Owner) -> None:
    tickets = there.board[:3].copy()
    tickets[1] += 1
    batch = there.batch([0, 1, 2], tickets)
    assert (await there.read(batch)).tolist() == [True, False, True]
    await there.do("withdraw")
    assert not (await there.read(there.batch([0, 1, 2]))).any()


async def test_what_lies_outside_is_not_read(there: Owner) -> None:
    """Its blocks have not landed; the others of the batch have."""
    blocks = [3, BLOCKS, 4, 2**40]
    batch = there.batch(blocks, np.ones(4, np.uint64), into=[3, 9, 4, 10])
    batch = batch._replace(generations=there.board[[3, 0, 4, 0]])
    assert (await there.read(batch)).tolist() == [True, False, True, False]
    inside = batch._replace(entries=np.array([3, 0, 4, 0], np.uint64))
    assert (await there.read(inside)).tolist() == [True, False, True, False]
    assert not any(one[[9, 10]].any() for one in there.mine)


async def test_an_empty_batch_is_over_as_any(there: Owner) -> None:
    assert not (await there.read(there.batch([]))).size


@pytest.mark.parametrize(
    "blocks", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
async def test_nothing_torn_or_stale_is_reported_as_landed(
    there: Owner, blocks: int
) -> None:
    """Beside an owner that takes back, writes and offers all the time."""
    await there.do("churn")
    seen = await there.watch(blocks)
    print(f"{there.window.way}: {seen}")
    assert seen.landed
    assert seen.missing
    assert not seen.wrong


async def test_a_reader_without_a_second_look_is_found(there: Owner) -> None:
    await there.do("churn")
    assert (await there.watch(BELIEVED_MAX, believing=True)).wrong


async def test_an_owner_that_is_killed_ends_its_readers(there: Owner) -> None:
    """Reads in flight end, and touch nothing from then on."""
    reads = asyncio.create_task(there.read_all(8))
    await turns(3)
    there.signal(signal.SIGKILL)
    await there.wait()
    await reads
    assert not there.window.busy
    for one in there.mine:
        one[:] = 0
    with pytest.raises(ConnectionLost):
        await there.read(there.batch([1]))
    await there.handler.end()
    with pytest.raises(ConnectionLost, match="has ended"):
        await there.read(there.batch([1]))
    assert not any(one.any() for one in there.mine)


async def test_a_window_may_be_concealed_while_it_is_read(there: Owner) -> None:
    """Each block is right or has not landed; the other end goes on."""
    reads = asyncio.create_task(there.read_all(8))
    await turns(3)
    await there.do("conceal")
    assert all(isinstance(end, (np.ndarray, ConnectionLost)) for end in await reads)
    assert not there.window.busy
    await there.do("expose")


async def test_a_closed_reader_is_quiet_once_its_reads_are_over(there: Owner) -> None:
    read = there.window.read(there.batch(list(range(BLOCKS))))
    there.window.close()
    assert isinstance(read, asyncio.Future)
    assert there.window.busy
    with pytest.raises(ConnectionLost):
        there.window.read(there.batch([1]))
    read.cancel()
    await until(lambda: not there.window.busy)
