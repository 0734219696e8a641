"""Those who stand beside a store move the same bytes, and are found out otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire.cli.bench.store_work import (
    FIRST_PUT,
    FLUSHED_PUT,
    GET,
    HASHES,
    LOOKUPS,
    MATCH,
    ONE,
    PUT,
    SETS,
    SHAPES,
    StoreWork,
    work_of,
)
from kvwire.limits import MIB
from tests.bench.store_halves import BlockSocketsHalf, TransferHalf
from tests.bench.store_peers import (
    CopySolo,
    DictSolo,
    FileSolo,
    ObjectSolo,
    PeerSolo,
)

HAS_OBSTORE = find_spec("obstore") is not None
if HAS_OBSTORE:
    import obstore.store

    # Its threads start with the first request of a process, and stay.
    obstore.put(obstore.store.MemoryStore(), "first", b"")

Result = Coroutine[Any, Any, dict[str, Any]]

MADE: dict[str, Callable[[Path], PeerSolo]] = {
    "memcpy": lambda _: CopySolo(),
    "file": lambda path: FileSolo(str(path)),
    "obstore": lambda path: ObjectSolo(str(path)),
}


def work(verb: str) -> StoreWork:
    return work_of("any", verb, SHAPES["small"], 4 * MIB)


@pytest.mark.parametrize("name", MADE)
async def test_they_do_every_work(name: str, tmp_path: Path) -> None:
    if name == "obstore" and not HAS_OBSTORE:
        pytest.skip("obstore is not installed: pip install obstore")
    peer = MADE[name](tmp_path)
    await peer.start()
    try:
        for verb in (PUT, FIRST_PUT, FLUSHED_PUT, GET, ONE):
            # An object for each block: few.
            shape = "large" if name == "obstore" else "small"
            done = work_of("any", verb, SHAPES[shape], 4 * MIB)
            checked = await peer.check(done)
            assert checked["sent"] == checked["arrived"]
            for _ in range(SETS + 1):
                await peer.prepare(done)
                values = (await peer.drive(done))["values"]
                assert len(values) == (done.count if verb == ONE else 1)
                await peer.verify(done)
    finally:
        await peer.close()


@pytest.mark.parametrize("verb", [GET, ONE])
async def test_bytes_that_differ_are_found(verb: str) -> None:
    peer, done = CopySolo(), work(verb)
    await peer.prepare(done)
    await peer.drive(done)
    await peer.verify(done)
    peer.flat(done).want[peer.flat(done).blocks(done)[-1]] ^= 1
    with pytest.raises(RuntimeError, match="are not the bytes that were put"):
        await peer.verify(done)


async def test_a_file_goes_through_as_many_sets_as_a_disk_tier(tmp_path: Path) -> None:
    peer, done = FileSolo(str(tmp_path)), work(PUT)
    try:
        for number in range(SETS + 1):
            await peer.prepare(done)
            peer.flat(done).have[:] = number
            await peer.drive(done)
        sets = np.fromfile(tmp_path / f"{done.nbytes}", np.uint8).reshape(
            SETS, done.set_bytes
        )
        assert sets[:, 0].tolist() == [SETS, 1, 2]
        assert (sets.min(axis=1) == sets.max(axis=1)).all()
    finally:
        await peer.close()


async def test_a_dict_finds_its_hashes() -> None:
    table, done = DictSolo(), work(MATCH)
    await table.start()
    assert await table.check(done) == {"sent": HASHES, "arrived": HASHES}
    assert len((await table.drive(done))["values"]) == LOOKUPS
    await table.close()


@pytest.mark.parametrize("verb", [PUT, GET, ONE])
async def test_transfers_do_every_work(verb: str) -> None:
    done = work(verb)
    pool_bytes = done.transfer.pool_bytes
    left, right = TransferHalf("tcp", pool_bytes), TransferHalf("tcp", pool_bytes)
    try:
        address = (await right.listen())["address"]
        await asyncio.gather(left.connect(address), right.accept())
        await asyncio.gather(left.use(done, {}), right.prepare(done))
        checked = await asyncio.gather(left.check_left(done), right.check_right(done))
        assert checked[0] == checked[1]
        served = asyncio.ensure_future(right.serve(done))
        found = await left.drive(done)
        await served
        assert len(found["values"]) == (done.count if verb == ONE else 1)
        assert min(found["values"]) > 0
    finally:
        await asyncio.gather(left.close(), right.close())


@pytest.mark.parametrize("verb", [PUT, GET, ONE, MATCH])
async def test_sockets_do_every_work(verb: str) -> None:
    left, right, done = BlockSocketsHalf(), BlockSocketsHalf(), work(verb)
    try:
        address = (await right.listen())["address"]
        await both(left.connect(address), right.accept())
        checked = await both(left.check_left(done), right.check_right(done))
        assert checked[0] == checked[1]
        found, _ = await both(left.drive(done), right.serve(done))
        assert len(found["values"]) == {ONE: done.count, MATCH: LOOKUPS}.get(verb, 1)
        assert min(found["values"]) > 0
        if verb != MATCH:
            assert len(left._memory(done)) == done.set_blocks
    finally:
        await asyncio.gather(left.close(), right.close())


async def both(left: Result, right: Result) -> tuple[Any, Any]:
    """Each on a thread: they block their loops, which is why they are processes."""
    threads = (asyncio.to_thread(asyncio.run, work) for work in (left, right))
    first, second = await asyncio.gather(*threads)
    return first, second
