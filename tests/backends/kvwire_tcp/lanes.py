"""Lanes over loopback, and a handler that writes down what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

from kvwire.backend import Landing, Link
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.types import Address, Role
from kvwire_tcp import TcpBackend
from kvwire_tcp.lane import TcpLane
from tests.backends.kvwire_tcp.recorder import ANYWHERE, Body


class LaneRecorder(LaneHandler):
    """Notes every callback."""

    def __init__(self) -> None:
        self.landed: list[Landing] = []
        self.sent: list[object] = []
        self.closed: list[Exception | None] = []
        self.writable = 0
        self._changed = asyncio.Event()

    def payload_sent(self, lane: Lane, token: object) -> None:
        self._note()
        self.sent.append(token)

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        self._note()
        self.landed.append(landing)

    def lane_writable(self, lane: Lane) -> None:
        self._note()
        self.writable += 1

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        self._note()
        self.closed.append(error)

    @property
    def contents(self) -> list[bytes | None]:
        """The payloads that have landed."""
        return [landing.content for landing in self.landed if isinstance(landing, Body)]

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait for callbacks until ``ready`` holds."""
        while not ready():
            assert not self.closed, f"closed with {self.closed[0]!r}"
            self._changed.clear()
            await self._changed.wait()

    async def have(self, count: int) -> None:
        """Wait until so many payloads have landed, and so many were sent."""
        await self.until(lambda: len(self.landed) >= count and len(self.sent) >= count)

    async def end(self) -> Exception | None:
        """What the lane was closed with."""
        await self.until(lambda: self.closed)
        return self.closed[0]

    def _note(self) -> None:
        assert not self.closed, "a callback after lane_closed"
        self._changed.set()


class House:
    """A backend that listens, and links that strangers get from it.

    Attributes:
        backend: It both listens and dials.
        address: Where it listens.
        links: What it has accepted, in order; lanes begin as links too.
    """

    def __init__(self, backend: TcpBackend, address: Address) -> None:
        self.backend = backend
        self.address = address
        self.links: list[Link] = []

    def lane(
        self,
        role: Role,
        secret: bytes,
        *,
        number: int = 1,
        address: Address | None = None,
    ) -> TcpLane:
        """One half of a lane, not joined."""
        lane = self.backend.open_lane(
            LaneContext(
                role=role,
                number=number,
                secret=secret,
                remote_address=address or self.address,
            )
        )
        assert isinstance(lane, TcpLane)
        return lane


class Ends:
    """Both halves of a lane that is up, and what each was told."""

    def __init__(self, client: TcpLane, server: TcpLane) -> None:
        self.client, self.server = client, server
        self.at_client, self.at_server = LaneRecorder(), LaneRecorder()


@contextlib.asynccontextmanager
async def house(accepted: Callable[[Link], None]) -> AsyncIterator[House]:
    """A listening backend; ``accepted`` gets its links."""
    backend = TcpBackend()

    def accept(link: Link) -> None:
        made.links.append(link)
        accepted(link)

    listener = await backend.listen(ANYWHERE, accept)
    made = House(backend, listener.address)
    try:
        yield made
    finally:
        await listener.close()
        for link in made.links:
            link.abort()
        await backend.aclose()


@contextlib.asynccontextmanager
async def raised(home: House, address: Address | None = None) -> AsyncIterator[Ends]:
    """A lane that is up; each half hears of its end once."""
    secret = secrets.token_bytes(32)
    ends = Ends(
        home.lane(Role.CLIENT, secret, address=address), home.lane(Role.SERVER, secret)
    )
    await ends.server.join(ends.client.bootstrap, ends.at_server)
    await ends.client.join(ends.server.bootstrap, ends.at_client)
    try:
        yield ends
    finally:
        ends.client.abort()
        ends.server.abort()
        await ends.at_client.end()
        await ends.at_server.end()
        await asyncio.sleep(0)
        assert len(ends.at_client.closed) == len(ends.at_server.closed) == 1
