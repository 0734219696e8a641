"""Lanes over loopback, and a handler that writes down what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

from kvwire.backend import Link
from kvwire.backend.lane import LaneContext
from kvwire.types import Address, Role
from kvwire_tcp import TcpBackend
from kvwire_tcp.lane import TcpLane
from tests.backends.kvwire_tcp.recorder import ANYWHERE, Body
from tests.backends.lane_recorder import LaneRecorder


class BodyRecorder(LaneRecorder):
    """Knows what has landed."""

    @property
    def contents(self) -> list[bytes | None]:
        """The payloads."""
        return [body.content for body in self.received if isinstance(body, Body)]


class House:
    """A backend that listens, and links that strangers get from it."""

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
        self.at_client, self.at_server = BodyRecorder(), BodyRecorder()


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
