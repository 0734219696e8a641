"""The loop that a check runs on, under observation: waiting, errors, what is left.

A bench lives for one check. When it ends it looks for what is left: descriptors, tasks,
errors that only the loop saw. Whatever it finds fails the check, so every check is a
check for leaks as well.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.witness import Verdicts

T = TypeVar("T")

# A condition that no callback announces, such as a counter, is looked at this often.
_POLL_S: Final = 0.002
# Turns of the loop after which a transport has said what it has to say.
_TURNS: Final = 20


class Bench:
    """The running loop, watched.

    Args:
        timeout_s: How long anything that a backend promises may take.
        alone: Nothing else is at work, so that descriptors left are this check's.

    Attributes:
        verdicts: Broken promises that callbacks showed.
        loop: The running loop.
    """

    def __init__(self, timeout_s: float, *, alone: bool = True) -> None:
        self.timeout_s = timeout_s
        self.verdicts: Verdicts = Verdicts()
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.verdicts.changed = self.announce
        self._thread = threading.get_ident()
        self._errors_expected = False
        self._alone = alone
        self._handler_before = self.loop.get_exception_handler()
        self.loop.set_exception_handler(self._note_error)
        self._tasks_before = asyncio.all_tasks()
        self._descriptors_before = open_descriptors()

    async def until(
        self,
        condition: Callable[[], object],
        what: str,
        *,
        every_turn: bool = False,
    ) -> None:
        """Wait for a condition.

        Args:
            condition: Looked at after every callback, and now and then.
            what: Says what happens then, for the message if it does not.
            every_turn: Look at it in every turn of the loop.

        Raises:
            CheckFailed: It does not hold in time, or a promise was broken meanwhile.
        """
        deadline = self.loop.time() + self.timeout_s
        while not condition():
            self.raise_verdict()
            if self.loop.time() > deadline:
                raise CheckFailed(f"not within {self.timeout_s:g} s: {what}")
            if every_turn:
                await asyncio.sleep(0)
            else:
                await self._change()
        self.raise_verdict()

    def announce(self) -> None:
        """Something has changed; a broken backend may say so on another thread."""
        if threading.get_ident() == self._thread:
            self._changed.set()
        else:
            self.loop.call_soon_threadsafe(self._changed.set)

    async def _change(self) -> None:
        """Wait for the next callback, or a moment."""
        self._changed.clear()
        alarm = self.loop.call_later(_POLL_S, self._changed.set)
        await self._changed.wait()
        alarm.cancel()

    async def within(self, promised: Awaitable[T], what: str) -> T:
        """Await something that must end in time.

        Raises:
            CheckFailed: It does not.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await promised
        except TimeoutError:
            raise CheckFailed(f"not within {self.timeout_s:g} s: {what}") from None

    async def reaches(self, count: Callable[[], int], goal: int, what: str) -> None:
        """Wait until a count is as high as ``goal``; each rise has the whole time."""
        while (before := count()) < goal:
            await self._rises(count, before, f"{goal} {what}")

    async def _rises(self, count: Callable[[], int], before: int, what: str) -> None:
        await self.until(lambda: count() > before, f"{what} (there are {before})")

    async def settle(self) -> None:
        """Give everything that could still be said the time to be said."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self._change()
        self.raise_verdict()

    @contextmanager
    def expecting_errors(self) -> Iterator[None]:
        """Errors that the loop is told of, or that are logged, are what is wanted."""
        before = logging.root.manager.disable
        self._errors_expected = True
        logging.disable()
        try:
            yield
        finally:
            logging.disable(before)
            self._errors_expected = False

    def raise_verdict(self) -> None:
        """Fail the check if a promise was seen broken.

        Raises:
            CheckFailed: One was.
        """
        if self.verdicts.found:
            raise CheckFailed(self.verdicts.found[0])

    def _note_error(
        self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        if not self._errors_expected:
            error = context.get("exception")
            said = f"{context['message']} {error!r}" if error else context["message"]
            self.verdicts.add(f"the loop was told of an error: {said}")

    def stop_watching(self) -> None:
        """Give the loop its exception handler back."""
        self.loop.set_exception_handler(self._handler_before)

    async def nothing_left(self) -> None:
        """Wait until tasks and descriptors of the check are gone.

        Raises:
            CheckFailed: Some stay.
        """
        await self.until(
            lambda: asyncio.all_tasks() <= self._tasks_before, "its tasks end"
        )
        if self._leaked():
            gc.collect()
        await self.until(
            lambda: not self._leaked(), f"descriptors close: {self._leaked()}"
        )

    def _leaked(self) -> set[str]:
        if not self._alone:
            return set()
        return open_descriptors() - self._descriptors_before


def open_descriptors() -> set[str]:
    """List the open file descriptors of this process, and on Linux what each one is."""
    if sys.platform != "linux":
        folder = Path("/dev/fd")
        return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return found


# --- what only shows in numbers: a little that is left, or kept alive -----------------


async def require_no_growth(
    cycle: Callable[[], Awaitable[None]], *, cycles: int, tolerance: int
) -> None:
    """Run something many times, and count what there is of what may leak.

    Args:
        cycle: Begins, ends, and waits until nothing of it is under way.
        cycles: How often; once more before, for what is made only once.
        tolerance: So many may be there that were not, for other reasons.

    Cancel safety: as that of ``cycle``.
    """
    await cycle()
    before = _counts()
    for _ in range(cycles):
        await cycle()
    gc.collect()
    for what, now in _counts().items():
        was = before[what]
        require(now <= was + tolerance, f"{was} {what} have become {now}")


def require_collected(seen: Sequence[weakref.ref[T]], what: str) -> None:
    """Nothing may keep these alive any more."""
    gc.collect()
    held = sum(alive() is not None for alive in seen)
    require(not held, f"{held} of {len(seen)} {what} are kept alive")


def _counts() -> dict[str, int]:
    return {
        "descriptors": len(open_descriptors()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }
