"""The thread of one direction: what it does when, and what the loop hears of it.

The loop is a queue of calls that the test makes itself, and the communicator says what
the test tells it to, so each test says how far everything has come.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from kvwire.backend import Payload
from kvwire.limits import WAKEUP_BYTES
from kvwire_nccl.direction_state import MOVES_MAX, DirectionState, PayloadMove
from kvwire_nccl.driver import Driver
from kvwire_nccl.pipe import Move, MoveFailed, MoveProgress, Pipe
from tests.support.logs import logged

# Below the timeout of a test, which would end the whole run.
_PATIENCE_S = 10.0
GONE = "gone"
BROKEN = MoveFailed("the peer's GPU has fallen off the bus")


class Loop:
    """What a driver says to its loop.

    Attributes:
        heard: Tokens of jobs that are done, in order, and then ``GONE``.
        batches: How many came with each call.
        error: What ``GONE`` came with.
        closed: Refuses calls, as a loop that is closed does.
    """

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.batches: list[int] = []
        self.error: Exception | None = None
        self.closed = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def call_soon(self, call: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self._calls.put(call)

    def until(self, count: int) -> None:
        """Make call after call until so much was heard."""
        while len(self.heard) < count:
            self._calls.get(timeout=_PATIENCE_S)()

    @property
    def silent(self) -> bool:
        """Whether nothing more was said."""
        return self._calls.empty()

    def moved(self, jobs: list[PayloadMove]) -> None:
        self.batches.append(len(jobs))
        self.heard += [job.token for job in jobs]

    def gone(self, error: Exception | None) -> None:
        self.heard.append(GONE)
        self.error = error


class Wire(Pipe):
    """A communicator that does what the test says.

    Attributes:
        up: Lets it come up.
        done: So many of the moves handed to it are done.
        fails: Raised by the calls of these names.
        handed: Tells how many moves it has, each time.
        aborted: Set once its abort has returned.
    """

    def __init__(self) -> None:
        self.up = True
        self.done = 0
        self.fails: dict[str, Exception] = {}
        self.handed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.aborted = threading.Event()
        self._count = 0

    def begin(self) -> None:
        self._call("begin")

    def is_up(self) -> bool:
        self._call("is_up")
        return self.up

    def move(self, payload: Payload | None, nbytes: int) -> Move:
        self._call("move")
        self._count += 1
        self.handed.put(self._count)
        return WireMove(self, self._count)

    def check(self) -> None:
        self._call("check")

    def abort(self) -> None:
        self._call("abort")
        self.aborted.set()

    def handed_over(self, count: int) -> None:
        """Wait until it has so many moves."""
        while self.handed.get(timeout=_PATIENCE_S) < count:
            pass

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]


class WireMove(Move):
    """The ``number``-th move of a wire, from 1."""

    def __init__(self, wire: Wire, number: int) -> None:
        self.wire = wire
        self.number = number

    def progress(self) -> MoveProgress:
        return (
            MoveProgress.DONE
            if self.number <= self.wire.done
            else MoveProgress.LAUNCHED
        )


class Driven:
    """A driver, its wire, and its loop."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.loop = Loop()
        self.driver = Driver(
            self.wire,
            DirectionState(start_timeout_s=_PATIENCE_S, move_timeout_s=_PATIENCE_S),
            "kvwire nccl test",
            call_soon=self.loop.call_soon,
            moved=self.loop.moved,
            gone=self.loop.gone,
        )

    def ended(self) -> None:
        """The thread is no more."""
        self.driver._thread.join(_PATIENCE_S)
        assert not self.driver._thread.is_alive()


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven()
    yield made
    if made.driver._thread.ident is not None:
        made.driver.abort()
        made.ended()


def jobs(count: int, nbytes: int = 100) -> list[PayloadMove]:
    return [PayloadMove(None, nbytes, number) for number in range(count)]


def test_what_is_moved_is_told_in_order_and_the_end_last_of_all(driven: Driven) -> None:
    driven.wire.done = 3
    driven.driver.start()
    driven.driver.submit(jobs(2))
    driven.driver.submit([PayloadMove(None, 100, "last")])
    driven.driver.close()
    driven.loop.until(4)
    assert driven.loop.heard == [0, 1, "last", GONE]
    assert driven.loop.error is None
    assert driven.wire.aborted.is_set()
    driven.ended()
    assert driven.loop.silent


def test_what_is_submitted_before_the_start_waits_for_it(driven: Driven) -> None:
    driven.wire.up, driven.wire.done = False, 1
    driven.driver.submit(jobs(1))
    driven.driver.start()
    assert driven.wire.handed.empty()
    driven.wire.up = True
    driven.loop.until(1)
    assert driven.loop.heard == [0]


def test_a_few_are_handed_to_the_library_at_once_and_no_more(driven: Driven) -> None:
    """The rest waits here, where an abort has nothing to wait for."""
    driven.driver.start()
    driven.driver.submit(jobs(MOVES_MAX + 5))
    driven.wire.handed_over(MOVES_MAX)
    driven.wire.done = 1
    driven.wire.handed_over(MOVES_MAX + 1)
    driven.loop.until(1)
    assert driven.wire.handed.empty()
    driven.wire.done = MOVES_MAX + 5
    driven.loop.until(MOVES_MAX + 5)
    assert driven.loop.heard == list(range(MOVES_MAX + 5))


def test_a_burst_is_told_in_parts_that_leave_the_loop_its_turns(driven: Driven) -> None:
    """Each as much as one wake-up may handle; nothing is told twice or left out."""
    count = 3 * MOVES_MAX
    driven.wire.done = count
    driven.driver.start()
    driven.driver.submit(jobs(count, nbytes=WAKEUP_BYTES))
    driven.driver.close()
    driven.ended()
    driven.loop.until(count + 1)
    assert driven.loop.heard == [*range(count), GONE]
    assert set(driven.loop.batches) == {1}


@pytest.mark.parametrize("call", ["begin", "is_up", "move", "check"])
def test_a_library_that_fails_ends_the_direction_with_its_reason(
    driven: Driven, call: str
) -> None:
    """Only once the communicator is aborted: until then it may touch memory."""
    driven.wire.fails[call] = BROKEN
    driven.driver.submit(jobs(1))
    driven.driver.start()
    driven.loop.until(1)
    assert driven.loop.heard == [GONE]
    assert driven.loop.error is BROKEN
    assert driven.wire.aborted.is_set()


def test_an_abort_ends_what_is_under_way_and_what_waits(driven: Driven) -> None:
    driven.driver.start()
    driven.driver.submit(jobs(MOVES_MAX + 3))
    driven.wire.handed_over(MOVES_MAX)
    driven.driver.abort()
    driven.driver.abort(BROKEN)
    driven.loop.until(1)
    assert driven.loop.heard == [GONE]
    assert driven.loop.error is None
    driven.driver.submit(jobs(1))
    driven.ended()
    assert driven.loop.silent


def test_an_abort_that_fails_leaves_the_memory_in_quarantine(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is told that it is free, for nobody knows; the log says why."""
    driven.wire.fails["abort"] = BROKEN
    driven.driver.start()
    driven.driver.submit(jobs(1))
    driven.wire.handed_over(1)
    driven.driver.abort()
    driven.ended()
    assert driven.loop.silent
    (record,) = logged(caplog)
    assert record.levelno == logging.ERROR
    assert "stays in quarantine" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is BROKEN


def test_a_loop_that_is_gone_is_nobody_to_tell(driven: Driven) -> None:
    """The thread ends all the same, and takes its communicator with it."""
    driven.loop.closed = True
    driven.wire.done = 1
    driven.driver.start()
    driven.driver.submit(jobs(1))
    driven.driver.close()
    driven.ended()
    assert driven.wire.aborted.is_set()


def test_a_system_without_threads_says_so_at_the_start(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        driven.driver.start()
