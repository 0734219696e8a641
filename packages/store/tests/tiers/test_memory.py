"""The memory tier: who gets slots, who waits for them, and what a demotion keeps."""

from __future__ import annotations

import asyncio
import logging
import mmap
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.kv.blocks import Bits, Ids
from kvwire.limits import KIB, MIB
from kvwire_store import BlockStore
from kvwire_store.index import Index
from kvwire_store.keys import IndexedSlots, Keys, as_keys
from kvwire_store.tiers.memory import InFlightFills, MemoryTier
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs
from tests.support import inside
from tests.support.caches import chain
from tests.support.pairs import turns

SLOTS = 16
BYTES = GRAIN_BYTES - 96
"""Of a block: less than its slot."""


class Below:
    """What takes blocks that leave memory; a test says how."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.before: Callable[[], Awaitable[object]] | None = None
        self.error = ""

    async def demote(self, named: IndexedSlots) -> str:
        if self.before is not None:
            await self.before()
        self.given += named.keys.tolist()
        return self.error

    def known_kept(self, keys: Keys, slots: Ids) -> Bits:
        return np.zeros(keys.size, np.bool_)


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.fixture
def memory(below: Below) -> Iterator[MemoryTier]:
    made = MemoryTier(Index(Slabs(1, SLOTS * GRAIN_BYTES)), below)
    yield made
    made.close()


def name(memory: MemoryTier, keys: Keys, slots: Ids) -> None:
    memory.index.name(keys, slots)
    memory.unpin(slots)


async def full(memory: MemoryTier) -> Keys:
    keys = as_keys(chain(SLOTS))
    slots = memory.index.take(BYTES, SLOTS)
    assert slots.size == SLOTS
    name(memory, keys, slots)
    return keys


async def some_turns() -> None:
    """As many as whatever can go on needs to go on."""
    await turns(4)


# --- slots ----------------------------------------------------------------------------


async def test_who_waits_is_woken_by_a_slot(memory: MemoryTier) -> None:
    """However it becomes free: given back, or named and let go of."""
    keys = as_keys(chain(SLOTS))
    taken = await memory.take(BYTES, SLOTS)
    waiting = [asyncio.create_task(memory.take(BYTES, 1)) for _ in range(2)]
    await some_turns()
    assert not any(task.done() for task in waiting)
    memory.give_back(taken[:1])
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [task.done() for task in waiting] == [True, False]
    name(memory, keys[1:2], taken[1:2])
    await asyncio.wait(waiting)
    slots = sorted(int(task.result()[0]) for task in waiting)
    assert slots == taken[:2].tolist()
    assert memory.index.find(keys[1:2]) < 0
    memory.give_back(np.array(slots))
    memory.give_back(taken[2:])
    await memory.settle()


async def test_a_part_of_what_is_wanted_is_given_at_once(memory: MemoryTier) -> None:
    first = await memory.take(BYTES, SLOTS - 3)
    rest = await memory.take(BYTES, SLOTS)
    assert rest.size == 3
    assert np.intersect1d(first, rest).size == 0
    memory.give_back(first)
    memory.give_back(rest)
    await memory.settle()


# --- evicting -------------------------------------------------------------------------


async def test_what_is_used_meanwhile_stays(memory: MemoryTier, below: Below) -> None:
    keys = await full(memory)
    gate = asyncio.Event()
    below.before = gate.wait
    taking = asyncio.create_task(memory.take(BYTES, 1))
    await some_turns()
    # The tail goes first; somebody reads it while it is on its way down.
    tail, slot = keys[-1:], memory.index.find(keys[-1:])
    memory.index.pin(slot)
    gate.set()
    taken = await taking
    assert memory.index.find(tail) == slot
    assert taken != slot
    memory.unpin(slot)
    memory.give_back(taken)
    await memory.settle()


async def test_a_cancelled_take_has_nothing_and_loses_nothing(
    memory: MemoryTier, below: Below
) -> None:
    """Cancelled in its eviction: the blocks that were to leave stay where they are."""
    keys = await full(memory)
    below.before = asyncio.Event().wait
    taking = asyncio.create_task(memory.take(BYTES, 4))
    await some_turns()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert (memory.index.find(keys) >= 0).all()
    assert memory.stats().evicted_blocks == 0
    # And none of them is held: all can leave.
    below.before = None
    await memory.empty()
    assert sorted(below.given) == sorted(keys.tolist())
    assert memory.stats().used_bytes == 0


async def test_a_cancelled_take_gives_back_what_it_had(
    memory: MemoryTier, below: Below
) -> None:
    keys = await full(memory)
    below.before = None
    first = await memory.take(BYTES, 2)
    await memory.settle()
    held = memory.index.find(keys)
    memory.give_back(first)
    free = memory.index.slabs.free(BYTES)
    below.before = asyncio.Event().wait
    taking = asyncio.create_task(memory.take(BYTES, SLOTS))
    await some_turns()
    assert memory.index.slabs.free(BYTES) == 0
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert memory.index.slabs.free(BYTES) == free
    assert (memory.index.find(keys) == held).all()


async def test_a_demotion_that_raises_loses_nothing(
    memory: MemoryTier, below: Below
) -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    keys = await full(memory)
    below.before = broken
    with pytest.raises(ValueError, match="a bug"):
        await memory.take(BYTES, 1)
    assert (memory.index.find(keys) >= 0).all()
    below.before = None
    slots = await memory.take(BYTES, 1)
    await memory.settle()
    memory.give_back(slots)


@pytest.mark.parametrize("ahead", [False, True])
async def test_what_is_below_goes_some_at_once_and_only_when_room_is_needed(
    ahead: bool,
) -> None:
    """In front of a tier that is written through; where not, each has to be written."""
    below = Below()
    memory = MemoryTier(Index(Slabs(16, 64 * KIB)), below, ahead=ahead)
    keys = as_keys(chain(256))
    slots = memory.index.take(BYTES, 256)
    name(memory, keys, slots)
    taken = await memory.take(BYTES, 1)
    assert len(below.given) == (1 if ahead else 4)
    memory.give_back(taken)
    await memory.settle()
    assert len(below.given) == (SLOTS + 1 if ahead else 4)
    memory.close()


async def test_no_more_goes_than_has_to_where_nobody_takes_it() -> None:
    below = Below()
    memory = MemoryTier(Index(Slabs(16, 64 * KIB)), below, ahead=False)
    keys = as_keys(chain(256))
    name(memory, keys, memory.index.take(BYTES, 256))
    below.error = "away"
    taken = [await memory.take(BYTES, 1) for _ in range(5)]
    # That nobody takes them is known from the first ones.
    assert len(below.given) == 5
    below.error = ""
    taken += [await memory.take(BYTES, 1) for _ in range(2)]
    assert len(below.given) == 5 + 1 + 4
    memory.give_back(np.concatenate(taken))
    memory.close()


# --- the end --------------------------------------------------------------------------


async def test_memory_that_somebody_keeps_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = mapped()  # what a failed copy of another test may touch stays for ever
    memory = MemoryTier(Index(Slabs(1, SLOTS * GRAIN_BYTES)), None)
    memory.index.take(BYTES, 1)
    images = memory.images(np.array([0]), BYTES)
    with caplog.at_level(logging.WARNING, "kvwire"):
        memory.close()
    assert f"{SLOTS * GRAIN_BYTES} bytes of a store's memory stay in use" in caplog.text
    assert images.nbytes == BYTES
    # The memory goes with the last array of it.
    assert mapped() > before
    del images
    assert mapped() == before


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("kvwire-store (deleted)")


async def test_what_is_written_down_stays(memory: MemoryTier, below: Below) -> None:
    keys = as_keys(chain(4))
    slots = memory.index.take(BYTES, 4)
    name(memory, keys, slots)
    assert await memory.write_down(every=True) == 0
    assert sorted(below.given) == sorted(keys.tolist())
    assert (memory.index.find(keys) == slots).all()
    memory.untaken[slots[:3]] = True
    assert await memory.write_down(every=False) == 3
    assert sorted(below.given[4:]) == sorted(keys[:3].tolist())
    # And nothing is held: all of it may go.
    assert len(memory.index.victims(BYTES, 9).slots) == 4


_names = st.sets(st.binary(min_size=1, max_size=2), max_size=5)


@given(begun=st.lists(_names, max_size=6), asked=_names, data=st.data())
@settings(max_examples=100)
def test_a_key_is_busy_from_its_begin_to_its_end(
    begun: list[set[bytes]], asked: set[bytes], data: st.DataObject
) -> None:
    in_flight = InFlightFills()
    open_: list[list[bytes]] = []
    for keys in begun:
        busy = {key for one in open_ for key in one}
        free = sorted(keys - busy)
        in_flight.begin(as_keys(free))
        open_.append(free)
        if data.draw(st.booleans()):
            in_flight.end(as_keys(open_.pop(data.draw(st.integers(0, len(open_) - 1)))))
        busy = {key for one in open_ for key in one}
        wanted = sorted(asked | keys)
        assert in_flight.busy(as_keys(wanted)).tolist() == [k in busy for k in wanted]
        assert len(in_flight) == len(busy)


async def test_all_who_wait_for_one_of_the_keys_are_woken_at_the_end() -> None:
    """And look again: it may be filled once more by then."""
    in_flight, keys, other = InFlightFills(), as_keys([b"a", b"b"]), as_keys([b"c"])
    assert not await in_flight.one_ended(keys)
    in_flight.begin(keys)
    in_flight.begin(other)
    waiting = [
        asyncio.create_task(in_flight.one_ended(as_keys(asked)))
        for asked in ([b"a"], [b"z", b"a"], [b"b", b"c"], [b"c"])
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False, False]
    in_flight.end(keys)
    in_flight.begin(keys)
    assert await asyncio.gather(*waiting[1:3]) == [True, True]
    assert not waiting[3].done()
    in_flight.end(other)
    assert await waiting[3]
    in_flight.end(keys)
    assert not await in_flight.one_ended(keys)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is an arena on Linux only")
@pytest.mark.parametrize("populate", ["yes", "no"])
async def test_pages_are_there_when_a_store_that_wants_them_is_open(
    populate: str,
) -> None:
    nbytes = 16 * MIB
    async with BlockStore.open([f"memory:{nbytes}?populate={populate}"]) as store:
        images = inside.tiers(store).memory.images(np.array([0]), 1)
        memory: Any = images.owner
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory[:: mmap.PAGESIZE] = 1
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert (faults < nbytes // mmap.PAGESIZE // 8) == (populate == "yes")
        del memory, images
