"""The setup of a check: a watched loop, two backends, and their links or lanes.

A rig lives for one check. At its end it aborts every link or lane, closes every
listener, and looks for leftovers: descriptors, tasks, and errors that only the loop has
seen. Any leftover fails the check, so every check also checks for leaks.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import sys
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

from kvwire.backend import Backend, Link, Listener
from kvwire.backend.lane import LaneContext
from kvwire.types import Address, Role
from kvwire_certify.conformance.check import CheckFailed, require
from kvwire_certify.conformance.sides import LaneSide, LinkSide, Side, Verdicts

T = TypeVar("T")
S = TypeVar("S", bound=Side)

# The interval at which a condition without a callback, such as a counter, is polled.
_POLL_S: Final = 0.002
# The number of loop turns after which a transport has made all due callbacks.
_TURNS: Final = 20


class Rig(Generic[S]):
    """Two backends, and the sides of their links or lanes, on a watched loop."""

    moves: ClassVar[str]
    """The unit that is sent: "frame" or "payload"."""

    def __init__(
        self, make: Callable[[], Backend], timeout_s: float, *, alone: bool = True
    ) -> None:
        self.timeout_s = timeout_s
        self.verdicts: Verdicts = Verdicts()
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.verdicts.changed = self.announce
        self._thread = threading.get_ident()
        self._errors_expected = False
        # Whether no other rig is running, so that leftover descriptors belong to this
        # one.
        self._alone = alone
        self._handler_before = self.loop.get_exception_handler()
        self.loop.set_exception_handler(self._note_error)
        self._tasks_before = asyncio.all_tasks()
        self._descriptors_before = open_descriptors()
        self.near: Backend = make()
        self.far: Backend = make()
        self.sides: list[S] = []
        self._listeners: list[Listener] = []

    async def open(self) -> None:
        """Prepare the objects that every check of this kind uses."""

    async def listen_on(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """Listen with the far backend until the check has ended."""
        listener = await self.within(self.far.listen(address, accept), "listen")
        self._listeners.append(listener)
        return listener

    async def unlisten(self, listener: Listener) -> None:
        """Close a listener."""
        await self.within(listener.close(), "listener.close")

    @abstractmethod
    async def pair(self) -> tuple[S, S]:
        """Return two connected sides."""

    @abstractmethod
    async def held_pair(self) -> tuple[S, S]:
        """Return two sides; the right one receives nothing until its ``release``."""

    @abstractmethod
    def ended_by(self, closer: S, other: S) -> tuple[S, ...]:
        """Return the sides that end when the first one does."""

    @abstractmethod
    async def rests(self, side: S) -> None:
        """Wait until a side is idle or closed."""

    # --- waiting ----------------------------------------------------------------------

    async def until(
        self,
        condition: Callable[[], object],
        what: str,
        *,
        every_turn: bool = False,
    ) -> None:
        """Wait for a condition."""
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
        """Announce a change; a broken backend may do so on another thread."""
        if threading.get_ident() == self._thread:
            self._changed.set()
        else:
            self.loop.call_soon_threadsafe(self._changed.set)

    async def _change(self) -> None:
        """Wait for the next callback, or a short time."""
        self._changed.clear()
        alarm = self.loop.call_later(_POLL_S, self._changed.set)
        await self._changed.wait()
        alarm.cancel()

    async def within(self, promised: Awaitable[T], what: str) -> T:
        """Await a call that must end in time."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await promised
        except TimeoutError:
            raise CheckFailed(f"not within {self.timeout_s:g} s: {what}") from None

    async def _reaches(self, counted: Sized, goal: int, what: str) -> None:
        """Wait until the count reaches ``goal``; each increase renews the limit."""
        while (before := len(counted)) < goal:
            await self._grows(counted, before, f"{goal} {what} (there are {before})")

    async def _grows(self, counted: Sized, before: int, what: str) -> None:
        await self.until(lambda: len(counted) > before, what)

    async def settle(self) -> None:
        """Give every pending callback time to run."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self._change()
        self.raise_verdict()

    async def arrives(self, side: S, count: int) -> None:
        """Wait until ``count`` frames or payloads in total have arrived completely."""
        await self._reaches(side.arrived, count, f"{self.moves}s at {side.name}")

    async def given_back(self, side: S) -> None:
        """Wait until every token has been given back."""
        count = side.lent + len(side.sent)
        what = f"calls of {self.moves}_sent"
        await self._reaches(side.sent, count, f"{what} for {side.name}")

    async def moved(self, sender: S, receiver: S, count: int) -> None:
        """Wait until ``count`` in total have arrived, and no token is lent."""
        await self.arrives(receiver, count)
        await self.given_back(sender)

    async def closes(self, *sides: S) -> None:
        """Wait until each side has had its closing callback."""
        for side in sides:
            # The closure must not refer to the side, since a stored error would keep
            # the side alive.
            closed = side.closed
            what = f"{side.kind}_closed for {side.name}"
            await self.until(closed.__len__, what)

    async def closes_cleanly(self, *sides: S) -> None:
        """Wait until each side has closed without an error."""
        await self.closes(*sides)
        for side in sides:
            error = side.closed[0]
            require(error is None, f"{side.name} closed with {error!r} after close")

    # --- the end ----------------------------------------------------------------------

    @contextmanager
    def expecting_errors(self) -> Iterator[None]:
        """Accept errors that the loop reports or that are logged, in this block."""
        before = logging.root.manager.disable
        self._errors_expected = True
        logging.disable()
        try:
            yield
        finally:
            logging.disable(before)
            self._errors_expected = False

    def raise_verdict(self) -> None:
        """Raise CheckFailed if a broken promise was seen."""
        if self.verdicts.found:
            raise CheckFailed(self.verdicts.found[0])

    def _note_error(
        self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        if not self._errors_expected:
            error = context.get("exception")
            said = f"{context['message']} {error!r}" if error else context["message"]
            self.verdicts.add(f"an error was reported to the loop: {said}")

    async def _nothing_left(self) -> None:
        """Wait until tasks and descriptors of the check are gone."""
        await self.until(
            lambda: asyncio.all_tasks() <= self._tasks_before, "its tasks end"
        )
        if self._leaked():
            gc.collect()
        await self.until(
            lambda: not self._leaked(), f"descriptors close: {self._leaked()}"
        )

    def _leaked(self) -> list[tuple[int, str]]:
        if not self._alone:
            return []
        opened = open_descriptors().items() - self._descriptors_before.items()
        # From its first stream on, uvloop keeps a spare descriptor for emergencies.
        spare = next((one for one in opened if one[1] == "/dev/null"), None)
        return sorted(opened - {spare})

    def forget(self, *sides: S) -> None:
        """Drop the references to ended sides."""
        self.sides = [side for side in self.sides if side not in sides]

    def abort_all(self) -> None:
        """Abort every side."""
        for side in self.sides:
            side.abort()

    async def aclose(self) -> None:
        """End everything, and look for leftovers."""
        try:
            self.abort_all()
            await self.closes(*(side for side in self.sides if side.begun))
            for listener in self._listeners:
                await self.unlisten(listener)
            for backend in (self.near, self.far):
                await self.within(backend.aclose(), "aclose")
            await self.settle()
            for side in self.sides:
                times = len(side.closed)
                expected = int(side.begun)
                said = f"{side.name}: {side.kind}_closed was called {times} times"
                require(times == expected, f"{said}, not {expected}")
            self.forget(*self.sides)
            await self._nothing_left()
        finally:
            self.loop.set_exception_handler(self._handler_before)


class LinkRig(Rig[LinkSide]):
    """Two backends joined by links, for one check."""

    moves = "frame"

    def __init__(
        self,
        make: Callable[[], Backend],
        address: Address,
        timeout_s: float,
        *,
        alone: bool = True,
    ) -> None:
        super().__init__(make, timeout_s, alone=alone)
        self.make = make
        self.address = address
        self._links: list[Link] = []
        self._accepted: deque[Link] = deque()

    async def listen(
        self,
        address: Address | None = None,
        accept: Callable[[Link], None] | None = None,
    ) -> Listener:
        """Listen with the far backend; accepted links wait for :meth:`accept`."""
        answer = accept or self._accepted.append

        def take(link: Link) -> None:
            self._links.append(link)
            self.announce()
            answer(link)

        return await self.listen_on(address or self.address, take)

    async def connect(self, address: Address) -> Link:
        """Connect with the near backend."""
        link = await self.within(self.near.connect(address), "connect")
        self._links.append(link)
        return link

    async def accept(self) -> Link:
        """Return the next incoming link."""
        await self.until(lambda: bool(self._accepted), "the listener accepts a link")
        return self._accepted.popleft()

    async def pair(
        self,
        listener: Listener | None = None,
        *,
        start_left: bool = True,
        start_right: bool = True,
    ) -> tuple[LinkSide, LinkSide]:
        """Make a link between the near backend (left) and the far one (right)."""
        if listener is None:
            listener = self._listeners[0] if self._listeners else await self.listen()
        left = self.side("left", await self.connect(listener.address))
        right = self.side("right", await self.accept())
        left.across = right
        right.across = left
        if start_left:
            left.start()
        if start_right:
            right.start()
        return left, right

    async def held_pair(self) -> tuple[LinkSide, LinkSide]:
        return await self.pair(start_right=False)

    def ended_by(self, closer: LinkSide, other: LinkSide) -> tuple[LinkSide, ...]:
        return closer, other

    async def rests(self, side: LinkSide) -> None:
        await self.closes(side)

    @property
    def unaccepted(self) -> int:
        """Count the incoming links that :meth:`accept` has not returned."""
        return len(self._accepted)

    def side(self, name: str, link: Link) -> LinkSide:
        """Set a checking handler on a link that has not started yet."""
        side = LinkSide(name, link, self.verdicts)
        self.sides.append(side)
        return side

    def abort_all(self) -> None:
        super().abort_all()
        for link in self._links:
            link.abort()
        self._links.clear()

    def forget(self, *sides: LinkSide) -> None:
        super().forget(*sides)
        gone = {id(side.link) for side in sides}
        self._links = [link for link in self._links if id(link) not in gone]


# The address of an imaginary control link; the kit itself passes descriptors on.
_CONTROL_ADDRESS = Address("tcp", "127.0.0.1", 9)


class LaneRig(Rig[LaneSide]):
    """Two backends joined by lanes, for one check."""

    moves = "payload"

    def __init__(
        self,
        make: Callable[[], Backend],
        settings: Mapping[str, str],
        timeout_s: float,
        address: Address | None = None,
    ) -> None:
        super().__init__(make, timeout_s)
        self.address: Address = address or _CONTROL_ADDRESS
        self._settings = settings
        self._opened = 0

    async def open(self) -> None:
        """Listen with the far backend, if an address was given."""
        if self.address is not _CONTROL_ADDRESS:
            self.address = (await self.listen_on(self.address, _end_link)).address

    async def pair(self) -> tuple[LaneSide, LaneSide]:
        """Make an open lane: the client's side (left) and the server's (right)."""
        left, right = await self.half_joined()
        await self.within(left.join(right.lane.bootstrap), "the client's join")
        return left, right

    async def held_pair(self) -> tuple[LaneSide, LaneSide]:
        left, right = await self.pair()
        right.holding = True
        return left, right

    async def half_joined(self) -> tuple[LaneSide, LaneSide]:
        """Make both sides of a lane; only the server's has joined, which is normal."""
        left, right = self.prepare()
        await self.within(right.join(left.lane.bootstrap), "the server's join")
        return left, right

    def prepare(self) -> tuple[LaneSide, LaneSide]:
        """Make both sides of a lane, before they join."""
        self._opened += 1
        secret = secrets.token_bytes(32)
        left = self._side("left", self.near, Role.CLIENT, secret)
        right = self._side("right", self.far, Role.SERVER, secret)
        left.across = right
        right.across = left
        return left, right

    def _side(self, name: str, backend: Backend, role: Role, secret: bytes) -> LaneSide:
        context = LaneContext(
            role=role,
            number=self._opened % 16 + 1,
            secret=secret,
            remote_address=self.address,
            settings=self._settings,
            windows="peers",
        )
        side = LaneSide(name, backend.open_lane(context), self.verdicts)
        self.sides.append(side)
        return side

    def ended_by(self, closer: LaneSide, other: LaneSide) -> tuple[LaneSide, ...]:
        return (closer,)

    async def rests(self, side: LaneSide) -> None:
        await self.until(
            lambda: side.closed or not (side.lent or side.expected),
            f"{side.name}: its payloads end, or the lane does",
        )


AnyRig: TypeAlias = Rig[Any]


def _end_link(link: Link) -> None:
    """Start an accepted link, and end it at its first header unless it is a lane."""
    stranger = LinkSide("a stranger", link, Verdicts())
    stranger.on_header = lambda _: link.abort()
    stranger.start()


def open_descriptors() -> dict[int, str]:
    """Return the open descriptors of this process, and on Linux their targets."""
    linux = sys.platform == "linux"
    folder = Path("/proc/self/fd" if linux else "/dev/fd")
    found = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            found[int(entry.name)] = str(entry.readlink()) if linux else ""
    return found


def require_collected(seen: Sequence[weakref.ref[T]], what: str) -> None:
    """Require that nothing keeps these objects alive any more."""
    gc.collect()
    held = sum(alive() is not None for alive in seen)
    require(not held, f"{held} of {len(seen)} {what} are kept alive")
