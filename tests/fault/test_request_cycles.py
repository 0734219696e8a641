"""Memory of what has ended is free without the garbage collector, however it ended.

Engines freeze or disable it. So no error may refer to the object that keeps it: the
error's traceback has the frames of whoever waited, and these name the buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire.backend import registry
from kvwire.endpoint.observers import TransferLog
from tests.support.pairs import Pair, connected, turns, until

NBYTES = 1 << 20
SPEC = kvwire.KVSpec(
    layers=2, kv_heads=2, head_dim=64, block_tokens=16, dtype="float16"
)
SOON_S = 0.01
Bytes = npt.NDArray[np.uint8]


class Buffers:
    """Makes memory, and knows which of it is alive."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []

    def __call__(self) -> Bytes:
        array = np.zeros(NBYTES, np.uint8)
        self._made.append(weakref.ref(array))
        return array

    def cache(self) -> kvwire.PagedCache:
        shape = (8, 2, 16, 2, 64)
        layers = [np.zeros(shape, np.float16) for _ in range(2)]
        self._made += map(weakref.ref, layers)
        return kvwire.PagedCache(SPEC, layers)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._made)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def expect_freed(
    use: Callable[[Pair, Buffers], Awaitable[object]],
) -> Callable[[str], Awaitable[None]]:
    """Make a test of a use: three times over each transport, its memory is free."""

    @pytest.mark.parametrize("transport", ["tcp", "inproc", "local", "ucx"])
    async def test(transport: str) -> None:
        found = registry.availability(transport)
        if not found.available:
            pytest.skip(f"{transport}: {found.reason}")
        made = Buffers()
        async with connected(transport=None, prefer=(transport, "tcp")) as pair:
            for _ in range(3):
                with contextlib.suppress(kvwire.KVWireError, TimeoutError):
                    await use(pair, made)
            async with asyncio.timeout(10):
                await until(lambda: not made.alive)

    test.__name__ = use.__name__
    checked: Callable[[str], Awaitable[None]] = test
    return checked


@expect_freed
async def test_sent_and_received(pair: Pair, made: Buffers) -> None:
    target = made()
    received = pair.right.recv(1, into=target)
    sent = pair.left.send(1, made())
    await sent
    await received


@expect_freed
async def test_put_and_got(pair: Pair, made: Buffers) -> None:
    region = pair.far.register(made(), "readwrite")
    grant = region.grant(pair.right)
    target = made()
    await pair.left.put(made(), grant)
    await pair.left.get(grant, into=target)
    await region.close()


@expect_freed
async def test_a_receive_with_a_deadline(pair: Pair, made: Buffers) -> None:
    request = pair.left.recv(2, into=made(), deadline=SOON_S)
    await request


@expect_freed
async def test_a_receive_that_is_cut_short(pair: Pair, made: Buffers) -> None:
    request = pair.left.recv(2, into=made())
    await asyncio.wait_for(request, SOON_S)


@expect_freed
async def test_a_receive_that_is_cancelled(pair: Pair, made: Buffers) -> None:
    request = pair.left.recv(2, into=made())
    request.cancel()
    await request


@expect_freed
async def test_a_task_that_is_cancelled(pair: Pair, made: Buffers) -> None:
    task = asyncio.create_task(pair.left.recv(2, into=made()))
    await turns(5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@expect_freed
async def test_a_send_with_a_deadline(pair: Pair, made: Buffers) -> None:
    request = pair.left.send(3, made(), deadline=SOON_S)
    try:
        await request
    finally:
        await request.released()


@expect_freed
async def test_a_result_that_is_raised_again(pair: Pair, made: Buffers) -> None:
    request = pair.left.send(3, made(), deadline=SOON_S)
    with contextlib.suppress(kvwire.DeadlineExceeded):
        await request
    request.result()


@expect_freed
async def test_a_get_that_is_refused(pair: Pair, made: Buffers) -> None:
    region = pair.far.register(made(), "read")
    grant = region.grant(pair.right)
    await region.close()
    request = pair.left.get(grant, into=made())
    await request


@expect_freed
async def test_a_put_that_is_refused(pair: Pair, made: Buffers) -> None:
    region = pair.far.register(made(), "read")
    request = pair.left.put(made(), region.grant(pair.right))
    try:
        await request
    finally:
        await region.close()


@expect_freed
async def test_a_peer_that_is_not_there(pair: Pair, made: Buffers) -> None:
    peer = pair.near.peer("127.0.0.1:1")
    request = peer.send(1, made(), deadline=SOON_S)
    try:
        await request
    finally:
        await peer.close()


@expect_freed
async def test_a_window_that_is_read(pair: Pair, made: Buffers) -> None:
    exposed = pair.far.expose("w", made(), block_bytes=4096)
    ticket = exposed.offer([1, 2])
    window = await pair.left.window("w")
    exposed.withdraw([2])
    outcome = await window.get(ticket, into=made()[:8192], blocks=[0, 1])
    assert not outcome.complete
    await window.close()
    await exposed.close()


@expect_freed
async def test_a_window_that_is_not_there(pair: Pair, made: Buffers) -> None:
    buffer = made()
    assert buffer.size
    await pair.left.window("nothing", deadline=SOON_S)


@expect_freed
async def test_a_transfer(pair: Pair, made: Buffers) -> None:
    await _transfer(pair, made)


@expect_freed
async def test_a_transfer_with_a_codec(pair: Pair, made: Buffers) -> None:
    await _transfer(pair, made, codec="int8")


async def _transfer(pair: Pair, made: Buffers, **codec: Any) -> None:
    out = pair.far.publish("t", made.cache(), range(8), **codec)
    out.ready()
    out.finish()
    incoming = pair.left.pull("t", made.cache(), range(8), **codec)
    assert (await incoming).complete
    await asyncio.gather(out, incoming.drained(), out.drained())


@expect_freed
async def test_a_transfer_that_is_aborted(pair: Pair, made: Buffers) -> None:
    out = pair.far.publish("t", made.cache(), range(8))
    incoming = pair.left.pull("t", made.cache(), range(8))
    out.ready(layers=0)
    await incoming.layer(0)
    out.abort("enough")
    try:
        await incoming.layer(1)
    finally:
        await asyncio.gather(incoming.drained(), out.drained())


class Together(TransferLog):
    def __init__(self, transfer: kvwire.Incoming) -> None:
        self._transfer = transfer

    def ended(self, *_: object) -> None:
        self._transfer.abort("the other one has ended")


@expect_freed
async def test_a_transfer_that_an_observer_aborts(pair: Pair, made: Buffers) -> None:
    """It is called while the connection handles the end of another one, and aborts."""
    one, other = (pair.far.publish(name, made.cache(), range(8)) for name in "ab")
    ended, aborted = (pair.left.pull(name, made.cache(), range(8)) for name in "ab")
    other.ready(layers=0)
    await aborted.layer(0)

    pair.near.watchers.add(watcher := Together(aborted))
    one.abort("enough")
    await asyncio.gather(ended, aborted, one, other)
    pair.near.watchers.remove(watcher)
    await asyncio.gather(*(end.drained() for end in (ended, aborted, one, other)))


@expect_freed
async def test_a_transfer_with_a_deadline(pair: Pair, made: Buffers) -> None:
    incoming = pair.left.pull("nothing", made.cache(), range(8), deadline=SOON_S)
    outcome = await incoming
    assert not outcome.complete
    await incoming.layer(0)


@expect_freed
async def test_a_push_that_nobody_expects(pair: Pair, made: Buffers) -> None:
    out = pair.left.push("nothing", made.cache(), range(8), deadline=SOON_S)
    out.ready()
    assert not (await out).complete
    await out.drained()


@expect_freed
async def test_a_connection_that_is_aborted(pair: Pair, made: Buffers) -> None:
    other = await pair.near.connect(pair.address)
    request = other.recv(1, into=made())
    sent = other.send(1, made())
    asyncio.get_running_loop().call_soon(other.abort, "enough")
    try:
        await request
    finally:
        with contextlib.suppress(kvwire.KVWireError):
            await sent
        await sent.released()
        await (await pair.far.accept()).wait_closed()


@expect_freed
async def test_a_connection_that_is_closed(pair: Pair, made: Buffers) -> None:
    other = await pair.near.connect(pair.address)
    await other.close()
    await (await pair.far.accept()).wait_closed()
    await other.send(1, made())
