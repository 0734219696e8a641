"""Both halves of a lane in this process, which reads itself."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvwire.backend.lane import LaneContext
from kvwire.types import OneSidedWindows, Role
from kvwire_local.backend import LocalBackend
from kvwire_local.lane import LocalLane
from tests.backends.recorders import LaneRecorder

# Tests beside this one have lanes of their own.
SECRET = secrets.token_bytes(32)


class Halves(NamedTuple):
    """Both halves of a lane, and what each of them was told."""

    client: LocalLane
    server: LocalLane
    at_client: LaneRecorder
    at_server: LaneRecorder


def open_lane(
    role: Role,
    way: str = "auto",
    windows: OneSidedWindows = "user",
    tracer: str = "one",
) -> LocalLane:
    settings = {"way": way, "tracer": tracer}
    context = LaneContext(
        role=role, number=1, secret=SECRET, settings=settings, windows=windows
    )
    lane = LocalBackend().open_lane(context)
    assert isinstance(lane, LocalLane)
    return lane


@asynccontextmanager
async def halves(
    way: str = "auto", windows: OneSidedWindows = "user", tracer: str = "one"
) -> AsyncIterator[Halves]:
    """A lane that is up; aborted at the end, unless it has ended before."""
    client = open_lane(Role.CLIENT, way, windows, tracer)
    server = open_lane(Role.SERVER, way, windows, tracer)
    both = Halves(client, server, LaneRecorder(), LaneRecorder())
    try:
        await server.join(client.bootstrap, both.at_server)
        await client.join(server.bootstrap, both.at_client)
        await server._rendezvous_task  # type: ignore[misc]
        yield both
    finally:
        client.abort()
        server.abort()
        await asyncio.sleep(0)
