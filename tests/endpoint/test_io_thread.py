"""A thread with a loop: calls from anywhere, and an end that forgets nobody."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest

import kvwire
from kvwire.endpoint import io_thread
from kvwire.endpoint.io_thread import IOThread, called
from tests.support.interrupts import interrupts
from tests.support.waiting import eventually
from tests.test_aio import no_more_threads


@pytest.fixture
def thread() -> Iterator[IOThread]:
    made = begun()
    yield made
    made.close()


def begun(**waits: float) -> IOThread:
    made = IOThread("test-io", **waits)
    made.begin()
    return made


async def _three() -> int:
    await asyncio.sleep(0)
    return 3


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.skipif(sys.platform != "linux", reason="names are read from /proc")
def test_the_kernel_knows_its_name(thread: IOThread) -> None:
    tid = thread.run(called(threading.get_native_id))
    assert Path(f"/proc/self/task/{tid}/comm").read_text() == "test-io\n"


def test_what_a_call_returns_is_held_by_nobody(thread: IOThread) -> None:
    """Not even until the next garbage collection, which an engine may have put off."""

    async def made() -> threading.Event:
        return threading.Event()

    gc.disable()
    try:
        held = weakref.ref(thread.run(made()))
        assert eventually(lambda: held() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error", [ValueError("x"), TimeoutError("its own"), kvwire.HandshakeError("y")]
)
def test_an_error_passes_through(thread: IOThread, error: Exception) -> None:
    """Even if it looks like a wait that took too long."""

    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        thread.run(fail(), 10)
    assert caught.value.args == error.args


def test_a_call_that_takes_too_long_is_cancelled(thread: IOThread) -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await _for_ever()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
        thread.run(work(), 0.01)
    assert cancelled.is_set()


def test_an_interrupted_call_has_ended(thread: IOThread) -> None:
    """However many turns of the loop its end takes."""
    ended = threading.Event()

    async def work() -> None:
        interrupt()
        try:
            await _for_ever()
        finally:
            for _ in range(1000):
                await asyncio.sleep(0)
            ended.set()

    with interrupts() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            thread.run(work())
        assert ended.is_set()
    assert thread.run(_three()) == 3


def test_a_second_interrupt_does_not_wait_for_the_end(
    thread: IOThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()
    ended = threading.Event()

    async def work() -> None:
        interrupt()
        try:
            await _for_ever()
        finally:
            await go_on.wait()
            ended.set()

    def second(_: object) -> None:
        raise KeyboardInterrupt

    with interrupts() as interrupt:
        monkeypatch.setattr(concurrent.futures, "wait", second)
        with pytest.raises(KeyboardInterrupt):
            thread.run(work())
        assert not ended.is_set()
    thread.post(go_on.set)
    assert ended.wait(10)


def test_its_own_thread_cannot_wait_for_it(thread: IOThread) -> None:
    """It would wait for itself for ever."""

    async def call_back() -> None:
        thread.run(_three())

    with pytest.raises(kvwire.UsageError, match="own thread"):
        thread.run(call_back())
    with pytest.raises(kvwire.UsageError, match="own thread"):
        thread.run(called(thread.close))
    assert thread.run(_three()) == 3


def test_what_ends_it_runs_first_and_can_be_called_meanwhile() -> None:
    """Those who wait while it ends still learn how it ended."""
    thread = begun()
    steps: list[str] = []
    ending, go_on = threading.Event(), asyncio.Event()

    async def end() -> None:
        ending.set()
        await go_on.wait()
        steps.append("end")

    thread.at_end(end, 10)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(thread.close)
        assert ending.wait(10)
        assert thread.run(_three()) == 3
        thread.post(go_on.set)
        closing.result(10)
    assert steps == ["end"]


def test_a_call_that_never_ends_is_told_of_the_close() -> None:
    thread = begun(timeout_s=0.01)
    began = threading.Event()

    async def wait() -> None:
        began.set()
        await _for_ever()

    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(thread.run, wait())
        assert began.wait(10)
        thread.close()
        with pytest.raises(kvwire.ClosedOK):
            waiting.result(10)


QUICK = {"timeout_s": 0.1, "slack_s": 0.1}


def test_a_task_that_swallows_its_cancellation_is_named_and_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody waits for it for ever, neither the close nor whoever wants its result."""
    thread = begun(**QUICK)
    began = threading.Event()
    let_go = False

    async def stubborn() -> None:
        began.set()
        while not let_go:
            with suppress(asyncio.CancelledError):
                await _for_ever()

    result = thread.start(stubborn())
    assert began.wait(10)
    thread.close()
    assert result.cancelled()
    assert wait([result], timeout=10).done == {result}
    assert "these tasks were cancelled and have not ended" in caplog.text
    assert "stubborn" in caplog.text
    let_go = True
    gc.collect()


def test_a_task_that_swallows_one_cancellation_ends_by_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = begun(**QUICK)

    async def once() -> int:
        with suppress(asyncio.CancelledError):
            await _for_ever()
        await _for_ever()
        return 1

    result = thread.start(once())
    thread.close()
    assert result.cancelled()
    assert not caplog.text


def test_an_end_that_does_not_end_is_cancelled() -> None:
    thread = begun(**QUICK)
    thread.at_end(_for_ever, 0.1)
    thread.close()
    assert thread.ended


def test_a_loop_that_stands_still_is_named_and_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as one whose program blocks it; the thread ends once it may."""
    thread = begun(**QUICK)
    go_on = threading.Event()

    def block() -> None:
        go_on.wait(30)

    thread.post(block)
    thread.close()
    assert "test-io does not end: its event loop is blocked, at" in caplog.text
    assert not thread.ended
    go_on.set()
    thread._thread.join(10)
    assert thread.ended


def test_work_in_a_thread_of_the_loops_is_waited_for_and_then_left() -> None:
    go_on = threading.Event()
    thread = begun(**QUICK)
    result = thread.start(asyncio.to_thread(go_on.wait, 30))
    thread.close()
    assert result.cancelled()
    go_on.set()


def test_calls_that_race_with_the_close_end_one_way_or_the_other() -> None:
    """Each has its result or ClosedOK; none is lost in the queue of the loop."""
    for _ in range(20):
        thread = begun()
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(_call_until_closed, thread) for _ in range(3)]
            pool.submit(thread.close)
            for call in calls:
                assert isinstance(call.result(10), kvwire.ClosedOK)


def _call_until_closed(thread: IOThread) -> Exception:
    while True:
        try:
            assert thread.run(_three()) == 3
        except kvwire.ClosedOK as exc:
            return exc


def test_an_end_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the thread's own, which Python reports as any thread's."""
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    thread = begun()

    async def end() -> None:
        raise RuntimeError("planted")

    thread.at_end(end, 10)
    thread.close()
    assert thread.ended
    assert "planted" in str(reported[0].exc_value)


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no loop is made for it either."""

    made: list[object] = []
    monkeypatch.setattr(io_thread, "_new_loop", lambda: made.append(None))
    with (
        no_more_threads(),
        pytest.raises(kvwire.BackendUnavailable, match=r"kvwire-engine: .*ulimit -u"),
    ):
        kvwire.Engine()
    assert not made


def test_no_loop_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins the thread learns why, and nothing is left of it."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(io_thread, "_new_loop", refuse)
    with pytest.raises(kvwire.BackendUnavailable, match=r"open files.*ulimit -n"):
        kvwire.Engine()
    assert "kvwire-engine" not in {each.name for each in threading.enumerate()}


def test_it_can_begin_to_close_from_anywhere(thread: IOThread) -> None:
    """Also from its own thread, where the garbage collector may run."""
    assert thread.run(called(thread.begin_close))
    assert not thread.begin_close()
    thread.close()
    gc.collect()
