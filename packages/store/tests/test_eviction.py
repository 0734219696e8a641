"""Which block goes next."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvwire.kv.blocks import Ids
from kvwire_store.eviction import EvictionQueue, SlotState


def test_many_entries_that_do_not_count_are_skipped_in_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the first eviction after many uses stops the loop for long."""
    state = SlotState(8192)
    queue = EvictionQueue(state)
    slots = np.arange(8192)
    for _ in range(2):
        queue.release(slots)
    steps: list[int] = []
    window = EvictionQueue._window

    def counted(queue: EvictionQueue, count: int) -> tuple[Ids, Ids]:
        steps.append(count)
        return window(queue, count)

    monkeypatch.setattr(EvictionQueue, "_window", counted)
    assert queue.pop(1)[1].tolist() == [0]
    assert 8192 < sum(steps) < 4 * 8192
    assert len(steps) < 16


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
