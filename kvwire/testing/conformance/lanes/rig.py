"""What a check of lanes works with: two backends, lanes between them, a clean end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvwire.backend import Backend, Landing, Link, LinkHandler, Listener
from kvwire.backend.lane import LaneContext
from kvwire.testing.conformance.check import CheckOf, GroupOf
from kvwire.testing.conformance.joined import JoinedRig
from kvwire.testing.conformance.lanes.side import LaneSide
from kvwire.types import Address, Role

# Where the control link would lead; the kit relays descriptors itself.
_CONTROL_ADDRESS = Address("tcp", "127.0.0.1", 9)


class LaneRig(JoinedRig[LaneSide]):
    """Two backends joined by lanes, for one check.

    Args:
        make: Makes a backend.
        settings: The user's settings for it.
        timeout_s: How long anything that a lane promises may take.
        address: Where the far backend listens while the rig lives; None for nowhere.
    """

    moves = "payload"
    ends_both = False

    def __init__(
        self,
        make: Callable[[], Backend],
        settings: Mapping[str, str],
        timeout_s: float,
        address: Address | None = None,
    ) -> None:
        super().__init__(make, timeout_s)
        self._settings = settings
        self._opened = 0
        self._address = address or _CONTROL_ADDRESS
        self._listener: Listener | None = None

    async def open(self) -> None:
        """Listen with the far backend, if it was said where."""
        if self._address is not _CONTROL_ADDRESS:
            self._listener = await self.within(
                self.far.listen(self._address, _welcome), "listen"
            )
            self._address = self._listener.address

    async def pair(self) -> tuple[LaneSide, LaneSide]:
        """Make a lane that is up: the client's side (left) and the server's (right)."""
        left, right = self.prepare()
        await self.join(left, right)
        return left, right

    async def held_pair(self) -> tuple[LaneSide, LaneSide]:
        """See JoinedRig: the right side leaves what comes in its inbox."""
        left, right = await self.pair()
        right.holding = True
        return left, right

    def prepare(self) -> tuple[LaneSide, LaneSide]:
        """Both sides of a lane, not joined."""
        self._opened += 1
        secret = secrets.token_bytes(32)
        left = self._open("left", self.near, Role.CLIENT, secret)
        right = self._open("right", self.far, Role.SERVER, secret)
        left.across, right.across = right, left
        return left, right

    async def join(self, left: LaneSide, right: LaneSide) -> None:
        """Bring a lane up, in the order of a connection's handshake."""
        await self.within(right.join(left.lane.bootstrap), "the server's join")
        await self.within(left.join(right.lane.bootstrap), "the client's join")

    def _open(self, name: str, backend: Backend, role: Role, secret: bytes) -> LaneSide:
        context = LaneContext(
            role=role,
            number=self._opened % 16 + 1,
            secret=secret,
            remote_address=self._address,
            settings=self._settings,
        )
        side = LaneSide(name, backend.open_lane(context), self.verdicts)
        self.sides.append(side)
        return side

    # --- waiting ----------------------------------------------------------------------

    async def ends(self, side: LaneSide) -> None:
        """Wait until nothing of a side is left open, or it has closed."""
        await self.until(
            lambda: side.closed or not (side.lent or side.expected),
            f"{side.name}: its payloads end, or the lane does",
        )

    def abort_all(self) -> None:
        """See Joined."""
        for side in self.sides:
            side.abort()

    async def stop_listening(self) -> None:
        """See Joined.

        Cancel safety: not cancel safe; the listener may stay open.
        """
        if self._listener is not None:
            await self.within(self._listener.close(), "the listener's close")


LaneCheck: TypeAlias = CheckOf[LaneRig]
"""A check of lanes."""


class LaneGroup(GroupOf[LaneRig]):
    """Checks of lanes about one subject."""


class _Stranger(LinkHandler):
    """Ends every link: whoever comes in here is a lane, or nobody."""

    def header_received(self, link: Link, header: memoryview) -> Landing:
        link.abort()
        return Landing(0, None)

    def body_received(self, link: Link, landing: Landing) -> None:
        return

    def frame_sent(self, link: Link, token: object) -> None:
        return

    def link_writable(self, link: Link) -> None:
        return

    def link_closed(self, link: Link, error: Exception | None) -> None:
        return


def _welcome(link: Link) -> None:
    link.start(_Stranger())
