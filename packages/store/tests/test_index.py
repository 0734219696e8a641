"""The index against a model of ordered dictionaries, in any order of calls."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvwire.kv.blocks import Ids
from kvwire_store.eviction import EvictionQueue, SlotState
from kvwire_store.index import Index
from kvwire_store.keys import NO_SLOT, IndexedSlots, Keys, as_keys, once
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs
from tests.support.depth import examples

SIZES = (1, 2, 5)
"""Slots in grains; a slab has 8 grains."""


def index_of(slabs: int = 3) -> Index:
    return Index(Slabs(slabs, 8 * GRAIN_BYTES))


def ones(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ones(count, np.uint8)


class Model(RuleBasedStateMachine):
    """Names, pins and the order of going, kept the slow way."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index_of()
        self.number = 0
        # Of each size the blocks nobody has pinned, the next to go in front.
        self.idle: dict[int, OrderedDict[bytes, None]] = {
            size: OrderedDict() for size in SIZES
        }
        self.pins: dict[bytes, int] = {}
        self.size: dict[bytes, int] = {}
        self.slot: dict[bytes, int] = {}
        self.order: dict[bytes, int] = {}

    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 5), code=st.integers(0, 9))
    def fill(self, size: int, count: int, code: int) -> None:
        slots = self.index.take(size * GRAIN_BYTES, count)
        names = [b"%d" % (self.number + i) for i in range(slots.size)]
        self.number += slots.size
        assert not set(slots.tolist()) & set(self.slot.values())
        keys = as_keys(names)
        self.index.mark(slots, ones(slots.size) * np.uint8(code))
        self.index.name(keys, slots)
        for name, slot in zip(names, slots.tolist(), strict=True):
            self.pins[name], self.size[name], self.slot[name] = 1, size, slot
            self.order[name] = code
        self._unpin(names)

    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 5))
    def take_and_give_back(self, size: int, count: int) -> None:
        before = self.index.slabs.used_bytes
        slots = self.index.take(size * GRAIN_BYTES, count)
        self.index.give_back(slots)
        assert self.index.slabs.used_bytes == before

    @precondition(lambda self: self.slot)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        names = self._some(data, list(self.slot))
        self.index.pin(self._named(names).slots)
        for name in names:
            self.pins[name] += 1
            self.idle[self.size[name]].pop(name, None)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self._unpin(self._some(data, [name for name, n in self.pins.items() if n]))

    @precondition(lambda self: self.slot)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(list(self.slot)), unique=True))
        self.index.touch(self._named(names).slots)
        for name in reversed(names):
            if not self.pins[name]:
                self.idle[self.size[name]].move_to_end(name)

    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 4))
    def evict(self, size: int, count: int) -> None:
        gone = self.index.evict(size * GRAIN_BYTES, count).keys.tolist()
        own = list(self.idle[size])
        if {self.size[name] for name in gone} <= {size}:
            assert gone == own[:count]
        else:
            # A slab of another size: all of what is in it, and nothing else.
            slabs = {self.slot[name] // self.index.slabs.stride for name in gone}
            assert len(slabs) == 1
            inside = {
                name
                for name, slot in self.slot.items()
                if slot // self.index.slabs.stride in slabs
            }
            assert inside == set(gone)
        for name in gone:
            assert not self.pins[name]
            del self.idle[self.size[name]][name]
            del self.pins[name], self.size[name], self.slot[name], self.order[name]

    @rule(
        size=st.sampled_from(SIZES), count=st.integers(1, 4), wanted=st.integers(0, 6)
    )
    def replace(self, size: int, count: int, wanted: int) -> None:
        """What goes leaves its slots, of whatever size, to what comes."""
        named = self.index.victims(size * GRAIN_BYTES, count)
        alike = sum(self.size[name] == size for name in named.keys.tolist())
        slots = self.index.replace(*named, size * GRAIN_BYTES, wanted)
        for name in named.keys.tolist():
            del self.idle[self.size[name]][name]
            del self.pins[name], self.size[name], self.slot[name], self.order[name]
        taken = slots.tolist()
        assert min(alike, wanted) <= len(taken) <= wanted
        assert taken == sorted(set(taken) - set(self.slot.values()))
        free = self.index.slabs.used_bytes - len(taken) * size * GRAIN_BYTES
        self.index.give_back(slots)
        assert self.index.slabs.used_bytes == free
        assert self.index.used_bytes.tolist() == [free]

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        names = self._some(data, [name for name, n in self.pins.items() if n])
        alone = self.index.drop(*self._named(names)).tolist()
        assert alone == [self.pins[name] == 1 for name in names]
        kept = []
        for name, gone in zip(names, alone, strict=True):
            if gone:
                del self.pins[name], self.size[name], self.slot[name], self.order[name]
            else:
                self.pins[name] -= 1
                kept.append(name)
        assert all(self.pins[name] for name in kept)

    @invariant()
    def every_block_is_where_it_was_put(self) -> None:
        names = [*self.slot, b"nobody"]
        found = self.index.find(as_keys(names)).tolist()
        assert found == [*self.slot.values(), NO_SLOT]
        slots = np.array(found[:-1], np.int64)
        assert self.index.orders(slots).tolist() == list(self.order.values())
        assert len(self.index) == len(self.slot)

    def _unpin(self, names: list[bytes]) -> None:
        self.index.unpin(self._named(names).slots)
        for name in reversed(names):
            self.pins[name] -= 1
            if not self.pins[name]:
                self.idle[self.size[name]][name] = None

    def _some(self, data: st.DataObject, names: list[bytes]) -> list[bytes]:
        """Some blocks of one size, as a batch has them."""
        size = self.size[data.draw(st.sampled_from(names))]
        alike = [name for name in names if self.size[name] == size]
        return data.draw(st.lists(st.sampled_from(alike), unique=True, min_size=1))

    def _named(self, names: list[bytes]) -> IndexedSlots:
        slots = np.array([self.slot[name] for name in names], np.int64)
        return IndexedSlots(as_keys(names), slots)


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(
        Model, settings=settings(max_examples=examples(150), stateful_step_count=30)
    )


def filled(index: Index, grains: int, names: list[bytes]) -> None:
    """Put blocks into an index, in the order of a chain."""
    slots = index.take(grains * GRAIN_BYTES, len(names))
    assert slots.size == len(names)
    index.adopt(as_keys(names), slots, ones(len(names)))


def test_an_old_slab_of_another_size_goes_first() -> None:
    index = index_of(2)
    filled(index, 2, [b"a", b"b", b"c", b"d"])
    filled(index, 1, [b"e"])
    assert set(index.evict(GRAIN_BYTES, 1).keys.tolist()) == set(b"a b c d".split())
    filled(index, 2, [b"f"])
    assert index.evict(GRAIN_BYTES, 1).keys.tolist() == [b"e"]


def test_a_block_held_twice_at_once_is_held_twice() -> None:
    index = index_of(1)
    filled(index, 1, [b"a"])
    twice = as_keys([b"a", b"a"])
    slots = index.find(twice)
    index.pin(slots)
    index.unpin(slots[:1])
    assert index.evict(GRAIN_BYTES, 1).keys.size == 0
    index.unpin(slots[:1])
    assert index.evict(GRAIN_BYTES, 1).keys.tolist() == [b"a"]


@given(st.lists(st.binary(min_size=1, max_size=1)))
def test_a_key_is_taken_where_it_is_first(keys: list[bytes]) -> None:
    seen = [key in keys[:at] for at, key in enumerate(keys)]
    assert once(as_keys(keys)).tolist() == [not before for before in seen]


def test_slots_of_several_sizes_are_held_and_used_as_one() -> None:
    """A file that was written to may have a block in a slot of another size."""
    index = index_of(2)
    keys = as_keys([b"small", b"large"])
    slots = np.concatenate([index.take(n * GRAIN_BYTES, 1) for n in (1, 2)])
    index.name(keys, slots)
    index.unpin(slots)
    index.pin(slots)
    for size in (1, 2):
        assert not index.victims(size * GRAIN_BYTES, 1).slots.size
    index.unpin(slots)
    index.touch(slots)
    for size, key in ((1, b"small"), (2, b"large")):
        assert index.evict(size * GRAIN_BYTES, 1).keys.tolist() == [key]
    assert not index.slabs.used.any()


def test_no_call_has_bytecode_for_each_block() -> None:
    """As many steps for 400 blocks as for 40, and among 3,000 as among 300."""
    steps = set()
    for blocks, used in ((300, 40), (3_000, 40), (3_000, 400)):
        index = Index(Slabs(blocks // 10, 16 * GRAIN_BYTES))
        names = [b"%d" % i for i in range(blocks)]
        filled(index, 1, names)
        some = as_keys(names[:used])
        steps.add(steps_of(partial(use, index, some)))
    assert len(steps) == 1


def use(index: Index, keys: Keys) -> None:
    slots = index.find(keys)
    index.pin(slots)
    index.unpin(slots)
    index.touch(slots)


def steps_of(call: Callable[[], None]) -> int:
    steps = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode" and "kvwire" in frame.f_code.co_filename
        return trace

    before = sys.gettrace()
    for _ in range(2):  # 3.12.1 begins to tell of opcodes with the second trace
        steps = 0
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    assert steps
    return steps


# --- which block goes next ----------------------------------------------------------


class CountedQueue(EvictionQueue):
    """Counts its steps, and the entries of each."""

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        self.steps: list[int] = []

    def _window(self, count: int) -> tuple[Ids, Ids]:
        self.steps.append(count)
        return super()._window(count)


def test_many_entries_that_do_not_count_are_skipped_in_few_steps() -> None:
    """Or the first eviction after many uses stops the loop for long."""
    queue = CountedQueue(SlotState(8192))
    slots = np.arange(8192)
    for _ in range(2):
        queue.release(slots)
    assert queue.pop(1)[1].tolist() == [0]
    assert 8192 < sum(queue.steps) < 4 * 8192
    assert len(queue.steps) < 16


def test_queues_of_one_tier_are_those_of_a_model() -> None:
    """Two queues share the slots; each has the order of an ``OrderedDict``."""
    rng = np.random.default_rng(2)
    state = SlotState(64)
    state.names[:] = [b"%d" % slot for slot in range(64)]
    queues = [EvictionQueue(state) for _ in range(2)]
    models: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
    for _ in range(3000):
        which = int(rng.integers(2))
        queue = queues[which]
        model = models[which]
        # A slot is in one queue at a time.
        mine = sorted(set(range(64)) - set(models[1 - which]))
        slots = rng.choice(mine, min(len(mine), int(rng.integers(1, 12))), False)
        step = int(rng.integers(4))
        if step == 3:
            names, gone = queue.pop(int(slots.size))
            assert gone.tolist() == list(model)[: slots.size]
            assert names.tolist() == state.names[gone].tolist()
            slots = gone
        else:
            (queue.take_out, queue.take_out, queue.release)[step](slots)
        for slot in slots.tolist():
            model.pop(slot, None)
        if step == 2:
            model.update(dict.fromkeys(slots.tolist()))
        assert queue.oldest() == next(iter(model), None)
    assert all(models)
