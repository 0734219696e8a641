"""Two communicators and a connection between them, in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import kvwire
from kvwire import Address, Communicator, Connection
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
    near: Mapping[str, Any] = {}, far: Mapping[str, Any] = {}, **both: Any
) -> AsyncIterator[tuple[Communicator, Communicator]]:
    """Two communicators, with a configuration for each and one for both."""
    both = {"handshake_timeout_s": PATIENCE_S, **both}
    async with (
        kvwire.open(**{"name": "near", **both, **near}) as one,
        kvwire.open(**{"name": "far", **both, **far}) as other,
    ):
        yield one, other


async def join(
    near: Communicator,
    far: Communicator,
    scheme: str = "tcp",
    *,
    transport: str | None = None,
) -> Pair:
    """Connect the first to the second, which listens."""
    address = await far.listen(anywhere(scheme))
    left = await near.connect(address, transport=transport)
    return Pair(near, far, left, await anext(far.connections()), address)


@asynccontextmanager
async def connected(
    scheme: str = "tcp",
    *,
    transport: str | None = None,
    near: Mapping[str, Any] = {},
    far: Mapping[str, Any] = {},
    **both: Any,
) -> AsyncIterator[Pair]:
    """Two connected communicators; both are closed at the end."""
    async with communicators(near, far, **both) as (one, other):
        yield await join(one, other, scheme, transport=transport)


async def until(condition: Callable[[], object]) -> None:
    """Give the loop turns until a condition holds that no event announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)


async def turns(count: int) -> None:
    """Give the loop so many turns: for what must not happen, or by itself."""
    for _ in range(count):
        await asyncio.sleep(0)
