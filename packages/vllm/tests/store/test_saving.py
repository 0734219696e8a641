"""Blocks on their way to a store that is slow, fails or stands still."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from kvwire_vllm.store.saving import SaveQueue, Saving
from kvwire_vllm.store.scheduler import NamedBlocks
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


class Life:
    """Requests that begin, fill, are preempted and end, as a store copies and fails."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = Store()
        self.queue = SaveQueue(self.store.put, 4, 0.0 if seed % 2 else 60.0)
        self.running: set[str] = set()
        self.leaving: set[str] = set()
        self.freed = 0

    def act(self) -> None:
        """Do anything that may happen."""
        self.chance.choice(
            [self.fill, self.fill, self.store.copy, self.take, self.end, self.look]
        )()
        assert sum(map(len, self.store.under_way)) <= 4

    def fill(self) -> None:
        name = f"r{self.chance.randrange(6)}"
        if name not in self.leaving:
            self.running.add(name)
            self.queue.add([blocks(name, *range(self.chance.randrange(1, 4)))])

    def take(self) -> None:
        self.store.take(lacking=self.chance.random() < 0.3)

    def end(self) -> None:
        if not self.running:
            return
        name = self.chance.choice(sorted(self.running))
        self.running.remove(name)
        if self.chance.random() < 0.5:
            self.leaving.add(name)
            self.queue.leave(name)
            return
        threading.Timer(0.001, self.store.copy).start()
        self.queue.fence(name)  # it was preempted
        assert not self.reads(name)

    def look(self) -> None:
        freed = self.queue.freed()
        assert freed <= self.leaving
        assert not any(map(self.reads, freed))
        self.leaving -= freed
        self.freed += len(freed)

    def reads(self, request: str) -> bool:
        return any(
            named.request_id == request and not saving.free.done()
            for named, saving in self.store.begun
        )

    def empty(self) -> bool:
        self.store.take()
        self.look()
        return not self.leaving and not self.queue.behind


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nothing_is_read_that_is_free(seed: int) -> None:
    """In the end nothing is held."""
    life = Life(seed)
    for _ in range(300):
        life.act()
    for name in life.running:
        life.queue.leave(name)
    life.leaving |= life.running
    assert eventually(life.empty)
    assert life.freed > 0
