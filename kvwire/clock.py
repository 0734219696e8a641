"""Deadlines and pauses on the loop's clock, turns for others, and sure ends.

An operation that fails at once lets the loop run before it raises. Programs try again
in a loop: ``while True: try: await connection.recv(tag) except RequestError:
continue``. An ``await`` that fails without suspending its task would keep such a loop
running and nothing else, no timer and no other connection, for as long as the reason
lasts. So every awaitable of the public API that can fail gives the event loop one turn
before it raises.
"""

from __future__ import annotations

import asyncio
import functools
import math
import numbers
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from kvwire.errors import UsageError
from kvwire.types import Deadline, Instant

P = ParamSpec("P")
T = TypeVar("T")


def absolute(deadline: Deadline) -> float | None:
    """Return the deadline as a time of the running loop's clock.

    Raises:
        UsageError: It is neither seconds from now nor an instant, or below 0.
    """
    if deadline is None:
        return None
    now = 0.0
    if isinstance(deadline, Instant):
        seconds = _number(deadline.time)
    else:
        now = asyncio.get_running_loop().time()
        if isinstance(deadline, timedelta):
            seconds = deadline.total_seconds()
        else:
            seconds = _number(deadline)
    if not math.isfinite(seconds) or seconds < 0:
        raise UsageError(
            f"deadline={deadline!r}: pass a number of seconds from now (2.0), a "
            f"timedelta, or kvwire.Instant(loop.time() + 2)"
        )
    return now + seconds


def seconds_of(name: str, value: object) -> float:
    """Return a duration that a caller gives, of any type of number.

    Raises:
        UsageError: It is no number, or not above 0.
    """
    seconds = _number(value)
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name}={value!r}: a number of seconds above 0")
    return seconds


def _number(value: object) -> float:
    """Return a number of any type as a float; ``float`` itself reads texts and bools.

    A value that is not a number becomes NaN.
    """
    if type(value) is float:  # nearly always, and a check of ``Real`` is four calls
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


async def at_most(
    timeout_s: float, coroutines: Iterable[Coroutine[Any, Any, None]]
) -> None:
    """Run coroutines side by side; what is not through in time is cancelled.

    Cancel safety: all of them are cancelled as well.
    """
    tasks = [start_task(coroutine) for coroutine in coroutines]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def start_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that begins in a later turn of the running loop, never in this one.

    ``loop.create_task`` asks the application's task factory, and that of
    ``asyncio.eager_task_factory`` (Python 3.12) takes the first step at once: before
    the caller has noted the task, or has done what the task relies on. Every task of
    kvwire is started here, so all code can rely on it.
    """
    return asyncio.Task(coroutine, loop=asyncio.get_running_loop())


async def run_to_completion(work: Awaitable[T]) -> T:
    """Run something to its end, whether its caller is cancelled meanwhile or not.

    A coroutine gets a task of its own, so no cancellation of the caller reaches it.
    asyncio cancels a task once. A cancel scope of anyio, so of Starlette and FastAPI,
    cancels it again at every ``await`` until the scope is left: a clean-up that awaits
    in the caller's task ends at its first ``await`` there. So each ``__aexit__``, and
    each ``except BaseException`` that has to await, closes things by way of this.

    Cancel safety: it is finished first; then the cancellation is raised.
    """
    if isinstance(work, Coroutine):
        future: asyncio.Future[T] = start_task(work)
    else:
        future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    try:
        if cancelled is not None:
            future.exception()  # seen: nobody is left to be told
            raise cancelled
        return future.result()
    finally:
        # An exception holds this frame, and with it what was moved, in a cycle.
        del future, work, cancelled


class Backoff:
    """Draws a random part of a limit that doubles, up to a last one.

    So many that have lost the same thing at once do not come back at once, and what
    stays away is asked for less and less often. Never less than half of the limit: a
    pause of nothing is none.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s = self._limit_s = first_s
        self._last_s = last_s

    def pause_s(self) -> float:
        """Return how long to wait; the next wait may be twice as long."""
        limit_s, self._limit_s = self._limit_s, min(2 * self._limit_s, self._last_s)
        return random.uniform(limit_s / 2, limit_s)  # noqa: S311 - no secret

    def reset(self) -> None:
        """Begin with the first pause again: it has worked for long enough."""
        self._limit_s = self._first_s


def yields_before_raising(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function: it raises after one turn of the event loop."""

    @functools.wraps(function)
    async def run(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return await function(*args, **keywords)
        except Exception:
            await asyncio.sleep(0)
            raise

    return run
