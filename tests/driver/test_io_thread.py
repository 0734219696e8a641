"""A thread with a loop: calls from anywhere, and an end that forgets nobody."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import kvwire
from kvwire.driver import io_thread
from kvwire.driver.io_thread import IOThread


@pytest.fixture
def thread() -> Iterator[IOThread]:
    made = IOThread("test-io")
    yield made
    made.close()


async def _three() -> int:
    await asyncio.sleep(0)
    return 3


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.skipif(sys.platform != "linux", reason="names are read from /proc")
def test_the_kernel_knows_its_name(thread: IOThread) -> None:
    tid = thread.run(threading.get_native_id)
    assert Path(f"/proc/self/task/{tid}/comm").read_text() == "test-io\n"


@pytest.mark.parametrize(
    "error", [ValueError("x"), TimeoutError("its own"), kvwire.HandshakeError("y")]
)
def test_an_error_passes_through(thread: IOThread, error: Exception) -> None:
    """Even if it looks like a wait that took too long."""

    async def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        thread.call(fail(), timeout=10)
    assert caught.value.args == error.args


def test_a_call_that_takes_too_long_is_cancelled(thread: IOThread) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await _for_ever()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match=r"not within 0\.01 s"):
        thread.call(wait(), timeout=0.01)
    assert cancelled.wait(10)


def test_its_own_thread_cannot_wait_for_it(thread: IOThread) -> None:
    """It would wait for itself for ever."""

    async def call_back() -> None:
        thread.call(_three())

    with pytest.raises(kvwire.UsageError, match="own thread"):
        thread.call(call_back())
    with pytest.raises(kvwire.UsageError, match="own thread"):
        thread.run(thread.close)
    assert thread.call(_three()) == 3


def test_what_ends_it_runs_first_and_can_be_called_meanwhile() -> None:
    """Those who wait while it ends still learn how it ended."""
    thread = IOThread("test-io")
    steps: list[str] = []
    ending, go_on = threading.Event(), asyncio.Event()

    async def end() -> None:
        ending.set()
        await go_on.wait()
        steps.append("end")

    thread.at_end(end)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(thread.close)
        assert ending.wait(10)
        assert thread.call(_three()) == 3
        thread.post(go_on.set)
        closing.result(10)
    assert steps == ["end"]


def test_a_call_that_never_ends_is_told_of_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_thread, "CLOSE_TIMEOUT_S", 0.01)
    thread = IOThread("test-io")
    began = threading.Event()

    async def wait() -> None:
        began.set()
        await _for_ever()

    with ThreadPoolExecutor(1) as pool:
        waiting: Future[None] = pool.submit(thread.call, wait())
        assert began.wait(10)
        thread.close()
        with pytest.raises(kvwire.ClosedOK):
            waiting.result(10)


def test_calls_that_race_with_the_close_end_one_way_or_the_other() -> None:
    """Each has its result or ClosedOK; none is lost in the queue of the loop."""
    for _ in range(20):
        thread = IOThread("test-io")
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(_call_until_closed, thread) for _ in range(3)]
            pool.submit(thread.close)
            for call in calls:
                assert isinstance(call.result(10), kvwire.ClosedOK)


def _call_until_closed(thread: IOThread) -> Exception:
    while True:
        try:
            assert thread.call(_three()) == 3
        except kvwire.ClosedOK as exc:
            return exc


def test_an_end_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the thread's own, which Python reports as any thread's."""
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    thread = IOThread("test-io")

    async def end() -> None:
        raise RuntimeError("planted")

    thread.at_end(end)
    thread.close()
    assert thread.ended
    assert "planted" in str(reported[0].exc_value)


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that was made for it is closed again."""
    made: list[asyncio.AbstractEventLoop] = []
    new_loop: Callable[[], asyncio.AbstractEventLoop] = io_thread._new_loop

    def remember() -> asyncio.AbstractEventLoop:
        made.append(new_loop())
        return made[-1]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(io_thread, "_new_loop", remember)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        IOThread("test-io")
    assert made[0].is_closed()


def test_it_can_begin_to_close_from_anywhere(thread: IOThread) -> None:
    """Also from its own thread, where the garbage collector may run."""
    assert thread.run(thread.begin_close)
    assert not thread.begin_close()
    thread.close()
    gc.collect()
