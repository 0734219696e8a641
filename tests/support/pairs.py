"""Two communicators and a connection between them, in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import kvwire
from kvwire import Address, Communicator, Connection, Region
from kvwire.types import AccessName
from tests.support import inside
from tests.support.waiting import PATIENCE_S

SCHEMES: Final = ("tcp", "inproc")
_NAMES = itertools.count()


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of one connection."""

    near: Communicator
    far: Communicator
    left: Connection
    right: Connection
    address: Address


def anywhere(scheme: str) -> str:
    """An address of a scheme that nobody listens on."""
    if scheme == "inproc":
        return f"inproc://pair-{next(_NAMES)}"
    return f"{scheme}://127.0.0.1:0"


@asynccontextmanager
async def communicators(
    **config: Any,
) -> AsyncIterator[tuple[Communicator, Communicator]]:
    """Two communicators with the same configuration; both are closed at the end."""
    patient = {"handshake_timeout_s": PATIENCE_S}
    async with (
        kvwire.open(**{"name": "near", **patient, **config}) as near,
        kvwire.open(**{"name": "far", **patient, **config}) as far,
    ):
        yield near, far


@asynccontextmanager
async def connected(scheme: str = "tcp", **config: Any) -> AsyncIterator[Pair]:
    """Two connected communicators with the same configuration."""
    async with communicators(**config) as (near, far):
        address = await far.listen(anywhere(scheme))
        left = await near.connect(address)
        right = await anext(far.connections())
        yield Pair(near, far, left, right, address)


def registered(end: Connection, memory: bytearray, access: AccessName) -> Region:
    """Memory registered with the communicator that a connection is of."""
    state = inside.state(end).communicator
    return Region(state, state.register(memory, access))


async def until(condition: Callable[[], object]) -> None:
    """Give the loop turns until a condition holds that no event announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)
