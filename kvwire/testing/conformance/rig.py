"""What a check works with: two backends, a listener, links, waiting, and a clean end.

A rig lives for one check. When it ends it aborts every link, closes every listener and
then looks for what is left: descriptors, tasks, errors that only the loop saw. Whatever
it finds fails the check, so every check is a check for leaks as well.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from kvwire.backend import Backend, Link, Listener
from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.side import Side, Verdicts
from kvwire.types import Address

T = TypeVar("T")

# A condition that no callback announces, such as a counter, is looked at this often.
_POLL_S: Final = 0.002
# Turns of the loop after which a transport has said what it has to say.
_TURNS: Final = 20


class Rig:
    """Two backends joined by links, for one check.

    Args:
        make: Makes a backend.
        address: To listen on, as often as a check wants: any free port or name.
        timeout_s: How long anything that a backend promises may take.
        alone: No other rig is at work, so that descriptors left are this one's.

    Attributes:
        near: The backend that connects.
        far: The backend that listens.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        address: Address,
        timeout_s: float,
        *,
        alone: bool = True,
    ) -> None:
        self.make = make
        self.address = address
        self.timeout_s = timeout_s
        self.near = make()
        self.far = make()
        self.verdicts = Verdicts()
        self.sides: list[Side] = []
        self._links: list[Link] = []
        self._accepted: deque[Link] = deque()
        self._listeners: list[Listener] = []
        self._changed = asyncio.Event()
        self.verdicts.changed = self._announce
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._errors_expected = False
        self._alone = alone
        self._handler_before = self.loop.get_exception_handler()
        self.loop.set_exception_handler(self._note_error)
        self._tasks_before = asyncio.all_tasks()
        self._descriptors_before = open_descriptors()

    # --- links ------------------------------------------------------------------------

    async def listen(
        self,
        address: Address | None = None,
        accept: Callable[[Link], None] | None = None,
    ) -> Listener:
        """Listen with the far backend; accepted links wait for :meth:`accept`."""
        answer = accept or self._accepted.append

        def take(link: Link) -> None:
            self._links.append(link)
            self._changed.set()
            answer(link)

        listener = await self.within(
            self.far.listen(address or self.address, take), "listen"
        )
        self._listeners.append(listener)
        return listener

    async def connect(self, address: Address) -> Link:
        """Connect with the near backend."""
        link = await self.within(self.near.connect(address), "connect")
        self._links.append(link)
        return link

    async def accept(self) -> Link:
        """The next link that came in and was not asked for yet."""
        await self.until(lambda: bool(self._accepted), "the listener accepts a link")
        return self._accepted.popleft()

    async def pair(
        self,
        listener: Listener | None = None,
        *,
        start_left: bool = True,
        start_right: bool = True,
    ) -> tuple[Side, Side]:
        """A link between the near backend (left) and the far one (right)."""
        if listener is None:
            listener = self._listeners[0] if self._listeners else await self.listen()
        left = self.side("left", await self.connect(listener.address))
        right = self.side("right", await self.accept())
        if start_left:
            left.start()
        if start_right:
            right.start()
        return left, right

    @property
    def unaccepted(self) -> int:
        """Links that came in and were not asked for."""
        return len(self._accepted)

    def side(self, name: str, link: Link) -> Side:
        """Put a handler that judges on a link, not yet started."""
        side = Side(name, link, self.verdicts)
        self.sides.append(side)
        return side

    def abort_all(self) -> None:
        """Abort every link there is."""
        for side in self.sides:
            side.abort()
        for link in self._links:
            link.abort()

    def forget(self, *sides: Side) -> None:
        """Let go of links that have ended, so that nothing here keeps them alive."""
        self.sides = [side for side in self.sides if side not in sides]
        gone = {id(side.link) for side in sides}
        self._links = [link for link in self._links if id(link) not in gone]

    # --- waiting ----------------------------------------------------------------------

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
            self._raise_verdict()
            if self.loop.time() > deadline:
                raise CheckFailed(f"not within {self.timeout_s:g} s: {what}")
            if every_turn:
                await asyncio.sleep(0)
            else:
                await self._change()
        self._raise_verdict()

    def _announce(self) -> None:
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

    async def arrives(self, side: Side, count: int) -> None:
        """Wait until ``count`` frames have arrived whole, in all."""
        arrived = side.arrived
        await self.reaches(lambda: len(arrived), count, f"frames at {side.name}")

    async def given_back(self, side: Side) -> None:
        """Wait until every token has been given back."""
        lent = side.lent + side.sent_count
        await self.reaches(
            lambda: side.sent_count, lent, f"calls of frame_sent for {side.name}"
        )

    async def closes(self, *sides: Side) -> None:
        """Wait until ``link_closed`` has been called on each side."""
        for side in sides:
            closed = side.closed
            await self.until(closed.__len__, f"link_closed for {side.name}")

    async def settle(self) -> None:
        """Give everything that could still be said the time to be said."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self._change()
        self._raise_verdict()

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

    def _raise_verdict(self) -> None:
        if self.verdicts.found:
            raise CheckFailed(self.verdicts.found[0])

    def _note_error(
        self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        if not self._errors_expected:
            error = context.get("exception")
            said = f"{context['message']} {error!r}" if error else context["message"]
            self.verdicts.add(f"the loop was told of an error: {said}")

    # --- the end ----------------------------------------------------------------------

    async def aclose(self) -> None:
        """End everything, and look for what is left.

        Raises:
            CheckFailed: Something is, or a promise was broken on the way.

        Cancel safety: not cancel safe; links may stay open.
        """
        try:
            self.abort_all()
            started = [side for side in self.sides if side.started]
            await self.closes(*started)
            for listener in self._listeners:
                await self.within(listener.close(), "listener.close")
            for backend in (self.near, self.far):
                await self.within(backend.aclose(), "aclose")
            await self.settle()
            self._judge_ends()
            self.sides.clear()
            self._links.clear()
            await self._nothing_left()
        finally:
            self.loop.set_exception_handler(self._handler_before)

    def _judge_ends(self) -> None:
        for side in self.sides:
            times = len(side.closed)
            expected = 1 if side.started else 0
            require(
                times == expected,
                f"{side.name}: link_closed was called {times} times, not {expected}",
            )

    async def _nothing_left(self) -> None:
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
    """The open file descriptors of this process, and on Linux what each one is."""
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
