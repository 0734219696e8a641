"""What a check works with: two backends, a listener, links, and a clean end.

A rig lives for one check. When it ends it aborts every link, closes every listener and
then looks for what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from kvwire.backend import Backend, Link, Listener
from kvwire.testing.conformance.check import CheckOf, GroupOf
from kvwire.testing.conformance.joined import JoinedRig
from kvwire.testing.conformance.side import LinkSide
from kvwire.types import Address


class Rig(JoinedRig[LinkSide]):
    """Two backends joined by links, for one check.

    Args:
        make: Makes a backend.
        address: To listen on, as often as a check wants: any free port or name.
        timeout_s: How long anything that a backend promises may take.
        alone: No other rig is at work, so that descriptors left are this one's.

    """

    moves = "frame"
    ends_both = True

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
        """Return the next link that came in and was not asked for yet."""
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
        if start_left:
            left.start()
        if start_right:
            right.start()
        return left, right

    async def held_pair(self) -> tuple[LinkSide, LinkSide]:
        """See JoinedRig: the right side is not started."""
        return await self.pair(start_right=False)

    async def ends(self, side: LinkSide) -> None:
        """See JoinedRig."""
        await self.closes(side)

    @property
    def unaccepted(self) -> int:
        """Links that came in and were not asked for."""
        return len(self._accepted)

    def side(self, name: str, link: Link) -> LinkSide:
        """Put a handler that judges on a link, not yet started."""
        side = LinkSide(name, link, self.verdicts)
        self.sides.append(side)
        return side

    def abort_all(self) -> None:
        """Abort every link there is."""
        for side in self.sides:
            side.abort()
        for link in self._links:
            link.abort()

    def forget(self, *sides: LinkSide) -> None:
        """See Joined: also of their links."""
        super().forget(*sides)
        gone = {id(side.link) for side in sides}
        self._links = [link for link in self._links if id(link) not in gone]

    async def stop_listening(self) -> None:
        """See Joined.

        Cancel safety: not cancel safe; listeners may stay open.
        """
        for listener in self._listeners:
            await self.within(listener.close(), "listener.close")
        self._links.clear()


Check: TypeAlias = CheckOf[Rig]
"""A check of links."""


class Group(GroupOf[Rig]):
    """Checks of links about one subject."""
