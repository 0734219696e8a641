"""Helpers for asyncio in all of kvwire: tasks, clean-up, pauses, thread checks.

An operation that fails at once still lets the loop run before it raises. The reason is
programs that retry in a loop: ``while True: try: await connection.recv(tag) except
RequestError: continue``. If that ``await`` failed without suspending its task, the
event loop would run nothing else, neither timers nor other connections, as long as the
failure lasts. So every public awaitable that can fail gives the event loop one turn
before it raises.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import numbers
import os
import random
import socket
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    cast,
)

from kvwire.errors import NotAwaited, UsageError, lacks_threads
from kvwire.types import Deadline, Instant, Uncopied

P = ParamSpec("P")
T = TypeVar("T")
running_loop: Final = asyncio._get_running_loop  # noqa: SLF001 - it never raises
"""Returns the loop that runs in this thread; None if none runs, as after a fork."""
# No thread has this number.
FORKED: Final = -1
_WAY_OUT: Final = (
    "from other threads use a kvwire.Engine, whose engine.run(coroutine), publish, "
    "expect, pull and push any thread may call"
)
# A task is cancelled again if a library has swallowed its cancellation.
_CANCEL_AGAIN_S: Final = 0.2


def absolute(deadline: Deadline) -> float | None:
    """Return the deadline as a time on the running loop's clock.

    Raises:
        UsageError: It is below 0, or neither a number of seconds nor an instant.
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
            f"deadline={deadline!r:.80}: pass a number of seconds from now "
            f"(2.0), a timedelta, or kvwire.Instant(loop.time() + 2)"
        )
    return now + seconds


def seconds_of(name: str, value: object) -> float:
    """Check a duration from a caller, of any numeric type.

    Raises:
        UsageError: It is not a number above 0.
    """
    seconds = _number(value)
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name}={value!r:.80}: pass a number of seconds above 0")
    return seconds


def _number(value: object) -> float:
    """Return a number of any type as a float; NaN for any other value.

    Unlike ``float``, it does not accept texts and booleans.
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
    timeout_s: float, coroutines: Iterable[Coroutine[Any, Any, object]]
) -> None:
    """Run coroutines side by side, and cancel the ones that exceed the time limit.

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


def start_task(
    coroutine: Coroutine[Any, Any, T], *, lasting: bool = False
) -> asyncio.Task[T]:
    """Start a task that begins in a later turn of the running loop, never in this one.

    ``loop.create_task`` uses the application's task factory, and
    ``asyncio.eager_task_factory`` (Python 3.12) runs the first step at once, before the
    caller has recorded the task or finished its preparations. Every task of kvwire is
    started here, so all code can rely on the later turn.

    Args:
        coroutine: The work of the task.
        lasting: Whether it may outlive the call; then it keeps none of its context.
    """
    context = contextvars.Context() if lasting else None
    return asyncio.Task(coroutine, loop=asyncio.get_running_loop(), context=context)


def settler(over: asyncio.Future[T]) -> Callable[[T], None]:
    """Return a function that gives a future of the running loop its result.

    It may be called from any thread. If the future is done, or its loop is closed,
    nothing happens.
    """

    def settle(result: T) -> None:
        if not over.done():
            over.set_result(result)

    def call(result: T) -> None:
        with suppress(RuntimeError):  # the loop is closed: no waiter is left
            over.get_loop().call_soon_threadsafe(settle, result)

    return call


async def run_to_completion(work: Awaitable[T]) -> T:
    """Await `work` to its end, even if the caller is cancelled meanwhile.

    A coroutine gets its own task, so the caller's cancellation does not reach it.
    asyncio cancels a task once. But an anyio cancel scope, as used by Starlette and
    FastAPI, cancels the task again at every ``await`` until the scope is left, which
    would end a clean-up in the caller's task at its first ``await``. So each
    ``__aexit__``, and each ``except BaseException`` that has to await, cleans up
    through this function.

    Cancel safety: `work` is finished first; then the cancellation is raised.
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
            future.exception()  # retrieved, because no caller is left to get it
            raise cancelled
        return future.result()
    finally:
        # The exception's traceback references this frame; without this line the two
        # would form a cycle and keep transferred memory alive.
        del future, work, cancelled


async def cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` in its own task, so that its clean-up is not cancelled as well.

    Libraries close their connections in the task that used them. In the caller's task
    an anyio cancel scope, which cancels at every ``await``, would stop that halfway.

    Cancel safety: `work` is cancelled and has ended when the cancellation is raised.
    """
    task = start_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await run_to_completion(end_task(task))
        raise
    try:
        return task.result()
    finally:
        del task  # an error refers to this frame


class Upkeep:
    """Tracks whether a server or link is unreachable, why, and when to try again.

    Code that finds the server unreachable calls :meth:`lost` with the reason. The first
    loss after a pause begins the next pause. Its length is random, below a limit that
    doubles up to ``last_s``, so clients that lost the same server do not return at the
    same moment, and an absent server is tried less and less often. :meth:`back` ends
    the pause.

    Code that serves requests fails them at once while :attr:`resting`. Code that
    maintains a connection iterates; each step of the loop waits until the pause is
    over::

        async for _ in upkeep:
            try:
                await dial()
            except OSError as exc:
                upkeep.lost(str(exc))
            else:
                upkeep.back()
                break

    Args:
        first_s: The limit of the first pause.
        last_s: The largest limit of a pause.
        steady_s: How long the server must stay reachable before pauses are short again.
            This slows down attempts at a server that keeps failing right after its
            start.

    Attributes:
        reason: Why it is unreachable; "" while it is reachable.
    """

    __slots__ = (
        "_back_at",
        "_first_s",
        "_last_s",
        "_limit_s",
        "_retry_at",
        "_steady_s",
        "_task",
        "reason",
    )

    def __init__(self, first_s: float, last_s: float, *, steady_s: float = 0.0) -> None:
        self.reason: str = ""
        self._first_s = self._limit_s = first_s
        self._last_s = last_s
        self._steady_s = steady_s
        self._back_at = self._retry_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    @property
    def resting(self) -> bool:
        """Whether the pause after the last loss is still running."""
        if not self.reason:
            return False
        return asyncio.get_running_loop().time() < self._retry_at

    def lost(self, reason: str, *, within_s: float = math.inf) -> bool:
        """Record that it is unreachable.

        During a pause only the reason changes, because running requests fail together
        and count as one loss.

        Args:
            reason: Why.
            within_s: A limit for the pause that begins.

        Returns:
            Whether it was reachable until now, so that the caller can log the change.
        """
        was_there = not self.reason
        self.reason = reason
        now = asyncio.get_running_loop().time()
        if now >= self._retry_at:
            if was_there and now - self._back_at >= self._steady_s:
                self._limit_s = self._first_s
            self._retry_at = now + min(self.pause_s(), within_s)
        return was_there

    def back(self) -> bool:
        """Record that it is reachable again.

        Returns:
            Whether it was unreachable until now.
        """
        was_away = bool(self.reason)
        self.reason = ""
        if was_away:
            self._back_at = asyncio.get_running_loop().time()
        self._retry_at = -math.inf
        return was_away

    def pause_s(self) -> float:
        """Draw the length of a pause, and double the limit for the next one."""
        limit_s = self._limit_s
        self._limit_s = min(2 * self._limit_s, self._last_s)
        # Never less than half of the limit, since a pause of nearly zero would not
        # help.
        return random.uniform(limit_s / 2, limit_s)  # noqa: S311 - no secret

    def __aiter__(self) -> Upkeep:
        return self

    async def __anext__(self) -> None:
        """Wait until the pause is over, at least for one turn of the loop."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(self._retry_at - loop.time(), 0.0))
        # A timer may be early by the resolution of the clock.
        self._retry_at = min(self._retry_at, loop.time())

    # --- a task that brings it back ---------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the task of :meth:`start` is running."""
        return self._task is not None and not self._task.done()

    def start(
        self, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Run work in a task, unless the previous task still runs; return the task."""
        if self._task is None or self._task.done():
            self._task = start_task(work())
        return self._task

    def cancel(self) -> None:
        """Cancel the task."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End the task.

        Cancel safety: safe, it may be called again.
        """
        if self._task is not None:
            await end_task(self._task)


def yields_before_raising(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a coroutine function give the event loop one turn before it raises."""

    @functools.wraps(function)
    async def run(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return await function(*args, **keywords)
        except Exception:
            await asyncio.sleep(0)
            raise

    return run


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task until it has ended, and drop its result or error.

    The task is cancelled repeatedly because a library may swallow a cancellation;
    ``asyncio.wait_for`` in Python 3.11 does if its future is done in the same turn.

    Cancel safety: the task may continue for a while.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


async def gather_all(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run several coroutines at once, and return their results.

    If one raises, the others still finish before the first error is raised. So no
    coroutine continues without an owner, and none is stopped while it touches memory.

    Cancel safety: all are cancelled; the cancellation is raised when all have ended.
    """
    ended = await asyncio.gather(*map(start_task, works), return_exceptions=True)
    errors = [one for one in ended if isinstance(one, BaseException)]
    try:
        if errors:
            raise errors[0]
        return [one for one in ended if not isinstance(one, BaseException)]
    finally:
        # An error refers to this frame, and the frame to the error: break the cycle.
        ended.clear()
        errors.clear()


class TurnBudget:
    """Bounds the copying in one turn of the loop by calls that complete at once.

    Awaiting a complete call does not let the loop run, and a program may begin many
    calls before it awaits the first. So the calls that exceed the budget copy in later
    turns, in their order.

    Args:
        nbytes: The most bytes of a turn.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._spent = 0
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()

    def has_room(self, nbytes: int) -> bool:
        """Return whether a call may copy its bytes now.

        The first call of a turn always may, unless others wait.
        """
        if self._queue:
            return False
        return not self._spent or self._spent + nbytes <= self._nbytes

    def spend(self, nbytes: int) -> bool:
        """Count the bytes of a call, if there is room for them; return whether."""
        # As has_room, written out: a call less in each get in place.
        if self._queue or (self._spent and self._spent + nbytes > self._nbytes):
            return False
        if not self._spent:
            self._renew_later()
        self._spent += nbytes
        return True

    def later(self, nbytes: int, call: Callable[[], None]) -> None:
        """Make a call in a later turn that has room for its bytes; it must not raise.

        Use it if there is no room now.
        """
        self._queue.append((nbytes, call))  # bounded: one for each of the caller's

    async def room(self, nbytes: int) -> None:
        """Wait for a turn with room for some bytes.

        Cancel safety: safe, it only waits.
        """
        if self.spend(nbytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.later(nbytes, lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _renew_later(self) -> None:
        # It is set again and again, so it has no variables of a request.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._renew, context=contextvars.Context())

    def _renew(self) -> None:
        self._spent = 0
        queue = self._queue
        if not queue:
            return
        self._renew_later()
        while queue and (not self._spent or self._spent + queue[0][0] <= self._nbytes):
            nbytes, call = queue.popleft()
            self._spent += nbytes
            call()


class LoopThread:
    """The loop that an object belongs to, with the loop's thread and process.

    A call from another thread would interfere with the loop's current step, and the
    damage would look like the peer's fault, so the call is refused where it is made.
    Code that runs for every message calls :meth:`check` only if :func:`running_loop`
    returns another loop.

    Attributes:
        loop: The loop.
        ident: ``threading.get_ident()`` of its thread; ``FORKED`` in a child process.
    """

    __slots__ = ("__weakref__", "_pid", "ident", "loop")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.ident: int = threading.get_ident()
        self._pid = os.getpid()
        _made.add(self)  # weak: it ends with its communicator

    async def leave(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close at the end of an ``async with`` block, even if the task is cancelled.

        A cancel scope that cancels at each ``await`` does not interrupt the close. If a
        child process was forked within the block and leaves the block, for example by
        ``sys.exit``, nothing is closed in the child.

        Cancel safety: it is closed first; then the cancellation is raised.
        """
        if self.ident != FORKED:
            await run_to_completion(close())

    def check(self, call: str) -> None:
        """Refuse a call from any thread, loop or process but the object's own."""
        if self.ident == FORKED:
            self.check_process(call)
        running = running_loop()
        if running is self.loop:
            self.ident = threading.get_ident()  # the loop may have moved
            return
        here = threading.get_ident()
        if here != self.ident:
            owner = _thread_name(self.ident)
            raise UsageError(
                f"{call}: called from thread {_thread_name(here)}, but the object "
                f"belongs to the event loop of thread {owner}: {_WAY_OUT}"
            )
        if running is not None or self.loop.is_closed():
            state = "is closed" if self.loop.is_closed() else "is not running"
            raise UsageError(
                f"{call}: the object belongs to another event loop, which {state}: "
                "open a communicator in each asyncio.run, or keep one loop; a test and "
                "its fixtures need one loop (pytest-asyncio: the same loop_scope)"
            )

    def check_process(self, call: str) -> None:
        """Refuse a call in a child process forked from the one that made the object."""
        if self.ident == FORKED:
            raise UsageError(
                f"{call}: the object belongs to process {self._pid}, and this process "
                f"{os.getpid()} was forked from it: open a communicator or an Engine "
                "after the fork, or start processes with "
                'multiprocessing.get_context("spawn")'
            )


def _thread_name(ident: int) -> str:
    for thread in threading.enumerate():
        if thread.ident == ident:
            return repr(thread.name)
    return f"{ident} (ended)"


_made: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _forked() -> None:
    for each in _made:
        each.ident = FORKED


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


async def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
    """Look up the addresses of a host, as ``loop.getaddrinfo`` does for a stream.

    Raises:
        OSError: The name is unknown, or no thread can be started to look it up.

    Cancel safety: safe.
    """
    loop = asyncio.get_running_loop()
    try:
        return [*await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except RuntimeError as exc:
        raise lacks_threads(exc) from None


class CallThreads(ThreadPoolExecutor):
    """Threads that make a call once, or refuse it and never make it.

    If no thread can be started, ``ThreadPoolExecutor.submit`` raises, but has queued
    the call: a thread makes it later, when its memory may belong to others. Here such a
    call is withdrawn, or made by the threads that there are.
    """

    _started = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Make a call on a thread.

        Raises:
            OSError: No thread can be started; the function is not called.
        """
        call = _Call(functools.partial(fn, *args, **kwargs))
        try:
            found = super().submit(call)
        except RuntimeError as exc:
            lacks = lacks_threads(exc)
            if (self._started and lacks is not exc) or not call.future.cancel():
                return call.future
            raise lacks from None
        self._started = True
        return found


class _Call(Generic[T]):
    """A call with a future of its own, which can be cancelled as long as it waits."""

    def __init__(self, function: functools.partial[T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def __call__(self) -> T:
        future = self.future
        try:
            if not future.set_running_or_notify_cancel():
                return cast("T", None)  # nobody gets it
            found = self._function()
            future.set_result(found)
        except BaseException as exc:
            future.set_exception(exc)
            raise
        finally:
            # An error's traceback refers to this frame, so it would be a cycle.
            del future, self
        return found


def unusable(
    remedy: str, *special: str, result: type = object
) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that a use that Python cannot do names the right code.

    Args:
        remedy: What to write, such as ``"write `async for`"``.
        special: The special methods that Python calls in such a use.
        result: The class of the object that an await returns. Its names are refused,
            because a use of them on this object lacks the await.
    """
    names = {name for name in dir(result) if not name.startswith("_")}

    def decorate(cls: type[T]) -> type[T]:
        def refuse(self: T, *_: object) -> NoReturn:
            raise UsageError(f"{type(self).__name__}: {remedy}")

        def missing(self: T, name: str) -> NoReturn:
            if name in names:
                raise NotAwaited(f"{name}: {remedy}")
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)

        # Set here, so that type checkers still see that the class has none of these.
        for name in special:
            setattr(cls, name, refuse)
        # Python would ask `__len__`, and `if request:` is no mistake.
        if "__len__" in special:
            cls.__bool__ = _true  # type: ignore[attr-defined]
        if names:
            cls.__getattr__ = missing  # type: ignore[attr-defined]
        return cls

    return decorate


def _true(_: object) -> bool:
    return True


class AsyncWith(Uncopied):
    """Base class that raises a helpful error for a plain ``with``."""

    __slots__ = ()
    # The function that creates one, if it is not the class.
    _made_by: ClassVar[str] = ""

    def __enter__(self) -> NoReturn:
        """Refuse a plain ``with``."""
        raise UsageError(
            f"with {self._made_by or type(self).__name__}: write `async with`, in a "
            f"coroutine; synchronous code uses kvwire.Engine"
        )

    def __exit__(self, *_: object) -> None:
        """Exist only because Python looks it up before ``__enter__``."""


class Closing(AsyncWith):
    """Is closed at the end of an ``async with`` block."""

    _thread: LoopThread

    async def close(self) -> None:
        """Release its resources, as the subclass describes.

        Cancel safety: as the subclass describes.
        """
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Return it; it is closed at the end of the block."""
        self._thread.check(f"async with {type(self).__name__}")
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close it, even if the task is cancelled."""
        await self._thread.leave(self.close)


class Opening(AsyncWith):
    """Base class of a call that opens an object once, when it is awaited or entered."""

    _begun: bool = False

    def _begin(self) -> None:
        """Refuse a second opening, because the first block closes the opened object."""
        if self._begun:
            raise UsageError(
                f"{self._made_by}: it was already opened; keep the object that it "
                "returned, or call it again for a new one"
            )
        self._begun = True
