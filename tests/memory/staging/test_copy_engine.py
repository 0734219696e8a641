"""The streams of a device: what is copied which way, and events that are waited for."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvwire.kv.fragments import Fragments
from kvwire.memory.device.rows import RUNS_MAX
from kvwire.memory.staging.copy_engine import CopyEngine, StreamWaiters
from tests.support.simulated_device import SimulatedArray, SimulatedDevice

PIECE_BYTES = 64


class Loop:
    """Calls what it was given when the test lets it turn."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def turn(self) -> None:
        self.calls.get()()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    yield made
    made.close()


@pytest.fixture
def copy_engine(device: SimulatedDevice, loop: Loop) -> Iterator[CopyEngine]:
    made = CopyEngine(device, loop.calls.put, 100 * PIECE_BYTES)
    yield made
    # Its streams are done before their memory ends.
    for way in (made.outbound, made.inbound):
        way.stream.record().synchronize()
    made.close()


def pieces(array: SimulatedArray, device: SimulatedDevice, count: int) -> Fragments:
    """Every other piece of an array, backwards."""
    indices = np.arange(count, dtype=np.uint64)[::-1] * np.uint64(2)
    return Fragments(
        indices * np.uint64(PIECE_BYTES) + np.uint64(array.data_ptr()),
        np.full(count, PIECE_BYTES, np.uint64),
        owner=array,
        writable=True,
        device=device.device,
    )


@pytest.mark.parametrize("count", [1, RUNS_MAX, RUNS_MAX + 1, 100])
def test_out_of_the_device_and_into_it(
    device: SimulatedDevice, loop: Loop, copy_engine: CopyEngine, count: int
) -> None:
    """Copied piece by piece or by way of a gather: the same bytes."""
    values = np.random.default_rng(count).integers(0, 256, (200, PIECE_BYTES), np.uint8)
    source, target = device.array(values), device.array(np.zeros_like(values))
    slot = device.pinned(count * PIECE_BYTES)
    told: list[Exception | None] = []
    copy_engine.to_host(pieces(source, device, count), slot, told.append)
    loop.turn()
    assert told == [None]
    assert bytes(slot) == values[: 2 * count : 2][::-1].tobytes()
    copy_engine.to_device(slot, pieces(target, device, count), told.append)
    loop.turn()
    assert told == [None, None]
    result = target.read()
    assert np.array_equal(result[: 2 * count : 2], values[: 2 * count : 2])
    assert not result[1::2].any()


def test_one_buffer_serves_all_that_is_queued(
    device: SimulatedDevice, loop: Loop, copy_engine: CopyEngine
) -> None:
    """The stream's order keeps one gather from overwriting the one before."""
    values = np.random.default_rng(0).integers(0, 256, (200, PIECE_BYTES), np.uint8)
    array, told = device.array(values), list[Exception | None]()
    slots = [device.pinned(n * PIECE_BYTES) for n in (100, 50, 20)]
    device.hold()
    for slot, count in zip(slots, (100, 50, 20), strict=True):
        copy_engine.to_host(pieces(array, device, count), slot, told.append)
    device.release()
    while len(told) < 3:
        loop.turn()
    for slot, count in zip(slots, (100, 50, 20), strict=True):
        assert bytes(slot) == values[: 2 * count : 2][::-1].tobytes()


def test_what_has_landed_has_an_event(
    device: SimulatedDevice, loop: Loop, copy_engine: CopyEngine
) -> None:
    copy_engine.landed.synchronize()  # of nothing, before anything has
    array, told = device.array(np.zeros(64, np.uint8)), list[Exception | None]()
    copy_engine.to_device(
        device.pinned(PIECE_BYTES), pieces(array, device, 1), told.append
    )
    loop.turn()
    assert copy_engine.landed.query()
    assert copy_engine.landed is copy_engine.inbound.last


def test_the_events_of_one_producer_hold_up_no_other(
    device: SimulatedDevice, loop: Loop
) -> None:
    waiters = StreamWaiters(device, loop.calls.put)
    slow, fast, told = device.stream(), device.stream(), list[str]()
    gate = device.stream()
    device.hold()
    gate.call(lambda: None)
    slow.wait(gate.record())
    waiters.wait(waiters.assign(), slow.record(), lambda error: told.append("slow"))
    waiters.wait(waiters.assign(), fast.record(), lambda error: told.append("fast"))
    loop.turn()
    assert told == ["fast"]
    device.release()
    loop.turn()
    assert told == ["fast", "slow"]
    waiters.close()
    for stream in (slow, fast, gate):
        stream.close()
