"""Those who stand beside a store move the same bytes, and are found out otherwise."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.side import JoinedSide
from kvwire.cli.bench.store import (
    FIRST_PUT,
    FLUSHED_PUT,
    GET,
    LOOKUPS,
    MATCH,
    ONE,
    PUT,
    SETS,
    StoreWork,
    work_of,
)
from kvwire.limits import MIB
from tests.bench.store_pairs import BlockSocketsSide, TransferSide
from tests.bench.store_peers import CopySide, DictSide, FileSide, ObjectSide, PeerSide

HAS_OBSTORE = find_spec("obstore") is not None
if HAS_OBSTORE:
    import obstore.store

    # Its threads start with the first request of a process, and stay.
    obstore.put(obstore.store.MemoryStore(), "first", b"")

MADE: dict[str, type[PeerSide]] = {
    "memcpy": CopySide,
    "file": FileSide,
    "obstore": ObjectSide,
}


def work(verb: str, shape: str = "small") -> StoreWork:
    return work_of("any", verb, shape, 4 * MIB)


@pytest.mark.parametrize("name", MADE)
async def test_they_do_every_work(name: str, tmp_path: Path) -> None:
    if name == "obstore" and not HAS_OBSTORE:
        pytest.skip("obstore is not installed: pip install obstore")
    peer = MADE[name]({"place": str(tmp_path)})
    await peer.connect(None)
    try:
        for verb in (PUT, FIRST_PUT, FLUSHED_PUT, GET, ONE):
            # An object for each block: few.
            done = work(verb, "large" if name == "obstore" else "small")
            await peer.use(done, None)
            await peer.fill(done)
            for _ in range(SETS + 1):
                await peer.use(done, None)
                values = (await peer.drive(done))["values"]
                assert len(values) == (done.count if verb == ONE else 1)
                await peer.verify(done)
    finally:
        await peer.close()


@pytest.mark.parametrize("verb", [GET, ONE])
async def test_bytes_that_differ_are_found(verb: str) -> None:
    peer, done = CopySide({}), work(verb)
    await peer.use(done, None)
    await peer.drive(done)
    await peer.verify(done)
    peer.flat(done).want[peer.flat(done).blocks(done)[-1]] ^= 1
    with pytest.raises(RuntimeError, match="are not the bytes that were put"):
        await peer.verify(done)


async def test_a_file_goes_through_as_many_sets_as_a_disk_tier(tmp_path: Path) -> None:
    peer, done = FileSide({"place": str(tmp_path)}), work(PUT)
    try:
        for number in range(SETS + 1):
            await peer.use(done, None)
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
    table, done = DictSide({}), work(MATCH)
    await table.use(done, None)
    assert len((await table.drive(done))["values"]) == LOOKUPS


@pytest.mark.parametrize("verb", [PUT, GET, ONE])
async def test_transfers_do_every_work(verb: str) -> None:
    done = work(verb)
    pool_bytes = str(done.transfer.pool_bytes)
    options = {"transport": "tcp", "pool_bytes": pool_bytes}
    both = JoinedSide(TransferSide(options), TransferSide(options))
    try:
        await both.connect(None)
        await both.use(done, None)
        await both.fill(done)
        found = await both.drive(done)
        await both.digest(done)
        assert len(found["values"]) == (done.count if verb == ONE else 1)
        assert min(found["values"]) > 0
    finally:
        await both.close()


@pytest.mark.usefixtures("threads")
def test_sockets_do_every_work() -> None:
    """Each on a thread: they block their loops, which is why they are processes."""
    with Contender("sockets", BlockSocketsSide).start() as pair:
        for verb in (PUT, GET, ONE, MATCH):
            done = work(verb)
            pair.check(done)
            values = pair.round(done).values
            assert len(values) == {ONE: done.count, MATCH: LOOKUPS}.get(verb, 1)
            assert min(values) > 0
