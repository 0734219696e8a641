"""The streams of a device: what is copied which way, and events that are waited for."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from functools import partial

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.device.copy_engine import (
    RUNS_MAX,
    WAITERS_MAX,
    CompletionThread,
    CopyEngine,
    StreamWaiters,
)
from kvwire.memory.device.device_copies import DeviceCopies
from kvwire.memory.device.ops import Event
from tests.support.simulated_device import LibraryEvent, SimulatedArray, SimulatedDevice
from tests.test_aio import no_more_threads

PIECE_BYTES = 64


class Loop:
    """Notes what it is asked to call, and calls it when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.woken = threading.Semaphore(0)

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self.woken.release()

    def turn(self) -> int:
        """Wait to be woken, and call what there is; how often we were woken."""
        self.woken.acquire()
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        return len(calls)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def copy_engine(device: SimulatedDevice, loop: Loop) -> Iterator[CopyEngine]:
    made = CopyEngine(device, loop.call_soon, 100 * PIECE_BYTES)
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


def test_a_lack_of_threads_is_met_before_the_first_copy(
    device: SimulatedDevice, loop: Loop
) -> None:
    """A copy whose end no thread reports would run on, in memory that nothing holds."""
    copies = DeviceCopies()
    with no_more_threads():
        with pytest.raises(BackendUnavailable, match="ulimit -u"):
            CopyEngine(device, loop.call_soon, PIECE_BYTES)
        with pytest.raises(BackendUnavailable, match="ulimit -u"):
            copies.open(device.device)
    array = device.array(np.full((2, PIECE_BYTES), 7, np.uint8))
    slot = device.pinned(PIECE_BYTES)
    engine = CopyEngine(device, loop.call_soon, PIECE_BYTES)
    with no_more_threads():
        engine.to_host(pieces(array, device, 1), slot, lambda _: None)
        loop.turn()
    assert bytes(slot) == bytes([7]) * PIECE_BYTES
    copies.open(device.device)
    engine.close()
    copies.close()


@pytest.mark.parametrize("failed", [False, True])
def test_what_failed_copies_may_touch_outlives_the_engine(
    device: SimulatedDevice, loop: Loop, failed: bool
) -> None:
    engine = CopyEngine(device, loop.call_soon, 100 * PIECE_BYTES)
    slot = np.zeros(8, np.uint8)
    still_there = weakref.ref(slot)
    if failed:
        engine.kept.append(slot.data)
    engine.close()
    del engine, slot
    gc.collect()
    assert (still_there() is not None) is failed


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


class Streams:
    """Streams of callers, each behind a kernel that ends when the test says so."""

    def __init__(self, device: SimulatedDevice, count: int) -> None:
        self.streams = [device.stream() for _ in range(count)]
        self.gates = [threading.Event() for _ in range(count)]
        for stream, gate in zip(self.streams, self.gates, strict=True):
            stream.call(partial(_pass, gate))

    def close(self) -> None:
        for stream, gate in zip(self.streams, self.gates, strict=True):
            gate.set()
            stream.close()


def _note(told: list[str], source: str, error: Exception | None) -> None:
    told.append(source)


def _pass(gate: threading.Event) -> None:
    gate.wait()


@pytest.fixture
def waiters(device: SimulatedDevice, loop: Loop) -> Iterator[StreamWaiters]:
    made = StreamWaiters(device, loop.call_soon)
    yield made
    made.close()


def test_a_kernel_that_never_ends_holds_up_its_own_stream_alone(
    device: SimulatedDevice, loop: Loop, waiters: StreamWaiters
) -> None:
    """However many of its events are waited for."""
    stuck, other = Streams(device, 1), device.stream()
    told: list[str] = []
    for _ in range(2 * WAITERS_MAX):
        waiters.wait(stuck.streams[0].record(), lambda error: told.append("stuck"))
    for _ in range(2 * WAITERS_MAX):
        waiters.wait(other.record(), lambda error: told.append("other"))
    while len(told) < 2 * WAITERS_MAX:
        loop.turn()
    assert set(told) == {"other"}
    stuck.close()
    while len(told) < 4 * WAITERS_MAX:
        loop.turn()
    other.close()


def test_events_whose_stream_is_not_known_wait_with_their_source(
    device: SimulatedDevice, loop: Loop, waiters: StreamWaiters
) -> None:
    stuck, other = Streams(device, 1), device.stream()
    told: list[str] = []
    stream = stuck.streams[0]
    events = [stream.record(), stream.record(), other.record()]
    for event, source in zip(events, ("a", "a", "b"), strict=True):
        done = partial(_note, told, source)
        waiters.wait(LibraryEvent(event), done, source)
    loop.turn()
    assert told == ["b"]
    stuck.close()
    while len(told) < 3:
        loop.turn()
    other.close()


def test_streams_share_threads_when_all_are_taken(
    device: SimulatedDevice, loop: Loop, waiters: StreamWaiters
) -> None:
    """And a thread whose stream has no events left serves another."""
    before = threading.active_count()
    told: list[int] = []
    streams = Streams(device, WAITERS_MAX + 2)
    numbers = range(len(streams.streams))

    def wait(number: int) -> None:
        waiters.wait(
            streams.streams[number].record(), lambda error: told.append(number)
        )

    for number in numbers:
        wait(number)
    # A thread and a stream's thread of the simulated device each.
    assert threading.active_count() - before == len(numbers) + 2 * WAITERS_MAX
    streams.gates[-1].set()
    streams.gates[5].set()
    loop.turn()
    assert told == [5], "the last one waits for the first, with which it shares"
    # The free one takes the next stream.
    late = device.stream()
    waiters.wait(late.record(), lambda error: told.append(-1))
    loop.turn()
    assert told == [5, -1]
    streams.close()
    while len(told) < len(numbers) + 1:
        loop.turn()
    late.close()


def test_an_event_that_cannot_be_watched_does_not_count(
    device: SimulatedDevice,
    loop: Loop,
    waiters: StreamWaiters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its waiter is free for the next stream."""
    told: list[str] = []
    for count in range(2):
        stream = device.stream()
        with monkeypatch.context() as patch:
            patch.setattr(CompletionThread, "watch", _refuse)
            with pytest.raises(RuntimeError, match="no thread"):
                waiters.wait(stream.record(), partial(_note, told, "never"))
        waiters.wait(stream.record(), partial(_note, told, f"{count}"))
        loop.turn()
        stream.close()
    assert told == ["0", "1"]
    assert len(waiters._waiters) == 1


def _refuse(*_: object) -> None:
    raise RuntimeError("no thread")


# --- events that a thread waits for


class Gate(Event):
    """Fires when it is told to."""

    def __init__(self) -> None:
        self._fired = threading.Event()
        self.asleep = threading.Event()
        self.error: Exception | None = None

    @property
    def recorded_on(self) -> Hashable:
        return self

    def fire(self, error: Exception | None = None) -> None:
        self.error = error
        self._fired.set()

    def query(self) -> bool:
        return self._fired.is_set()

    def synchronize(self) -> None:
        self.asleep.set()
        self._fired.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def completions(loop: Loop) -> Iterator[CompletionThread]:
    made = CompletionThread("completions", loop.call_soon)
    yield made
    made.close()


def test_one_wake_up_for_a_batch(loop: Loop, completions: CompletionThread) -> None:
    told: list[int] = []
    gates = [Gate() for _ in range(50)]
    for number, gate in enumerate(gates):
        completions.watch(gate, lambda error, number=number: told.append(number))  # type: ignore[misc]
    for gate in reversed(gates):
        gate.fire()
    gates[-1].asleep.wait()
    wakes = 0
    while len(told) < len(gates):
        wakes += loop.turn()
    assert told == list(range(50))
    assert wakes <= 2, "the last one may be late"


def test_what_has_fired_does_not_wait_for_what_has_not(
    loop: Loop, completions: CompletionThread
) -> None:
    told: list[str] = []
    early, late = Gate(), Gate()
    completions.watch(early, lambda error: told.append("early"))
    completions.watch(late, lambda error: told.append("late"))
    early.fire()
    loop.turn()
    assert told == ["early"]
    late.fire()
    loop.turn()
    assert told == ["early", "late"]


def test_a_failure_is_reported_and_not_the_end(
    loop: Loop, completions: CompletionThread
) -> None:
    """One that is waited for fails, and one that others hold up."""
    told: list[Exception | None] = []
    first, second, third = Gate(), Gate(), Gate()
    error = RuntimeError("an illegal memory access")
    completions.watch(first, told.append)
    first.asleep.wait()
    completions.watch(second, told.append)
    completions.watch(third, told.append)
    second.fire(error)
    third.fire()
    first.fire(error)
    while len(told) < 3:
        loop.turn()
    assert told == [error, error, None]


def test_who_raises_takes_nothing_from_the_others(
    loop: Loop, completions: CompletionThread, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be of other connections, whose memory would be held for ever."""
    told: list[Exception | None] = []

    def bug(_: Exception | None) -> None:
        raise ZeroDivisionError("planted")

    gates = [Gate() for _ in range(3)]
    completions.watch(gates[0], told.append)
    gates[0].asleep.wait()
    completions.watch(gates[1], bug)
    completions.watch(gates[2], told.append)
    for gate in reversed(gates):
        gate.fire()
    while len(told) < 2:
        loop.turn()
    assert told == [None, None]
    assert "planted" in caplog.text


def test_close_waits_for_what_is_watched(loop: Loop) -> None:
    completions = CompletionThread("completions", loop.call_soon)
    gate = Gate()
    told: list[Exception | None] = []
    completions.watch(gate, told.append)
    completions.close()
    gate.fire()
    loop.turn()
    assert told == [None]


def test_a_closed_loop_is_no_error() -> None:
    closed = threading.Event()

    def call_soon(call: Callable[[], None]) -> None:
        closed.set()
        raise RuntimeError("Event loop is closed")

    completions = CompletionThread("completions", call_soon)
    gate = Gate()
    gate.fire()
    told: list[Exception | None] = []
    completions.watch(gate, told.append)
    closed.wait()
    completions.close()
    assert told == []
