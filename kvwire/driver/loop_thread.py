"""Checks that callers are on an object's own loop, thread and process.

A call from elsewhere would tear what the loop is in the middle of, and the peer would
be blamed for what it then reads. So it is refused where it is made. What is called for
every message compares ``ident`` itself, one integer with another; a fork changes it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from kvwire.clock import run_to_completion
from kvwire.errors import UsageError

# No thread has this number.
FORKED: Final = -1
_WAY_OUT: Final = (
    "from other threads use loop.call_soon_threadsafe(...) or "
    "asyncio.run_coroutine_threadsafe(...) with that loop, or a kvwire.Engine, which "
    "any thread may call"
)


class LoopThread:
    """Knows the running loop, and which thread of which process runs it.

    Attributes:
        ident: ``threading.get_ident()`` of its thread; ``FORKED`` in a child process.
    """

    __slots__ = ("__weakref__", "_pid", "ident", "loop")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.ident: int = threading.get_ident()
        self._pid = os.getpid()
        _made.add(self)  # weak: it ends with its communicator

    async def leave(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close at the end of an ``async with`` block.

        Whole, also in a cancel scope that cancels at each ``await``. A child that was
        forked in the block, and leaves it, as by ``sys.exit``, closes nothing.

        Cancel safety: it is closed first; then the cancellation is raised.
        """
        if self.ident != FORKED:
            await run_to_completion(close())

    def check(self, call: str) -> None:
        """Refuse a call from another thread, loop or process than the object's own."""
        if self.ident == FORKED:
            self.check_process(call)
        running = asyncio._get_running_loop()  # noqa: SLF001 - None where none runs
        if running is self.loop:
            self.ident = threading.get_ident()  # the loop may have moved
            return
        here = threading.get_ident()
        if here != self.ident:
            owner = _thread_name(self.ident)
            raise UsageError(
                f"{call}: called from thread {_thread_name(here)}, and what it is "
                f"called on belongs to the event loop of thread {owner}: {_WAY_OUT}"
            )
        if running is not None or self.loop.is_closed():
            state = "is closed" if self.loop.is_closed() else "is not running"
            raise UsageError(
                f"{call}: what it is called on belongs to another event loop, which "
                f"{state}: open a communicator in each asyncio.run, or keep one loop"
            )

    def check_process(self, call: str) -> None:
        """Refuse a call in a child that was forked from the object's own process."""
        if self.ident == FORKED:
            raise UsageError(
                f"{call}: what it is called on belongs to process {self._pid}, and "
                f"this is process {os.getpid()}, forked from it: open a communicator "
                f"or an Engine after the fork, or start processes with "
                f'multiprocessing.get_context("spawn")'
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


class AsyncWith:
    """Teaches ``async with`` to those who write ``with``."""

    __slots__ = ()
    # What is called to get one, where that is not its class.
    _call: ClassVar[str] = ""

    def __enter__(self) -> NoReturn:
        """Refuse a plain ``with``."""
        raise UsageError(
            f"with {self._call or type(self).__name__}: write `async with`, in a "
            f"coroutine; synchronous code uses kvwire.Engine"
        )

    def __exit__(self, *_: object) -> None:
        """Exist beside ``__enter__``, which Python looks up first."""


class Opening(AsyncWith):
    """Teaches ``await`` to those who use what is not open yet."""

    _opens: ClassVar[type]
    _begun: bool = False

    def _begin(self) -> None:
        """Refuse a second use: a block's end closes what one use has opened."""
        if self._begun:
            raise UsageError(
                f"{self._call}: it was opened already; keep what it gave, or call it "
                f"once more for another"
            )
        self._begun = True

    if not TYPE_CHECKING:  # which would otherwise believe in every name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not hasattr(self._opens, name):
                raise AttributeError(f"{self._call} has no {name!r}")
            raise UsageError(
                f"{name}: it is not open yet: `it = await {self._call}(...)`, or "
                f"`async with {self._call}(...) as it`"
            )
