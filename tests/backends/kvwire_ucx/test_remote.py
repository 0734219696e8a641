"""One-sided access: put and get with remote keys, between two workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, MIB
from kvwire.memory.iovec import address_of
from kvwire_ucx.bootstrap import Bootstrap
from kvwire_ucx.context import Context
from kvwire_ucx.endpoint import UcxEndpoint
from kvwire_ucx.memory import MemoryHandles
from kvwire_ucx.remote import Registration, RemoteKey, RemoteMemory
from kvwire_ucx.worker import Worker
from tests.backends.kvwire_ucx.support import needs_ucx, transports_of_this_loop

pytestmark = needs_ucx

NBYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Pair:
    """One side that has memory, and one that has a key of it."""

    arena: bytearray
    remote: RemoteMemory
    near: Worker
    way: UcxEndpoint
    key: RemoteKey


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    loop = asyncio.get_running_loop()
    context = Context({"TLS": transports_of_this_loop()})
    near, far = Worker(context, loop), Worker(context, loop)
    version = context.library.version
    # UCX answers a put and a get that it emulates over an endpoint of the owner's.
    there = UcxEndpoint(
        near, Bootstrap(lane=1, version=version, address=far.address), _ignore
    )
    back = UcxEndpoint(
        far, Bootstrap(lane=2, version=version, address=near.address), _ignore
    )
    arena = bytearray(os.urandom(NBYTES))
    registration = Registration(context, MemoryHandles(memoryview(arena)))
    remote = RemoteMemory(near, there, registration.key)
    try:
        yield Pair(arena, remote, near, there, registration.key)
    finally:
        remote.close()
        for way, worker in ((there, near), (back, far)):
            gone, idle = asyncio.Event(), asyncio.Event()
            way.close(gone.set)
            await gone.wait()
            worker.when_idle(idle.set)
            await idle.wait()
        registration.close()
        near.close()
        far.close()
        context.close()


def _ignore(_status: int) -> None:
    """Each side sees the other's close as a failure; operations tell of their own."""


@pytest.mark.parametrize("nbytes", [1, 4 * KIB, MIB, NBYTES])
async def test_get_reads_what_is_there(nbytes: int) -> None:
    async with pair() as both:
        offset = NBYTES - nbytes
        here = bytearray(nbytes)
        await both.remote.get(MemoryHandles(memoryview(here)), offset)
        assert here == both.arena[offset:]


@pytest.mark.parametrize("nbytes", [1, 4 * KIB, MIB, NBYTES])
async def test_put_writes_there_and_nowhere_else(nbytes: int) -> None:
    async with pair() as both:
        offset = (NBYTES - nbytes) // 2
        expected = bytearray(both.arena)
        data = os.urandom(nbytes)
        expected[offset : offset + nbytes] = data
        await both.remote.put(MemoryHandles(memoryview(data)), offset)
        assert both.arena == expected


async def test_what_was_put_can_be_got() -> None:
    async with pair() as both:
        data, back = os.urandom(MIB), bytearray(MIB)
        await both.remote.put(MemoryHandles(memoryview(data)))
        await both.remote.get(MemoryHandles(memoryview(back)))
        assert back == data


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (NBYTES, 1), (1, NBYTES)])
async def test_a_range_beyond_the_memory_is_refused(offset: int, nbytes: int) -> None:
    async with pair() as both:
        memory = MemoryHandles(memoryview(bytearray(nbytes)))
        with pytest.raises(UsageError, match=rf"range {offset}\+{nbytes} of {NBYTES}"):
            await both.remote.get(memory, offset)
        with pytest.raises(UsageError, match=rf"range {offset}\+{nbytes} of {NBYTES}"):
            await both.remote.put(memory, offset)


async def test_memory_in_pieces_is_refused() -> None:
    arena = bytearray(100)
    addresses = np.array([0, 50], np.uint64) + np.uint64(address_of(arena))
    lengths = np.full(2, 10, np.uint64)
    pieces = MemoryHandles(Fragments(addresses, lengths, owner=arena, writable=True))
    async with pair() as both:
        with pytest.raises(UsageError, match="one contiguous range each"):
            await both.remote.put(pieces)
        with pytest.raises(UsageError, match="memory in pieces"):
            Registration(both.near.context, pieces)


async def test_a_registration_is_closed_once() -> None:
    context = Context({"TLS": transports_of_this_loop()})
    registration = Registration(context, MemoryHandles(memoryview(bytearray(KIB))))
    assert registration.key.nbytes == KIB
    registration.close()
    registration.close()
    context.close()
