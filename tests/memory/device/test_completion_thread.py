"""A completion thread reports events once, in order; many wake the loop once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvwire.memory.device.completion_thread import CompletionThread
from kvwire.memory.device.ops import Event


class Gate(Event):
    """Fires when it is told to."""

    def __init__(self) -> None:
        self.native = self
        self._fired = threading.Event()
        self.asleep = threading.Event()
        self.error: Exception | None = None

    def fire(self, error: Exception | None = None) -> None:
        self.error = error
        self._fired.set()

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self._fired.is_set()

    def synchronize(self) -> None:
        self.asleep.set()
        self._fired.wait()
        if self.error is not None:
            raise self.error


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
def completions(loop: Loop) -> Iterator[CompletionThread]:
    made = CompletionThread("completions", loop.call_soon)
    yield made
    made.close()


def test_one_wake_up_for_a_batch(loop: Loop, completions: CompletionThread) -> None:
    told: list[int] = []
    gates = [Gate() for _ in range(50)]
    for number, gate in enumerate(gates):
        completions.watch(gate, lambda error, number=number: told.append(number))  # type: ignore[misc]
    gates[0].asleep.wait()
    for gate in reversed(gates):
        gate.fire()
    wakes = 0
    while len(told) < len(gates):
        wakes += loop.turn()
    assert told == list(range(50))
    assert wakes == 1
    assert completions.watched == 0


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
    told: list[Exception | None] = []
    broken, fine = Gate(), Gate()
    error = RuntimeError("an illegal memory access")
    completions.watch(broken, told.append)
    broken.fire(error)
    loop.turn()
    completions.watch(fine, told.append)
    fine.fire()
    loop.turn()
    assert told == [error, None]


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


def test_events_that_failed_while_others_were_reported(
    loop: Loop, completions: CompletionThread
) -> None:
    """One that says of itself, when asked, that it failed."""
    told: list[Exception | None] = []
    first, second = Gate(), Gate()
    error = RuntimeError("gone")
    completions.watch(first, told.append)
    first.asleep.wait()
    completions.watch(second, told.append)
    second.fire(error)
    first.fire()
    while len(told) < 2:
        loop.turn()
    assert told == [None, error]


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


def test_no_thread_before_the_first_event() -> None:
    before = threading.active_count()
    completions = CompletionThread("completions", lambda call: None)
    assert threading.active_count() == before
    completions.close()
