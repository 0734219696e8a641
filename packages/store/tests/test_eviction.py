"""Which block goes next: what each kind of queue keeps, and what hits that makes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvwire.kv.blocks import Ids
from kvwire_store.eviction import EVICTIONS, EvictionQueue, LruQueue, SlotState
from kvwire_store.keys import Keys, as_keys
from packages.store.tests.traces import agents, hit_share, main


class Queued:
    """A queue whose keys are the numbers of their slots."""

    def __init__(self, evict: str) -> None:
        self.state = SlotState(64)
        self.queue: EvictionQueue = EVICTIONS[evict](self.state)

    def add(self, *slots: int) -> None:
        keys, places = named(*slots)
        self.state.names[places] = keys
        self.queue.release(keys, places)

    def use(self, *slots: int) -> None:
        self.queue.used(named(*slots)[1])

    def pop(self, count: int) -> list[int]:
        keys, slots = self.queue.pop(count)
        listed: list[int] = slots.tolist()
        assert [int(key) for key in keys] == listed
        return listed


def named(*slots: int) -> tuple[Keys, Ids]:
    return as_keys(b"%d" % slot for slot in slots), np.array(slots, np.int64)


def test_what_was_used_twice_is_not_pushed_out_by_a_scan() -> None:
    some = Queued("s3fifo")
    some.add(*range(20))
    some.use(3, 4)
    some.use(3, 4)
    assert some.pop(10) == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    some.add(*range(30, 50))
    gone = some.pop(26)
    assert gone == [*range(12, 20), *range(30, 48)]
    assert some.queue.oldest() == 48
    assert some.pop(9) == [48, 49, 3, 4]
    assert some.queue.oldest() is None


def test_what_comes_back_soon_is_kept_and_each_use_is_a_round() -> None:
    some = Queued("s3fifo")
    some.add(*range(20))
    assert some.pop(2) == [0, 1]
    some.add(0)  # its name was kept
    some.use(0)
    assert some.pop(25) == [*range(2, 20), 0]


def test_what_is_in_use_is_passed_over_and_comes_back() -> None:
    some = Queued("s3fifo")
    some.add(1, 2, 3)
    some.state.pins[[1, 2]] = 1
    assert some.pop(3) == [3]
    some.state.pins[[1, 2]] = 0
    some.add(2, 1)
    some.queue.remove(*named(2))
    assert some.pop(3) == [1]


def test_many_entries_that_do_not_count_are_skipped_in_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the first eviction after many uses stops the loop for long."""
    state = SlotState(8192)
    queue = LruQueue(state)
    keys, slots = named(*range(8192))
    state.names[:] = keys
    for _ in range(2):
        queue.release(keys, slots)
    steps: list[int] = []
    window = LruQueue._window

    def counted(queue: LruQueue, count: int) -> tuple[Ids, Ids]:
        steps.append(count)
        return window(queue, count)

    monkeypatch.setattr(LruQueue, "_window", counted)
    assert queue.pop(1)[1].tolist() == [0]
    assert 8192 < sum(steps) < 4 * 8192
    assert len(steps) < 16


@pytest.mark.parametrize("evict", EVICTIONS)
def test_each_block_goes_once(evict: str) -> None:
    some, rng = Queued(evict), np.random.default_rng(1)
    inside: set[int] = set()
    for _ in range(300):
        new = sorted(set(range(64)) - inside)[: rng.integers(1, 9)]
        some.add(*new)
        inside |= set(new)
        some.use(*rng.choice(sorted(inside), 3))
        gone = some.pop(int(rng.integers(0, 9)))
        assert len(set(gone)) == len(gone)
        assert set(gone) <= inside
        inside -= set(gone)
        some.state.uses[gone] = 0
    assert sorted(some.pop(64)) == sorted(inside)


def test_scans_cost_s3fifo_fewer_hits() -> None:
    scans = list(agents(scans=True, prompts=400))
    lru, s3fifo = (hit_share(kind, 700, scans) for kind in ("lru", "s3fifo"))
    assert s3fifo > lru + 0.05


def test_what_is_in_use_is_not_the_next_to_go() -> None:
    some = Queued("s3fifo")
    some.add(*range(3))
    some.state.pins[[0, 1]] = 1
    assert some.queue.oldest() == 2
    some.state.pins[2] = 1
    assert some.queue.oldest() is None
    some.state.pins[:] = 0
    some.add(1)
    assert some.pop(3) == [1]


def test_the_program_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "FILE.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["gone.jsonl"])
    assert "gone.jsonl: there is no such file" in capsys.readouterr().err


def test_lru_queues_of_one_tier_are_those_of_a_model() -> None:
    """Two queues share the slots; each has the order of an ``OrderedDict``."""
    rng = np.random.default_rng(2)
    state = SlotState(64)
    state.names[:] = [b"%d" % slot for slot in range(64)]
    queues = [EVICTIONS["lru"](state) for _ in range(2)]
    models: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
    for _ in range(3000):
        which = int(rng.integers(2))
        queue = queues[which]
        model = models[which]
        # A slot is in one queue at a time.
        mine = sorted(set(range(64)) - set(models[1 - which]))
        slots = rng.choice(mine, min(len(mine), int(rng.integers(1, 12))), False)
        keys = state.names[slots]
        step = int(rng.integers(4))
        if step == 3:
            names, gone = queue.pop(int(slots.size))
            assert gone.tolist() == list(model)[: slots.size]
            assert names.tolist() == state.names[gone].tolist()
            slots = gone
        else:
            (queue.hold, queue.remove, queue.release)[step](keys, slots)
        for slot in slots.tolist():
            model.pop(slot, None)
        if step == 2:
            model.update(dict.fromkeys(slots.tolist()))
        assert queue.oldest() == next(iter(model), None)
    assert all(models)
