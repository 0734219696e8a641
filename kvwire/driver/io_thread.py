"""A thread with an event loop, for callers that have none.

::

    RUNNING --close()--> ENDING: what was registered to end it runs
                            |    calls are still taken, so that those who wait for
                            |    something learn how it ended
                            v
                         ENDED: no call is taken, every call has its result; the thread
                                is over

A call waits on a lock and the loop waits in the kernel: nobody polls. The thread is a
daemon, so a program that forgets to close it can end. When the main thread has ended,
every thread of this module is closed as if somebody had asked for it, *before* the
interpreter joins the program's own threads: one that waits in a call would otherwise
keep the process for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kvwire.errors import ClosedOK, UsageError, wrong_type
from kvwire.limits import CLOSE_TIMEOUT_S

T = TypeVar("T")
_running: set[IOThread] = set()


class IOThread:
    """Runs an event loop on a daemon thread, until it is closed.

    Raises:
        RuntimeError: The system has no more threads.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._forked = False
        self._loop = _new_loop()
        self._lock = threading.Lock()
        self._stopping = asyncio.Event()
        self._at_end: Callable[[], Awaitable[None]] | None = None
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise
        _running.add(self)

    @property
    def ended(self) -> bool:
        """Tell whether no call is taken any more."""
        return self._ended

    def at_end(self, end: Callable[[], Awaitable[None]]) -> None:
        """Name what to run on the loop when the thread is closed."""
        self._at_end = end

    def call(
        self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None
    ) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            UsageError: From the thread itself, or after a fork.
            ClosedOK: The thread has ended.
            TimeoutError: It took longer than ``timeout`` seconds; it was cancelled.
        """
        waiting = self.start(coroutine)
        try:
            return waiting.result(timeout)
        except concurrent.futures.CancelledError:
            raise ClosedOK("the Engine is closed") from None
        except TimeoutError:
            # The coroutine's own, such as ETIMEDOUT, or that of waiting.
            if waiting.cancel():
                raise TimeoutError(f"not within {timeout:g} s") from None
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop without waiting for it."""
        if not isinstance(coroutine, Coroutine):
            raise wrong_type(
                "start", coroutine, "a coroutine, as of an async function,"
            )
        try:
            self.check_process()
            self._check_other_thread()
            return self._begin(coroutine)
        except BaseException:
            coroutine.close()
            raise

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the loop and wait for its result."""

        async def call() -> T:
            return function()

        return self.call(call())

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the loop soon; nothing happens if the thread has ended."""
        self.check_process()
        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(function)

    def check_process(self) -> None:
        """Refuse a child of the process that made the thread: it has no such thread."""
        if self._forked:
            raise UsageError(
                f"this Engine is of process {self._pid}, before the fork; make a new "
                f"one in this process, {os.getpid()}"
            )

    def close(self) -> None:
        """End what runs on the loop and wait for the thread. Any number of times."""
        if self._forked:
            return  # a fork has no such thread to end
        self._check_other_thread()
        self.begin_close()
        self._thread.join()

    def begin_close(self) -> bool:
        """Begin to close, from any thread, without waiting. Never raises.

        Takes no lock, since the garbage collector may call it from anywhere.

        Returns:
            Whether it is this call that began it.
        """
        if self._closing or self._forked:
            return False
        self._closing = True
        with contextlib.suppress(RuntimeError):  # the thread has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        return True

    # --- inside -----------------------------------------------------------------------

    def _check_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "an Engine cannot be waited for from its own thread, which does the "
                "work; its callbacks use kvwire's coroutines"
            )

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._ended:
                raise ClosedOK("the Engine is closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self) -> None:
        _name_in_kernel(self._thread.name)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        finally:
            _running.discard(self)

    async def _live(self) -> None:
        try:
            await self._stopping.wait()
            if self._at_end is not None:
                await self._at_end()
        finally:
            with self._lock:
                self._ended = True
            # Calls that were taken are in the loop's queue; this is behind them.
            await asyncio.sleep(0)
            # They end by themselves with what they wait for. Whatever does not is
            # cancelled when the loop is closed.
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(left, timeout=CLOSE_TIMEOUT_S)


def bind_thread(cpus: Collection[int]) -> None:
    """Let the calling thread, and those that it starts, run on these CPUs only."""
    if not cpus:
        return
    if sys.platform != "linux":
        raise UsageError("io_cpus: this system cannot bind a thread to CPUs")
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as exc:
        listed = ", ".join(map(str, sorted(cpus)))
        raise UsageError(f"io_cpus={listed}: {exc.strerror}") from None


def _forked() -> None:
    for thread in _running:
        thread._forked = True  # noqa: SLF001 - of this file
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _close_all() -> None:
    """Close what runs, of this process; the main thread has ended."""
    threads = list(_running)
    for thread in threads:
        thread.begin_close()
    for thread in threads:
        thread.close()


# Before threads are joined, which is before atexit. concurrent.futures joins its own in
# the same place: registered behind it, this runs first. The name is private, and there
# since Python 3.9; without it a program has to close its engines itself.
with contextlib.suppress(
    RuntimeError
):  # imported by a thread that outlives the main one
    getattr(threading, "_register_atexit", atexit.register)(_close_all)
# For threads that were made after that.
atexit.register(_close_all)


def _name_in_kernel(name: str) -> None:
    """Have ``top -H`` and profilers show the calling thread by its name."""
    # Python 3.14 does so itself. What cannot be named works as well.
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    with contextlib.suppress(OSError):
        comm.write_bytes(name.encode())


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not there on Windows

    return uvloop.new_event_loop()
