"""The index in shared memory: what is found, and that nothing wrong ever is."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.memory.generations import Generations
from kvwire_store.keys import NO_SLOT, as_keys
from kvwire_store.namespace import ORDERS
from kvwire_store.shared_index import (
    HEAD_WORDS,
    WAYS,
    FoundSlots,
    IndexReader,
    SharedIndex,
    words_for,
)
from tests.support.depth import examples

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
SLOTS = 512


class Shared:
    """A writer and a reader of one table."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.generations = Generations(slots)
        self.words = np.zeros(words_for(slots), np.uint64)
        self.index = SharedIndex(self.words, self.generations)
        self.reader = IndexReader(self.words, self.generations.values)

    def close(self) -> None:
        del self.index, self.reader
        self.generations.close()

    def add(self, keys: list[bytes], first: int, order: int = 3) -> None:
        slots = np.arange(first, first + len(keys))
        self.index.add(as_keys(keys), slots, np.full(len(keys), order, np.uint8))

    def find(self, keys: list[bytes]) -> FoundSlots:
        return self.reader.find(as_keys(keys))

    def is_complete(self) -> bool:
        return self.reader.complete

    def remove(self, *slots: int) -> None:
        self.index.remove(np.array(slots, np.int64))


@contextlib.contextmanager
def sharing(slots: int = SLOTS) -> Iterator[Shared]:
    made = Shared(slots)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def shared() -> Iterator[Shared]:
    with sharing() as made:
        yield made


def names(count: int) -> list[bytes]:
    return [secrets.token_bytes(48) for _ in range(count)]


# One and several are looked up and written in different ways.
@pytest.mark.parametrize("count", [1, 2, 300])
def test_what_was_added_is_found_until_it_is_removed(
    shared: Shared, count: int
) -> None:
    keys = names(count)
    shared.add(keys, 7, order=5)
    found = shared.find(keys)
    assert found.slots.tolist() == list(range(7, 7 + count))
    assert found.orders.tolist() == [5] * count
    assert shared.reader.same(found).all()
    for key in keys:
        assert shared.find([key]).slots.tolist() == [7 + keys.index(key)]
    assert (shared.find(names(count)).slots == NO_SLOT).all()
    shared.remove(*range(7, 7 + count))
    assert (shared.find(keys).slots == NO_SLOT).all()
    # A reader that had found them before learns it as well.
    assert not shared.reader.same(found).any()


@pytest.mark.parametrize("together", [True, False])
def test_a_slot_that_is_used_again(shared: Shared, *, together: bool) -> None:
    old = names(20)
    new = names(20)
    shared.add(old, 0)
    found = shared.find(old)
    if together:
        shared.remove(*range(20))
        shared.add(new, 0)
    else:
        for slot, key in enumerate(new):
            shared.remove(slot)
            shared.add([key], slot)
    assert (shared.find(old).slots == NO_SLOT).all()
    assert shared.find(new).slots.tolist() == list(range(20))
    assert not shared.reader.same(found).any()


def test_a_full_table_says_that_it_lacks_blocks() -> None:
    """A table for few slots gets the blocks of many."""
    with sharing(4 * SLOTS) as shared:
        small = np.zeros(words_for(SLOTS), np.uint64)
        shared.index = SharedIndex(small, shared.generations)
        shared.reader = IndexReader(small, shared.generations.values)
        keys = names(4 * SLOTS)
        for at, key in enumerate(keys[:SLOTS]):
            shared.add([key], at)
        assert shared.is_complete()
        shared.add(keys[SLOTS : 3 * SLOTS], SLOTS)
        for at, key in enumerate(keys[3 * SLOTS :], 3 * SLOTS):
            shared.add([key], at)
        found = shared.find(keys).slots
        lacking = found == NO_SLOT
        assert 2 * SLOTS <= np.count_nonzero(lacking) < 3 * SLOTS
        assert (lacking | (found == np.arange(4 * SLOTS))).all()
        assert not shared.is_complete()
        first, *others = np.flatnonzero(lacking).tolist()
        shared.remove(first)
        assert not shared.is_complete()
        shared.remove(*others)
        assert shared.is_complete()


def test_a_full_tier_has_an_entry_for_each_block() -> None:
    with sharing(16384) as shared:
        keys = names(16384)
        for first in range(0, len(keys), 256):
            shared.add(keys[first : first + 256], first)
        assert shared.is_complete()
        assert shared.find(keys).slots.tolist() == list(range(16384))


# --- a table that lies ----------------------------------------------------------------


@pytest.mark.parametrize("word", range(3))
def test_an_entry_of_two_writes_is_a_miss(shared: Shared, word: int) -> None:
    """One of its words is an older block's, or one of another order."""
    keys = names(2)
    shared.add(keys[:1], 0)
    before = shared.words.copy()
    shared.remove(0)
    shared.add(keys[1:], 0, order=4)
    after = shared.words.copy()
    columns = [_column(table, word) for table in (before, shared.words)]
    np.copyto(columns[1], columns[0])
    for key in keys:
        assert shared.find([key]).slots.tolist() == [NO_SLOT]
        assert (shared.find([key, key]).slots == NO_SLOT).all()
    shared.words[:] = after
    assert shared.find(keys[1:]).slots.tolist() == [0]


def _column(table: Words, word: int) -> Words:
    return table[HEAD_WORDS:].reshape(-1, 3, WAYS)[:, word]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("order", [len(ORDERS), 254, 255])
def test_an_order_that_there_is_not_is_a_miss(
    shared: Shared, count: int, order: int
) -> None:
    """The writer is another process, which may seal what it likes."""
    keys = [secrets.token_bytes(32) for _ in range(count)]
    shared.add(keys, 0, order=len(ORDERS) - 1)
    assert (shared.find(keys).slots != NO_SLOT).all()
    shared.remove(*range(count))
    shared.add(keys, 0, order=order)
    assert (shared.find(keys).slots == NO_SLOT).all()


@pytest.mark.parametrize("count", [1, 5])
def test_a_slot_that_there_is_not_is_a_miss(shared: Shared, count: int) -> None:
    """Or its image would be read behind the end of the memory that is mapped."""
    keys = [secrets.token_bytes(32) for _ in range(count)]
    shared.add(keys, SLOTS - count)
    fewer = shared.generations.values[:-1].copy()
    fewer[-1] = shared.generations.values[-1]
    assert shared.find(keys).slots[-1] == SLOTS - 1
    found = IndexReader(shared.words, fewer).find(as_keys(keys))
    assert found.slots[-1] == NO_SLOT


@pytest.mark.parametrize("bit", [56, 60, 63])
def test_no_byte_of_the_seal_makes_up_for_another_order(
    shared: Shared, bit: int
) -> None:
    """As bytes that were overwritten at random once did, one time in 256."""
    keys = names(1)
    shared.add(keys, 0)
    places = _column(shared.words, 1)
    places[places != 0] ^= np.uint64(1 << bit)
    seals = _column(shared.words, 2).view(np.uint8).reshape(-1, WAYS, 8)
    (bucket,), (way,) = np.nonzero(_column(shared.words, 0))
    entry = seals[bucket, way]
    whole = entry.copy()
    for byte in range(8):
        for value in range(256):
            entry[byte] = value
            assert shared.find(keys).slots[0] == NO_SLOT
            assert shared.find(keys * 2).slots[0] == NO_SLOT
        entry[:] = whole


def test_bytes_that_are_overwritten_at_random(shared: Shared) -> None:
    """A block is found where it is, or not at all."""
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    keys = names(SLOTS)
    shared.add(keys, 0)
    whole = shared.words.copy()
    table = shared.words.view(np.uint8)
    missed = 0
    for _ in range(examples(200)):
        shared.words[:] = whole
        many = int(rng.integers(1, table.size))
        table[rng.integers(0, table.size, many)] = rng.integers(0, 256, many, np.uint8)
        found = shared.find(keys)
        there = found.slots != NO_SLOT
        assert (found.slots[there] == np.flatnonzero(there)).all()
        assert (found.orders[there] == 3).all()
        assert shared.reader.same(found)[there].all()
        missed += int(np.count_nonzero(~there))
        one = int(rng.integers(SLOTS))
        assert shared.find([keys[one]]).slots[0] in (NO_SLOT, one)
    assert missed


def test_generations_that_are_overwritten_at_random(shared: Shared) -> None:
    keys = names(SLOTS)
    shared.add(keys, 0)
    lies = shared.generations.values.copy()
    lies[: SLOTS // 2] = np.random.default_rng(1).integers(0, 2**63, SLOTS // 2)
    reader = IndexReader(shared.words, lies)
    found = reader.find(as_keys(keys)).slots
    assert (found[: SLOTS // 2] == NO_SLOT).all()
    assert found[SLOTS // 2 :].tolist() == list(range(SLOTS // 2, SLOTS))


# --- a writer beside readers ----------------------------------------------------------


def test_a_reader_beside_a_writer_finds_no_wrong_slot(shared: Shared) -> None:
    """Slots change their blocks all the time; each slot only has blocks of its own."""
    keys = [[secrets.token_bytes(32) for _ in range(4)] for _ in range(64)]
    stop = threading.Event()
    writes = 0

    def write() -> None:
        nonlocal writes
        rng = np.random.default_rng(2)
        while not stop.is_set():
            some = np.unique(rng.integers(0, 64, int(rng.integers(1, 9))))
            shared.remove(*some.tolist())
            which = int(rng.integers(4))
            chosen = as_keys(keys[slot][which] for slot in some.tolist())
            shared.index.add(chosen, some, np.full(some.size, which, np.uint8))
            writes += 1

    shared.add([mine[0] for mine in keys], 0, order=0)
    writer = threading.Thread(target=write)
    writer.start()
    hits, reads = 0, 0
    try:
        every = [key for mine in keys for key in mine]
        # On a busy machine the writer may have its first turn late.
        while reads < examples(300) or not (hits and writes):
            reads += 1
            found = shared.find(every)
            there = np.flatnonzero(found.slots != NO_SLOT)
            assert (found.slots[there] == there // 4).all()
            assert (found.orders[there] == there % 4).all()
            hits += there.size
            one = int(np.random.default_rng(hits).integers(len(every)))
            assert shared.find([every[one]]).slots[0] in (NO_SLOT, one // 4)
    finally:
        stop.set()
        writer.join()
