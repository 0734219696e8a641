"""Blocks on their way to a store that is slow, fails or stands still."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvwire_vllm.store.saving import SaveQueue, Saving
from kvwire_vllm.store.scheduler import NamedBlocks
from tests.support.depth import examples
from tests.support.waiting import eventually


class Store:
    """Has what the test lets it take."""

    def __init__(self) -> None:
        self.begun: list[tuple[NamedBlocks, Saving]] = []
        self.stored: list[int] = []

    def put(self, named: NamedBlocks) -> Saving:
        self.begun.append((named, Saving(Future(), Future())))
        return self.begun[-1][1]

    def copy(self) -> None:
        """Copy what has begun to the store's memory."""
        for _, saving in self.begun:
            if not saving.free.done():
                saving.free.set_result(None)

    def take(self, *, lacking: bool = False) -> None:
        """Have the tiers below take all that has begun, or nothing of it."""
        self.copy()
        for named, saving in self.begun:
            if not lacking:
                self.stored += named.ids
            saving.over.set_result([*range(len(named.ids))] if lacking else [])
        self.begun = []

    @property
    def under_way(self) -> list[list[int]]:
        return [named.ids for named, _ in self.begun]


def blocks(request: str, *ids: int) -> NamedBlocks:
    return NamedBlocks(request, [bytes([one]) for one in ids], list(ids))


def test_no_more_is_under_way_than_the_store_has_room_for() -> None:
    store = Store()
    queue = SaveQueue(store.put, 3, 60.0)
    queue.add([blocks("a", 1, 2), blocks("b", 3, 4), blocks("a", 5)])
    assert store.under_way == [[1, 2], [3]]
    assert queue.behind == 5
    store.copy()
    assert queue.freed() == set()
    assert len(store.under_way) == 2  # a copy is not the end
    store.take()
    queue.freed()
    assert store.under_way == [[5], [4]]
    store.take()
    queue.freed()
    assert store.stored == [1, 2, 3, 5, 4]
    assert queue.behind == 0
    assert len(queue.take_observed()["save_s"]) == 4


def test_an_idle_engine_does_not_make_a_save_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step looks at the save that ended, until the next request comes."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("kvwire_vllm.store.saving.time", clock)
    store = Store()
    queue = SaveQueue(store.put, 8, 60.0)
    queue.add([blocks("a", 1)])
    now_s = 100.5
    store.take()
    now_s = 108.0
    queue.freed()
    assert queue.take_observed()["save_s"] == [0.5]


def test_an_ended_request_is_free_when_its_blocks_are_copied() -> None:
    store = Store()
    queue = SaveQueue(store.put, 8, 60.0)
    queue.add([blocks("a", 1)])
    queue.leave("a")
    assert queue.freed() == set()
    store.copy()
    assert queue.freed() == {"a"}
    assert queue.freed() == set()
    store.take()
    queue.freed()
    assert store.stored == [1]


def test_an_ended_request_is_held_no_longer_than_it_may_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What has begun is finished; what waits is skipped by name."""
    store = Store()
    queue = SaveQueue(store.put, 1, 0.01)
    queue.add([blocks("a", 1), blocks("a", 2, 3)])
    queue.leave("a")
    store.copy()  # and no tier below answers
    assert eventually(lambda: queue.freed() == {"a"})
    assert store.under_way == [[1]]
    assert queue.take_observed()["skipped_blocks"] == [2]
    assert "request a: 2 blocks were not saved: the store is 3 blocks" in caplog.text


def test_a_preempted_request_waits_for_copies_alone() -> None:
    store = Store()
    queue = SaveQueue(store.put, 1, 60.0)
    queue.add([blocks("a", 1), blocks("a", 2)])
    with ThreadPoolExecutor(1) as pool:
        fence = pool.submit(queue.fence, "a")
        waits = not wait([fence], 0.05).done
        store.copy()
        fence.result()
    assert waits
    store.take()
    queue.freed()
    assert store.stored == [1]
    assert store.under_way == []
    # It is saved anew when it runs again.
    queue.add([blocks("a", 7)])
    assert store.under_way == [[7]]


def test_a_request_that_ended_as_it_was_preempted_is_freed_once() -> None:
    store = Store()
    queue = SaveQueue(store.put, 1, 60.0)
    queue.add([blocks("a", 1), blocks("a", 2)])
    threading.Timer(0.01, store.copy).start()
    queue.fence("a")
    queue.leave("a")
    assert queue.freed() == {"a"}
    assert queue.freed() == set()


def test_an_idle_step_waits_for_the_end_of_a_copy() -> None:
    store = Store()
    queue = SaveQueue(store.put, 1, 60.0)
    queue.add([blocks("a", 1)])
    queue.leave("a")
    queue.wait_idle((), 0.0)  # no longer than it may
    threading.Timer(0.01, store.copy).start()
    queue.wait_idle((), 600.0)
    assert queue.freed() == {"a"}


def test_what_a_tier_did_not_take_is_put_again_while_its_request_runs() -> None:
    """Else a stored chain would end there."""
    store = Store()
    queue = SaveQueue(store.put, 8, 60.0, pause_s=0.01)
    queue.add([blocks("runs", 1), blocks("ends", 2)])
    queue.leave("ends")
    store.take(lacking=True)
    assert queue.freed() == {"ends"}
    assert queue.behind == 1
    assert eventually(lambda: queue.freed() == set() and store.under_way == [[1]])
    store.take()
    queue.freed()
    assert store.stored == [1]
    assert queue.behind == 0
    assert queue.take_observed()["skipped_blocks"] == [1]


def test_what_a_tier_did_not_take_is_not_held_for_it() -> None:
    store = Store()
    queue = SaveQueue(store.put, 8, 60.0)
    queue.add([blocks("a", 1, 2)])
    store.take(lacking=True)
    queue.freed()
    assert queue.behind == 2
    queue.leave("a")
    assert queue.freed() == {"a"}
    assert queue.behind == 0
    assert queue.take_observed()["skipped_blocks"] == [2]


def test_what_was_forgotten_is_not_saved_later() -> None:
    """Its weights are others'."""
    store = Store()
    queue = SaveQueue(store.put, 1, 60.0)
    queue.add([blocks("a", 1), blocks("a", 2)])
    queue.forget()
    store.take()
    queue.leave("a")
    assert queue.freed() == {"a"}
    assert store.stored == [1]
    assert queue.behind == 0


def test_the_end_waits_for_a_slow_store_no_longer_than_it_may() -> None:
    store = Store()
    queue = SaveQueue(store.put, 1, 0.02)
    queue.add([blocks("a", 1), blocks("a", 2)])
    store.copy()
    queue.close()
    assert queue.behind == 1  # it is under way, and the store's to finish
    store = Store()
    queue = SaveQueue(store.put, 1, 60.0)
    queue.add([blocks("a", 1), blocks("a", 2)])
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(queue.close)
        for _ in range(2):
            assert eventually(lambda: bool(store.begun))
            store.take()
        closing.result()
    assert store.stored == [1, 2]


NAMES = st.sampled_from([f"r{number}" for number in range(6)])


class Life(RuleBasedStateMachine):
    """Requests begin, fill, are preempted and end, as a store copies and fails.

    Nothing is read that is free, and in the end nothing is held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.running: set[str] = set()
        self.leaving: set[str] = set()

    @initialize(hold_s=st.sampled_from([0.0, 60.0]))
    def begin(self, hold_s: float) -> None:
        self.queue = SaveQueue(self.store.put, 4, hold_s)

    @rule(name=NAMES, count=st.integers(1, 3))
    def fill(self, name: str, count: int) -> None:
        if name not in self.leaving:
            self.running.add(name)
            self.queue.add([blocks(name, *range(count))])

    @rule()
    def copy(self) -> None:
        self.store.copy()

    @rule(lacking=st.booleans())
    def take(self, lacking: bool) -> None:
        self.store.take(lacking=lacking)

    @rule(name=NAMES)
    def preempt(self, name: str) -> None:
        if name in self.running:
            self.running.remove(name)
            threading.Timer(0.001, self.store.copy).start()
            self.queue.fence(name)
            assert not self.reads(name)

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        if name in self.running:
            self.running.remove(name)
            self.leaving.add(name)
            self.queue.leave(name)

    @rule()
    def look(self) -> None:
        freed = self.queue.freed()
        assert freed <= self.leaving
        assert not any(map(self.reads, freed))
        self.leaving -= freed

    @invariant()
    def no_more_than_there_is_room_for_is_under_way(self) -> None:
        assert sum(map(len, self.store.under_way)) <= 4

    def teardown(self) -> None:
        for name in self.running:
            self.queue.leave(name)
        self.leaving |= self.running
        assert eventually(self.empty)

    def empty(self) -> bool:
        self.store.take()
        self.look()
        return not self.leaving and not self.queue.behind

    def reads(self, request: str) -> bool:
        return any(
            named.request_id == request and not saving.free.done()
            for named, saving in self.store.begun
        )


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(50), deadline=None, derandomize=True)
