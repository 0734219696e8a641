"""Goal R18: a thousand times connect, use, fail; nothing may be left of them."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

import kvwire
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.handshake import HandshakeDriver
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.records import RequestRecord
from kvwire_certify.conformance.rig import open_descriptors
from tests.support import inside
from tests.support.pairs import Pair, communicators, until

# On each of two loops.
CYCLES = 500
LARGE = bytes(200_000)
KINDS = (
    kvwire.Communicator,
    kvwire.Connection,
    ConnectionCore,
    RequestRecord,
    kvwire.Grant,
    HandshakeDriver,
    ConnectionDriver,
    kvwire.Region,
)

Failure = Callable[[Pair], Awaitable[None]]


async def abort_here(pair: Pair) -> None:
    pair.left.abort()


async def abort_there(pair: Pair) -> None:
    pair.right.abort()


async def close_here(pair: Pair) -> None:
    await pair.left.close()


async def close_both(pair: Pair) -> None:
    await asyncio.gather(pair.left.close(), pair.right.close())


async def cancel_everything(pair: Pair) -> None:
    task = asyncio.create_task(pair.right.recv(5))
    await asyncio.sleep(0)
    task.cancel()
    pair.left.send(6, LARGE).cancel()
    pair.left.abort()


async def miss_a_deadline(pair: Pair) -> None:
    with suppress(kvwire.DeadlineExceeded, kvwire.KVWireError):
        await pair.right.recv(5, bytearray(10), deadline=0)
    pair.right.abort()


async def disturb_the_listener(pair: Pair) -> None:
    """A stranger talks nonsense, another one leaves before it has said anything."""
    loop = asyncio.get_running_loop()
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 10, b""):
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, (pair.address.host, pair.address.port))
            await loop.sock_sendall(sock, said)
    pair.left.abort()


FAILURES: tuple[Failure, ...] = (
    *(abort_here, abort_there, close_here, close_both),
    *(cancel_everything, miss_a_deadline, disturb_the_listener),
)


async def cycle(pair: Pair, fail: Failure) -> None:
    """Use a connection in every way, and end it in the middle of that."""
    memory = bytearray(len(LARGE))
    region = pair.far.register(memory, "readwrite")
    grant = region.grant(pair.right)
    requests: list[kvwire.Request[int]] = [
        pair.left.send(1, b"taken"),
        pair.left.send(2, b"never taken"),
        pair.left.send(3, LARGE),
        pair.left.put(LARGE, grant),
        pair.left.get(grant, bytearray(len(LARGE))),
        pair.right.recv(3, bytearray(len(LARGE))),
        pair.left.recv(4, bytearray(10)),
    ]
    await pair.right.recv(1)
    await fail(pair)
    for request in requests:
        with suppress(kvwire.KVWireError):
            await request
        await request.released()
    await asyncio.gather(pair.left.close(), pair.right.close())
    await region.close()


def counted() -> Counter[str]:
    gc.collect()
    kinds = Counter(type(item) for item in gc.get_objects())
    return Counter({kind.__name__: kinds[kind] for kind in (*KINDS, kvwire.Request)})


@pytest.mark.slow
async def test_nothing_is_left_of_a_thousand_failures() -> None:
    asyncio.get_running_loop().set_debug(False)
    rng = random.Random(18)
    async with communicators(close_timeout_s=0.5) as (near, far):
        address = await far.listen("127.0.0.1:0")

        async def run(cycles: int) -> None:
            for _ in range(cycles):
                left, right = await near.connect(address), await far.accept()
                pair = Pair(near, far, left, right, address)
                await cycle(pair, rng.choice(FAILURES))
            await until(lambda: not inside.drivers(near) and not inside.drivers(far))
            await until(lambda: not inside.accepting(far))

        await run(len(FAILURES))
        objects, descriptors = counted(), open_descriptors()
        tasks, threads = asyncio.all_tasks(), threading.active_count()
        await run(CYCLES)

        assert counted() == objects
        assert len(inside.buffers(near)) == len(inside.buffers(far)) == 0
        assert len(inside.buffers(near).holds) == len(inside.buffers(far).holds) == 0
        assert not inside.registry(near).live
        assert len(open_descriptors()) == len(descriptors)
        assert asyncio.all_tasks() == tasks
        assert threading.active_count() == threads
