"""Two communicators whose data goes over a lane under test, and caches to move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvwire import KVSpec, PagedCache
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx import support as ucx
from tests.support.caches import Array, Memory
from tests.support.pairs import Pair, connected

BLOCKS = 8
OURS, THEIRS = [0, 2, 4], [7, 5, 3]
# Bytes of a block and layer: packed into messages, and read where they lie.
SMALL = KVSpec(layers=4, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
LARGE = KVSpec(layers=2, kv_heads=16, head_dim=128, block_tokens=128, dtype="float16")
# What memory is filled with once it is said to be free.
CANARY = 0x7B


class Over(NamedTuple):
    """A backend, and its settings on the loop of the test."""

    backend: str
    settings: Callable[[], dict[str, str]] = dict


LANES: dict[str, tuple[Over, Any]] = {
    "local": (Over("local"), ()),
    "local-arena": (Over("local", lambda: {"way": "arena"}), ()),
    "ucx": (Over("ucx", lambda: {"TLS": ucx.transports_of_this_loop()}), ucx.needs_ucx),
    "nixl": (Over("nixl"), needs_nixl),
}
each_lane = pytest.mark.parametrize(
    "over",
    [pytest.param(over, marks=marks, id=name) for name, (over, marks) in LANES.items()],
)


def cache(spec: KVSpec, value: float) -> tuple[PagedCache, list[Array]]:
    """A cache whose layers count up from a value."""
    made = Memory(spec, BLOCKS)
    for layer, tensor in enumerate(made.tensors):
        tensor[:] = value + layer
    return made.cache, made.tensors


@asynccontextmanager
async def pair(
    backend: str, left: dict[str, str], right: dict[str, str] | None = None
) -> AsyncIterator[Pair]:
    """Connected over TCP, with the backend preferred for the data."""
    near, far = (
        {"backends": {backend: own}} for own in (left, left if right is None else right)
    )
    async with connected(near=near, far=far, prefer=(backend,)) as made:
        assert made.left.transport == backend
        yield made


def require_untouched(*memories: Array | bytearray) -> None:
    for memory in memories:
        assert (np.frombuffer(memory, np.uint8) == CANARY).all(), "a late write"


def begun(
    both: Pair, verb: str, key: object, source: PagedCache, target: PagedCache
) -> tuple[Any, Any]:
    """The two sides of one transfer, from near to far: incoming and outgoing."""
    name: Any = key
    if verb == "push":
        incoming = both.far.expect(name, target, THEIRS)
        return incoming, both.left.push(name, source, OURS)
    outgoing = both.near.publish(name, source, OURS)
    return both.right.pull(name, target, THEIRS), outgoing


async def go_on(both: Pair, seconds: float) -> None:
    """Move other things over the same lane for a while."""
    loop, message = asyncio.get_running_loop(), bytes(1 << 20)
    end = loop.time() + seconds
    while loop.time() < end:
        request = both.left.send(1, message)
        assert await both.right.recv(1) == message
        await request
