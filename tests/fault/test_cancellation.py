"""Goal R10: every public coroutine interrupted at every suspension point.

Afterwards the pair is usable or cleanly closed, and nothing is left. "Late" is the
worst moment there is: what was awaited has arrived, and the task is cancelled before it
can look at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from kvwire import ConnectionClosed, KVWireError, Region
from kvwire.limits import EAGER_BYTES
from kvwire.types import AccessName
from tests.fault.interrupt import How, Interrupted
from tests.support.pairs import Pair, connected, until

LARGE = bytes(range(256)) * (EAGER_BYTES // 64)
# No public coroutine suspends more often than this; without it a sweep might not end.
SUSPENSIONS_MAX = 60


class Scene:
    """A pair, and what else goes on while something of it is interrupted."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._beside: list[asyncio.Future[Any]] = []

    def beside(self, awaitable: Awaitable[Any]) -> None:
        """Let the other side do its part."""
        self._beside.append(asyncio.ensure_future(awaitable))

    async def end(self) -> None:
        """Stop what still goes on."""
        for future in self._beside:
            future.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)


def _region(scene: Scene, access: AccessName) -> Region:
    return scene.pair.far.register(bytearray(len(LARGE)), access)


def listen(scene: Scene) -> Awaitable[Any]:
    return scene.pair.near.listen("localhost:0")


def connect(scene: Scene) -> Awaitable[Any]:
    return scene.pair.near.connect(scene.pair.address)


def accept(scene: Scene) -> Awaitable[Any]:
    scene.beside(connect(scene))
    return scene.pair.far.accept()


def iterate(scene: Scene) -> Awaitable[Any]:
    scene.beside(connect(scene))
    return anext(scene.pair.far.connections())


def send(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.right.recv(1))
    return scene.pair.left.send(1, LARGE)


def receive(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.left.send(1, LARGE))
    return scene.pair.right.recv(1)


def receive_into(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.left.send(1, b"small"))
    return scene.pair.right.recv(1, bytearray(5))


def put(scene: Scene) -> Awaitable[Any]:
    grant = _region(scene, "write").grant(scene.pair.right)
    return scene.pair.left.put(LARGE, grant)


def get(scene: Scene) -> Awaitable[Any]:
    grant = _region(scene, "read").grant(scene.pair.right)
    return scene.pair.left.get(grant, bytearray(len(LARGE)))


def released(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.right.recv(1))
    return scene.pair.left.send(1, LARGE).released()


def close_region(scene: Scene) -> Awaitable[Any]:
    region = _region(scene, "write")
    scene.beside(scene.pair.left.put(LARGE, region.grant(scene.pair.right)))
    return region.close()


def close_connection(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.right.recv(1))
    scene.pair.left.send(1, LARGE)
    return scene.pair.left.close()


def wait_closed(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.right.close())
    return scene.pair.left.wait_closed()


def close_communicator(scene: Scene) -> Awaitable[Any]:
    scene.beside(scene.pair.right.recv(1))
    scene.pair.left.send(1, LARGE)
    return scene.pair.near.close()


COROUTINES = (
    *(listen, connect, accept, iterate, send, receive, receive_into, put, get),
    *(released, close_region, close_connection, wait_closed, close_communicator),
)


async def interrupt(
    coroutine: Callable[[Scene], Awaitable[Any]], at: int, how: How, *, death: bool
) -> bool:
    """One case; False if the coroutine has no such suspension."""
    async with connected(close_timeout_s=0.5) as pair:
        scene = Scene(pair)
        peer_dies = pair.far.abort if death else None
        interrupted = Interrupted(coroutine(scene), at, how, also=peer_dies)
        task = asyncio.create_task(interrupted.run())
        await asyncio.wait([task])
        if not interrupted.hit:
            task.result()
        with suppress(asyncio.CancelledError, KVWireError, TimeoutError, OSError):
            task.result()
        await scene.end()
        await expect_usable_or_closed(pair)
    for comm in (pair.near, pair.far):
        await until(lambda comm=comm: not comm._state.drivers)  # type: ignore[misc]
        # Regions are still registered: their owner has not closed them.
        assert len(comm._state.buffers) == len(comm._state._regions)
    return interrupted.hit


async def expect_usable_or_closed(pair: Pair) -> None:
    """Both directions carry a message, or both ends are over."""
    try:
        for sender, receiver in ((pair.left, pair.right), (pair.right, pair.left)):
            received = receiver.recv(77)
            await sender.send(77, b"alive")
            assert await received == b"alive"
    except ConnectionClosed:
        for end in (pair.left, pair.right):
            await end.wait_closed()


@pytest.mark.parametrize("coroutine", COROUTINES)
@pytest.mark.parametrize("how", How)
async def test_every_suspension(
    coroutine: Callable[[Scene], Awaitable[Any]], how: How
) -> None:
    for at in range(SUSPENSIONS_MAX):
        if not await interrupt(coroutine, at, how, death=False):
            break
    else:
        pytest.fail("the sweep did not reach the end of the coroutine")


@pytest.mark.parametrize("coroutine", COROUTINES)
async def test_every_suspension_and_the_peer_dies(
    coroutine: Callable[[Scene], Awaitable[Any]],
) -> None:
    for at in range(SUSPENSIONS_MAX):
        if not await interrupt(coroutine, at, How.CANCEL, death=True):
            break
    else:
        pytest.fail("the sweep did not reach the end of the coroutine")
