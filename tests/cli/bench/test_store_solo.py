"""The process with a store: what it moves is compared, and comes from its tier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvwire
from kvwire.cli.bench.sides.store_server import StoreServerSide
from kvwire.cli.bench.sides.store_solo import StoreSolo
from kvwire.cli.bench.store_work import (
    DISK,
    FIRST_PUT,
    FLUSHED_PUT,
    GET,
    LOOKUPS,
    MATCH,
    MEMORY,
    ONE,
    PUT,
    SERVER,
    SHAPES,
    StoreWork,
    work_of,
)
from kvwire.kv.blocks import Ids
from kvwire.limits import MIB
from kvwire.store.index import Index, Keys


def work(verb: str, tier: str = DISK) -> StoreWork:
    return work_of(tier, verb, SHAPES["small"], 4 * MIB)


@pytest.fixture
async def solo(tmp_path: Path) -> AsyncIterator[StoreSolo]:
    """With a disk tier."""
    found = StoreSolo(DISK, str(tmp_path))
    yield found
    await found.close()


@pytest.mark.parametrize("verb", [PUT, FLUSHED_PUT, GET, ONE, MATCH])
async def test_every_round_can_follow_every_other(solo: StoreSolo, verb: str) -> None:
    for done in (work(PUT), work(verb), work(verb), work(GET)):
        await solo.prepare(done)
        if done.verb == PUT:
            checked = await solo.check(done)
            assert checked["sent"] == checked["arrived"]
        values = (await solo.drive(done))["values"]
        await solo.verify(done)
        expected = {ONE: done.count, MATCH: LOOKUPS}.get(done.verb, 1)
        assert len(values) == expected
        assert min(values) > 0


async def test_memory_that_nobody_has_written_to_is_that_of_a_store_of_its_own() -> (
    None
):
    solo = StoreSolo(MEMORY, "")
    done = work(FIRST_PUT, MEMORY)
    try:
        for _ in range(2):
            await solo.prepare(done)
            new = solo._stocks[done.nbytes]._new
            assert new is not None
            await solo.drive(done)
            assert new.stats()[new.name].blocks == done.count
            await solo.verify(done)
            assert solo._stocks[done.nbytes]._new is None
            with pytest.raises(kvwire.ClosedOK):
                await new.match([b"1"])
    finally:
        await solo.close()


async def test_a_store_of_its_own_that_nobody_has_put_into_is_closed_too() -> None:
    """A check is prepared like a round and puts elsewhere; then a round is prepared."""
    solo = StoreSolo(MEMORY, "")
    done = work(FIRST_PUT, MEMORY)
    made = []
    try:
        for _ in range(2):
            await solo.prepare(done)
            made.append(solo._stocks[done.nbytes]._new)
    finally:
        await solo.close()
    for new in made:
        assert new is not None
        with pytest.raises(kvwire.ClosedOK):
            await new.match([b"1"])


async def test_a_server_is_a_tier_too() -> None:
    server, solo = StoreServerSide(), StoreSolo(SERVER, "")
    done = work(GET, SERVER)
    try:
        address = (await server.prepare(done))["address"]
        assert (await server.prepare(done))["address"] == address
        await solo.prepare(done, address=address)
        checked = await solo.check(done)
        assert checked["sent"] == checked["arrived"]
    finally:
        await solo.close()
        await server.close()


async def test_what_is_matched_is_never_in_the_memory_in_front(solo: StoreSolo) -> None:
    done = work(MATCH)
    await solo.prepare(done)
    await solo.check(done)
    memory = solo._stocks[done.nbytes]._store._tiers.memory
    find, found = Index.find, set()

    def watched(index: Index, keys: Keys) -> Ids:
        slots = find(index, keys)
        if index is memory.index:
            found.add(int((slots >= 0).sum()))
        return slots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Index, "find", watched)
        for _ in range(3):
            await solo.prepare(done)
            await solo.drive(done)
    assert found == {0}


async def test_bytes_that_differ_are_found(solo: StoreSolo) -> None:
    done = work(GET)
    await solo.prepare(done)
    await solo.drive(done)
    await solo.verify(done)
    stock = solo._stocks[done.nbytes]
    stock.want.memory[stock.want.blocks[-1] * done.layer_bytes] ^= 1
    with pytest.raises(RuntimeError, match="are not the bytes that were put"):
        await solo.verify(done)
    # The first block alone is as it should be.
    await solo.verify(replace(done, verb=ONE, count=1))


async def test_what_comes_from_memory_is_no_measure_of_a_disk(solo: StoreSolo) -> None:
    done = work(GET)
    await solo.prepare(done)
    await solo.drive(done)
    stock = solo._stocks[done.nbytes]
    stock._sets.next()  # the set that is in memory now is next
    with pytest.raises(RuntimeError, match=r"\d+ of 64 blocks came from the tier"):
        await solo.drive(done)


async def test_blocks_that_are_missing_are_an_error(solo: StoreSolo) -> None:
    done = work(GET)
    await solo.prepare(done)
    for _ in range(2):
        solo._stocks[done.nbytes]._sets.add([bytes(32)] * done.set_blocks)
    with pytest.raises(RuntimeError, match="64 blocks are missing: it is not in"):
        await solo.drive(done)
