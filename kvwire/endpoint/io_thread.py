"""A thread with an event loop, for callers that have none.

::

    RUNNING --close()--> ENDING: the registered end of the thread's work runs
                            |    calls are still accepted, so that waiting callers
                            |    get their results
                            v
                         ENDED: no call is accepted, every call has its result; the
                                thread is over

A call waits on a lock and the loop waits in the kernel, so nothing polls. The thread is
a daemon, so a program that forgets to close it can exit. When the main thread has
ended, every thread of this module is closed *before* the interpreter joins the
program's own threads: a thread waiting in a call would otherwise keep the process alive
for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread
import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from kvwire.aio import CallThreads, start_task
from kvwire.errors import (
    BackendUnavailable,
    ClosedOK,
    UsageError,
    begin_thread,
    with_remedy,
    wrong_type,
)
from kvwire.limits import CLOSE_SLACK_S, CLOSE_TIMEOUT_S

logger: logging.Logger = logging.getLogger("kvwire.engine")
T = TypeVar("T")
_running: set[IOThread] = set()


class IOThread:
    """Runs an event loop on a daemon thread, from :meth:`begin` until it is closed.

    Ctrl-C interrupts only the main thread, but may do so at any line. So resources that
    an interrupt could orphan are created on the thread itself, and :meth:`close` ends
    everything that ``begin`` has created::

        thread = IOThread(name)
        try:
            thread.begin()
            ...
        except BaseException:
            thread.close()
            raise
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float = CLOSE_TIMEOUT_S,
        slack_s: float = CLOSE_SLACK_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._slack_s = slack_s
        self._pid = os.getpid()
        self._forked = False
        self._loop: asyncio.AbstractEventLoop  # set once it was created
        self._stopping = asyncio.Event()
        self._at_end: Callable[[], Awaitable[None]] | None = None
        self._end_within_s = timeout_s
        # There is no lock, since an interrupt could leave it locked. Instead a call is
        # recorded before the loop gets it, and once the loop accepts no more calls, the
        # thread ends those without a result.
        self._calls: set[_Call[Any]] = set()
        self._begun = False
        self._closing = False
        self._ended = False
        self._failure: BaseException | None = None
        # Set once the loop was created, or its creation has failed.
        self._made = threading.Event()
        # Set once the thread has cleaned up, for callers that wait for its end.
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Start the thread, once.

        Raises:
            UsageError: The program has no threads of the system.
            BackendUnavailable: The system has no more threads or descriptors.
        """
        _check_threads()
        self._begun = True
        _running.add(self)
        try:
            begin_thread(self._thread)
        except (BackendUnavailable, RuntimeError):
            self._made.set()
            self._forget()
            raise
        self._made.wait()
        if isinstance(self._failure, OSError):
            raise BackendUnavailable(
                f"{self._thread.name}: {with_remedy(self._failure)}"
            ) from self._failure
        if self._failure is not None:
            raise self._failure

    @property
    def ended(self) -> bool:
        """Whether the thread has stopped accepting calls."""
        return self._ended

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that created the thread."""
        return self._forked

    def at_end(self, end: Callable[[], Awaitable[None]], within_s: float) -> None:
        """Set the function that ``close`` runs on the loop, and its time limit."""
        self._at_end = end
        self._end_within_s = within_s

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None
    ) -> T:
        """Run a coroutine on the loop and wait for its result.

        If an interrupt or the time limit ends the wait, the coroutine is cancelled, and
        has ended when this raises. Only a second interrupt leaves it running.

        Raises:
            UsageError: From the thread itself, or after a fork; or it is no coroutine.
            ClosedOK: The thread has ended.
            TimeoutError: It took longer than ``timeout_s``; it was cancelled.
        """
        call = _Call("run", coroutine, self._calls)
        try:
            self._hand_over(call)
            try:
                return call.result.result(timeout_s)
            except TimeoutError:
                if call.result.done():  # perhaps the coroutine's own error
                    return call.result.result()
                call.stop()
                # What came at this moment is the result nevertheless.
                with contextlib.suppress(concurrent.futures.CancelledError):
                    return call.result.result()
                raise TimeoutError(f"not done within {timeout_s:g} s") from None
        except concurrent.futures.CancelledError:
            if self._ended:
                raise ClosedOK("the Engine is closed") from None
            raise
        except BaseException:
            call.stop()
            concurrent.futures.wait((call.result,))
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop without waiting for it."""
        call = _Call("start", coroutine, self._calls)
        try:
            self._hand_over(call)
        except BaseException:
            call.stop()
            raise
        return call.result

    def post(self, function: Callable[[], None]) -> None:
        """Schedule a function on the loop; does nothing if the thread has ended."""
        self.check_process()
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # it has ended at this moment
                self._loop.call_soon_threadsafe(function)

    def check_process(self) -> None:
        """Refuse a forked child, in which the thread does not exist."""
        if self._forked:
            raise UsageError(
                f"this Engine was made in process {self._pid}, before the fork; make "
                f"a new one in this process, {os.getpid()}"
            )

    def close(self) -> None:
        """End the work on the loop and wait for the thread. May be called repeatedly.

        It waits for a bounded time. Work that does not end is logged and abandoned.
        """
        if self._forked:
            return  # in a forked child there is no thread to end
        self._check_other_thread()
        self.begin_close()
        if not self._begun or not self._made.wait(self._slack_s):
            # Interrupted before there was a thread. If it still starts, it ends at
            # once.
            _running.discard(self)
            return
        while not self._over.wait(self._slack_s):
            if not self._turns():
                logger.error(
                    "thread %s does not end: its event loop is blocked%s",
                    self._thread.name,
                    _where(self._thread),
                )
                self._forget()
        if self._thread.is_alive():
            self._thread.join(self._slack_s)  # it is about to end, or stuck

    def begin_close(self) -> bool:
        """Begin to close, from any thread, without waiting. Never raises.

        It takes no lock, since the garbage collector may call it at any point.

        Returns:
            Whether this was the first call.
        """
        if self._forked:
            return False
        first = not self._closing
        self._closing = True
        # Without a loop, the thread checks this once it has created one, if ever.
        with contextlib.suppress(RuntimeError, AttributeError):
            # Even if begun before: an interrupt may have come between these two lines.
            self._loop.call_soon_threadsafe(self._stopping.set)
        return first

    # --- inside -----------------------------------------------------------------------

    def _check_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "an Engine's own thread cannot wait for the Engine, because that "
                "thread does the work; in callbacks use kvwire's coroutines"
            )

    def _hand_over(self, call: _Call[Any]) -> None:
        self.check_process()
        self._check_other_thread()
        if self._ended:
            raise ClosedOK("the Engine is closed")
        call.loop = self._loop
        self._calls.add(call)  # bounded: calls of the program's own threads
        try:
            self._loop.call_soon_threadsafe(call.begin)
        except RuntimeError:  # it has ended at this moment
            raise ClosedOK("the Engine is closed") from None

    def _turns(self) -> bool:
        """Return whether the loop still takes a turn within ``close``'s time limit."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it is closed: the thread is about to end
            return self._over.wait(self._timeout_s)
        return turned.wait(self._timeout_s) or self._over.is_set()

    def _forget(self) -> None:
        _running.discard(self)
        self._over.set()

    def _run(self) -> None:
        _name_in_kernel(self._thread.name)
        try:
            self._loop = _new_loop()
        except BaseException as exc:  # noqa: BLE001 - the caller of begin() raises it
            self._failure = exc
            self._made.set()
            self._forget()
            return
        if self._closing:
            self._stopping.set()
        self._made.set()
        workers: set[threading.Thread] = set()  # bounded: by the executor
        executor = CallThreads(
            thread_name_prefix=self._thread.name,
            initializer=lambda: workers.add(threading.current_thread()),
        )
        self._loop.set_default_executor(executor)
        try:
            living = asyncio.Task(self._live(), loop=self._loop)
            while not living.done():
                try:
                    self._loop.run_until_complete(living)
                except (SystemExit, KeyboardInterrupt) as exc:
                    # Raised by a task or callback of the program. asyncio leaves the
                    # loop for it, which must not end the work of every other caller.
                    logger.warning(
                        "a task or callback on the loop of thread %s raised %r; the "
                        "loop goes on",
                        self._thread.name,
                        exc,
                        exc_info=exc,
                    )
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            _join(workers, self._timeout_s)
            self._loop.close()
            for call in list(self._calls):
                call.end()
            self._forget()

    async def _live(self) -> None:
        try:
            await self._stopping.wait()
            await self._end()
        finally:
            self._ended = True
            # Accepted calls are in the loop's queue, ahead of this.
            await asyncio.sleep(0)
            # They end by themselves, once the objects that they wait for have ended.
            await _ended(self._timeout_s)
            for _ in range(_CANCELLATIONS):
                for task in _others():
                    task.cancel()
                await _ended(self._slack_s / _CANCELLATIONS)
            await self._end()  # tasks that were created meanwhile
            if left := _others():
                logger.error(
                    "these tasks were cancelled and have not ended: %s",
                    "; ".join(map(repr, left)),
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._slack_s):
                    await self._loop.shutdown_asyncgens()

    async def _end(self) -> None:
        end = self._at_end
        self._at_end = None
        if end is None:
            return
        ending = asyncio.ensure_future(end())
        done, _ = await asyncio.wait({ending}, timeout=self._end_within_s)
        for each in done:
            each.result()


class _Call(Generic[T]):
    """Passes a coroutine to the loop, or takes it back, but never both.

    Attributes:
        loop: The loop, once the call was handed over.
        result: The future on which any thread waits.
    """

    def __init__(
        self, verb: str, coroutine: Coroutine[Any, Any, T], open_calls: set[_Call[Any]]
    ) -> None:
        if not isinstance(coroutine, Coroutine):
            raise wrong_type(
                verb, coroutine, "a coroutine, such as an async function returns"
            )
        self.loop: asyncio.AbstractEventLoop
        self.result: concurrent.futures.Future[T] = concurrent.futures.Future()
        # The thread that pops the coroutine runs or closes it; only one thread can pop
        # it.
        self._coroutine = [coroutine]
        self._task: asyncio.Task[T] | None = None
        self._open_calls = open_calls

    def begin(self) -> None:
        """Run the coroutine on the loop, unless it was taken back."""
        with contextlib.suppress(IndexError):
            self._task = start_task(self._coroutine.pop())
            self._task.add_done_callback(self._settle)
            # A future keeps its callbacks, so none may have this object, which has it.
            self.result.add_done_callback(partial(_cancel_too, self.loop, self._task))

    def stop(self) -> None:
        """Cancel the coroutine at any stage; ``result`` is done when it has ended."""
        try:
            self._coroutine.pop().close()
        except IndexError:
            self._cancel()
        else:
            self._open_calls.discard(self)
            self._end()

    def end(self) -> None:
        """End the call with its loop, on which nothing can run any more."""
        self.stop()
        if self._task is not None:
            self._end()

    def _cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop, and the task, have ended
            # Behind `begin`, if that has not set the task yet.
            self.loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _end(self) -> None:
        self.result.cancel()
        self.result.set_running_or_notify_cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        self._open_calls.discard(self)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self.result.cancel()
        if not self.result.set_running_or_notify_cancel():
            return  # no caller waits for it
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


def _cancel_too(
    loop: asyncio.AbstractEventLoop,
    task: asyncio.Task[T],
    result: concurrent.futures.Future[T],
) -> None:
    if result.cancelled():
        with contextlib.suppress(RuntimeError):  # the loop, and the task, have ended
            loop.call_soon_threadsafe(task.cancel)


# A library may swallow one cancellation; if it swallows two, it always will.
_CANCELLATIONS: Final = 2


async def called(function: Callable[[], T]) -> T:
    """Call a function, where :meth:`IOThread.run` takes a coroutine.

    Cancel safety: it does not wait, so it cannot be cancelled half-way.
    """
    return function()


def _others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}


async def _ended(within_s: float) -> None:
    if others := _others():
        await asyncio.wait(others, timeout=within_s)


def _join(threads: Collection[threading.Thread], timeout_s: float) -> None:
    """Join all threads within one time limit.

    It uses no other thread, since an exiting interpreter cannot start one.
    """
    deadline = time.monotonic() + timeout_s
    for thread in list(threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _where(thread: threading.Thread) -> str:
    """Return the line that a thread is executing, for the log."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    code = frame.f_code
    return f", at {code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


def bind_thread(cpus: Collection[int]) -> None:
    """Restrict the calling thread, and the threads it starts, to these CPUs."""
    if not cpus:
        return
    if sys.platform != "linux":
        raise UsageError("io_cpus: this system cannot bind a thread to CPUs")
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as exc:
        listed = ", ".join(map(str, sorted(cpus)))
        text = exc.strerror
        if exc.errno == errno.EINVAL:
            # This machine lacks the CPUs, or the container or its parent has no right
            # to them; what the process is bound to is less than that.
            text = (
                "none of these CPUs is this process's to use; see `nproc`, and "
                "Cpus_allowed_list in /proc/self/status"
            )
        raise UsageError(f"io_cpus={listed}: {text}") from None


def _forked() -> None:
    for thread in _running:
        thread._forked = True
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _close_all() -> None:
    """Close this process's threads, once the main thread has ended."""
    threads = list(_running)
    for thread in threads:
        thread.begin_close()
    for thread in threads:
        thread.close()


# Runs before threads are joined, and thus before atexit. concurrent.futures joins its
# own threads at the same stage; this is registered later, so it runs first. The private
# name has existed since Python 3.9; without it, a program has to close its engines
# itself.
with contextlib.suppress(
    RuntimeError
):  # imported by a thread that outlives the main thread
    getattr(threading, "_register_atexit", atexit.register)(_close_all)
# For threads that were created after that stage.
atexit.register(_close_all)


def _name_in_kernel(name: str) -> None:
    """Name the calling thread for ``top -H`` and profilers."""
    # Python 3.14 does this itself. If naming fails, the thread works without a name.
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    with contextlib.suppress(OSError):
        comm.write_bytes(name.encode())


def _check_threads() -> None:
    """Refuse a program in which threads take turns on one: each would wait for all."""
    for module, asks, name in (
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ):
        is_patched = getattr(sys.modules.get(module), asks, None)
        if is_patched is not None and is_patched(name):
            library = module.partition(".")[0]
            remedy = "monkey.patch_all(thread=False)"
            if library == "eventlet":
                remedy = "eventlet.monkey_patch(thread=False)"
            raise UsageError(
                f"{library} has replaced the threads of this program, and an Engine "
                f"needs one of the system for its event loop: patch with {remedy}, or "
                "have the Engine in a process of its own"
            )


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not there on Windows

    class Loop(uvloop.Loop):
        """Resolves names in Python threads, as asyncio's own loop does.

        libuv uses its own threads for that. A process that is forked later tries to
        join them at its exit, and crashes, because they do not exist in it.
        """

        async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
            call = partial(socket.getaddrinfo, host, port, **options)
            return await self.run_in_executor(None, call)

        async def create_connection(  # type: ignore[override]
            self, factory: Any, host: Any = None, port: Any = None, **options: Any
        ) -> Any:
            connect = partial(super().create_connection, factory)
            if host is None:
                return await connect(**options)
            wanted = {k: options.get(k, 0) for k in ("family", "proto", "flags")}
            if options.get("ssl") and options.get("server_hostname") is None:
                options["server_hostname"] = host
            found = await self.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, **wanted
            )
            failures: list[OSError] = []
            for *_, where in found:
                try:
                    return await connect(*where[:2], **options)
                except OSError as exc:
                    failures.append(exc)
            raise failures[0]

    return Loop()
