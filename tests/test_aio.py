"""Deadlines, pauses, and ends that no cancellation cuts short."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from kvwire import Instant, UsageError, aio
from kvwire.aio import gather_all, run_to_completion
from tests.support.pairs import turns
from tests.support.scopes import in_scope


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_none_is_no_deadline() -> None:
    assert aio.absolute(None) is None


async def test_an_instant_of_the_loop_stays_what_it_is() -> None:
    at = now() + 2
    assert aio.absolute(Instant(at)) == at


@pytest.mark.parametrize(
    "deadline", [0, 0.25, 2, 215.0, 1e9, timedelta(seconds=2), timedelta(days=4000)]
)
async def test_a_number_counts_from_now(deadline: float | timedelta) -> None:
    """However long the host has been up: 215 is above the clock of a young one."""
    seconds = deadline.total_seconds() if isinstance(deadline, timedelta) else deadline
    before = now()
    found = aio.absolute(deadline)
    assert found is not None
    assert before + seconds <= found <= now() + seconds


@pytest.mark.parametrize("deadline", [np.float32(2), np.int64(2)])
async def test_numbers_of_any_type(deadline: float) -> None:
    before = now()
    found = aio.absolute(deadline)
    assert found is not None
    assert before + 2 <= found <= now() + 2


@pytest.mark.parametrize("deadline", ["5", b"5", "soon", True, False, np.True_])
async def test_what_is_no_number_is_refused(deadline: Any) -> None:
    """Though ``float`` takes most of these."""
    with pytest.raises(UsageError, match=r"seconds from now \(2.0\), a timedelta, or"):
        aio.absolute(deadline)


@pytest.mark.parametrize(
    "deadline",
    [
        *(-1.0, math.nan, math.inf, -math.inf, 10**400, timedelta(seconds=-1)),
        *(Instant(-1.0), Instant(math.nan), Instant("5")),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_time_is_refused(
    deadline: float | timedelta | Instant,
) -> None:
    with pytest.raises(UsageError, match="deadline="):
        aio.absolute(deadline)


@pytest.mark.parametrize("seconds", [2, 0.5, np.float32(0.5), np.int64(2)])
def test_seconds_of_any_type(seconds: Any) -> None:
    found = aio.seconds_of("lease_s", seconds)
    assert (found, type(found)) == (float(seconds), float)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, 10**400, True, "5", None])
def test_what_is_no_number_of_seconds(seconds: Any) -> None:
    said = f"lease_s={seconds!r:.80}: pass a number of seconds above 0"
    with pytest.raises(UsageError, match=said):
        aio.seconds_of("lease_s", seconds)


async def test_what_is_cancelled_is_finished_first() -> None:
    go, done = asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        done.append(True)

    waiting = asyncio.create_task(run_to_completion(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    assert not waiting.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done


async def test_what_is_cancelled_itself_says_so() -> None:
    inner = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(run_to_completion(inner))
    await asyncio.sleep(0)
    inner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_scope_that_cancels_again_does_not_reach_what_is_finished() -> None:
    """In the task that is cancelled, the same ends at its first await."""
    ends: list[str] = []

    async def end(name: str) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ends.append(name)

    async def use() -> None:
        try:
            try:
                await asyncio.Event().wait()
            finally:
                await end("plain")
        finally:
            await run_to_completion(end("finished"))

    await in_scope(3, use)
    assert ends == ["finished"]


@pytest.mark.parametrize("how", [KeyError, asyncio.CancelledError])
async def test_nothing_goes_on_after_an_error_of_one_or_a_cancel_of_all(
    how: type[BaseException],
) -> None:
    """Or it would touch memory that its caller takes for free."""
    go, ended = asyncio.Event(), list[bool]()

    async def fails() -> None:
        raise KeyError("one")

    async def works() -> None:
        try:
            await go.wait()
        finally:
            await go.wait()
            ended.append(True)

    also = [fails()] if how is KeyError else []
    both = asyncio.create_task(gather_all(works(), *also, works()))
    await turns(4)
    if how is not KeyError:
        both.cancel()
    await turns(4)
    early = both.done()
    go.set()
    with pytest.raises(how):
        await both
    assert (early, ended) == (False, [True, True])


# --- threads --------------------------------------------------------------------------


@contextmanager
def no_more_threads() -> Iterator[None]:
    """A thread would need a larger stack than there are addresses."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_a_call_that_no_thread_takes_is_refused_and_never_made() -> None:
    """Its memory belongs to others by the time that there are threads again."""
    made: list[str] = []
    with aio.CallThreads(2) as threads:
        with no_more_threads(), pytest.raises(OSError, match="no thread") as refused:
            threads.submit(made.append, "refused")
        assert "pids.max" in "".join(refused.value.__notes__)
        threads.submit(made.append, "later").result()
    assert made == ["later"]
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(made.append, "closed")


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_has_no_thread_of_its_own_is_made_by_another_one(
    fails: bool,
) -> None:
    go = threading.Event()
    with aio.CallThreads(2) as threads:
        first = threads.submit(go.wait)
        with no_more_threads():
            second = threads.submit(int, "no number" if fails else "7")
        go.set()
        assert first.result()
        if fails:
            with pytest.raises(ValueError, match="no number"):
                second.result()
        else:
            assert second.result() == 7


@pytest.mark.asyncio(loop_factories=["asyncio"])  # uvloop has threads of its own
async def test_a_name_that_no_thread_looks_up_is_an_error_of_the_system() -> None:
    """Those who follow a directory try again after such an error, and only then."""
    with no_more_threads(), pytest.raises(OSError, match="no thread can be started"):
        await aio.look_up("localhost", 1)
    assert await aio.look_up("127.0.0.1", 1)
