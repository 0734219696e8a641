"""What the hooks take of an engine's own thread, in calls of Python.

They are exact, whatever else the machine does.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from kvwire import Config
from kvwire_vllm.caches import CacheShape
from kvwire_vllm.config import VllmSettings
from kvwire_vllm.metadata import WorkerStep
from kvwire_vllm.references import UNSIGNED
from kvwire_vllm.scheduler import SchedulerSide
from kvwire_vllm.worker import WorkerSide
from packages.vllm.tests.support import fakes, steps

# Of a prompt that is sent, on the thread that computes it.
CALLS = 190
# Of one that decode reads; the thread that moves KV has no part in it.
CALLS_OF_AN_OFFER = 170


def calls(work: Callable[..., object], *arguments: object) -> int:
    """How many functions in Python this thread calls, the first one included.

    cProfile counts other threads as well from Python 3.12 on.
    """
    count = 0

    def seen(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # what a collection finds and ends is no part of the work
    sys.setprofile(seen)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("offered", [False, True])
def test_a_prompt_takes_few(*, offered: bool) -> None:
    """300 tokens in 16 layers of 64 KiB a token, which go in three marks or in none."""
    shape = CacheShape(block_tokens=128, kv_heads=8, total_kv_heads=8, head_dim=128)
    names = [f"layers.{index}" for index in range(16)]
    worker = WorkerSide(VllmSettings(), Config.load(), [shape])
    scheduler = SchedulerSide([shape], UNSIGNED)
    blocks = [1, 2, 3]

    def compute(name: str) -> None:
        request = fakes.Request(name, list(range(300)), {"do_remote_decode": True})
        scheduler.begun(request)
        scheduler.matched(request, 0)
        scheduler.allocated(request, [blocks], 0)
        step = scheduler.step(fakes.Output({name: 300}, [fakes.New(name, (blocks,))]))
        worker.fence(step)
        worker.begin_step(step)
        worker.start_loads()
        for layer in names:
            worker.layer_written(layer)
        worker.step_written()
        worker.finished(())
        scheduler.finished(request)

    try:
        worker.register(
            {name: np.zeros((4, 8, 128, 256), np.float16) for name in names}
        )
        compute("the first")  # finds out once which ranks meet
        if offered:
            address = {(0, 0): worker.address}
            scheduler.set_addresses(address, {(0, 0): worker.serial})
        compute("the second")  # draws random numbers for many
        assert calls(compute, "another") <= (CALLS_OF_AN_OFFER if offered else CALLS)
    finally:
        worker.close()


def test_requests_of_others_take_nothing() -> None:
    counts = []
    for others in (0, 100):
        scheduler = SchedulerSide([fakes.SHAPE], UNSIGNED)
        request = fakes.Request("r", steps.TOKENS, {"do_remote_decode": True})
        scheduler.allocated(request, [steps.FROM], 0)
        names = [f"other {number}" for number in range(others)]
        new = [fakes.New(name, ([1],)) for name in ("r", *names)]
        running = fakes.Cached(names, [([2],)] * others, [4] * others)
        tokens = dict.fromkeys(("r", *names), 10)
        counts.append(calls(scheduler.step, fakes.Output(tokens, new, running)))
    assert counts[0] == counts[1]


def test_a_layer_takes_one_call_and_one_more_where_it_is_sent() -> None:
    worker = fakes.Worker(group_bytes=1 << 20)
    try:
        first = fakes.NAMES[0]
        worker.side.begin_step(WorkerStep())
        assert calls(worker.side.layer_written, first) == 1
        worker.side.begin_step(steps.sending(steps.FROM, 10))
        # It waits for its neighbours, and the thread that sends is not woken.
        assert calls(worker.side.layer_written, first) == 2
        worker.side.step_written()
        assert calls(worker.side.layer_written, first) == 1
        assert calls(worker.side.step_written) == 1
    finally:
        worker.close()
