"""What a check works with: two backends, a listener, links, and a clean end.

A rig lives for one check. When it ends it aborts every link, closes every listener and
then looks for what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from kvwire.backend import Backend, Link, Listener
from kvwire.testing.conformance.bench import Bench
from kvwire.testing.conformance.check import CheckOf, GroupOf, require
from kvwire.testing.conformance.side import Side
from kvwire.types import Address


class Rig(Bench):
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
        super().__init__(timeout_s, alone=alone)
        self.make = make
        self.address = address
        self.near = make()
        self.far = make()
        self.sides: list[Side] = []
        self._links: list[Link] = []
        self._accepted: deque[Link] = deque()
        self._listeners: list[Listener] = []

    async def open(self) -> None:
        """Nothing: a check listens and connects as it needs."""

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
            self.announce()
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

    # --- the end ----------------------------------------------------------------------

    async def aclose(self) -> None:
        """End everything, and look for what is left.

        Raises:
            CheckFailed: Something is, or a promise was broken on the way.

        Cancel safety: not cancel safe; links may stay open.
        """
        try:
            self.abort_all()
            started = [side for side in self.sides if side.begun]
            await self.closes(*started)
            for listener in self._listeners:
                await self.within(listener.close(), "listener.close")
            for backend in (self.near, self.far):
                await self.within(backend.aclose(), "aclose")
            await self.settle()
            self._judge_ends()
            self.sides.clear()
            self._links.clear()
            await self.nothing_left()
        finally:
            self.stop_watching()

    def _judge_ends(self) -> None:
        for side in self.sides:
            times = len(side.closed)
            expected = 1 if side.begun else 0
            require(
                times == expected,
                f"{side.name}: link_closed was called {times} times, not {expected}",
            )


Check: TypeAlias = CheckOf[Rig]
"""A check of links."""


class Group(GroupOf[Rig]):
    """Checks of links about one subject."""
