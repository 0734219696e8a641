"""Rule T2: a timeout fails a request, and frees nothing.

Memory that a transport may still touch is counted as quarantined until the transport
has said that it is through, or is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvwire import DeadlineExceeded, Grant, Request, RequestCancelled
from kvwire.limits import CHUNK_BYTES, HEADER_BYTES
from kvwire.wire.control import AccessBody, Announce, Ready
from kvwire.wire.header import FrameType
from tests.fault.stranger import Stranger, dial
from tests.support import inside
from tests.support.pairs import Pair, until

TAG = 7
MESSAGE = b"m" * (CHUNK_BYTES // 2)


async def by_deadline(request: Request[int]) -> None:
    with pytest.raises(DeadlineExceeded):
        await request


async def by_cancel(request: Request[int]) -> None:
    request.cancel()
    with pytest.raises(RequestCancelled):
        await request


async def expect_busy(released: asyncio.Task[None]) -> None:
    _, pending = await asyncio.wait([released], timeout=0.05)
    assert pending, "memory that a transport may touch was given back"


async def half_of_a_message(stranger: Stranger) -> bytes:
    """Announce a message, wait for memory, and send half; the other half."""
    announce = Announce(TAG.to_bytes(8, "little"), len(MESSAGE))
    await stranger.say(stranger.control(FrameType.ANNOUNCE, announce, request=1))
    ready = await stranger.hear()
    assert ready.header.type == FrameType.READY
    return await half_of_the_data(stranger)


async def half_of_a_put(stranger: Stranger, grant: Grant) -> bytes:
    """Ask to put, and send half; the other half."""
    where = AccessBody(grant.grant, grant.generation, grant.token, 0, len(MESSAGE))
    await stranger.say(stranger.control(FrameType.PUT, where, request=1))
    return await half_of_the_data(stranger)


async def half_of_the_data(stranger: Stranger) -> bytes:
    frame = stranger.payload(FrameType.DATA, MESSAGE, request=1)
    middle = HEADER_BYTES + len(MESSAGE) // 2
    await stranger.say(frame[:middle])
    return frame[middle:]


Ends = Callable[[Request[int]], Awaitable[None]]


@pytest.mark.parametrize("ends", [by_deadline, by_cancel])
@pytest.mark.parametrize("then", ["the rest comes", "the link breaks"])
async def test_memory_that_is_received_into(pair: Pair, ends: Ends, then: str) -> None:
    deadline = 0.2 if ends is by_deadline else None
    into = bytearray(len(MESSAGE))
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        request = there.recv(TAG, into, deadline=deadline)
        rest = await half_of_a_message(stranger)
        await until(lambda: b"m" in into)
        await ends(request)

        released = asyncio.create_task(request.released())
        await expect_busy(released)
        assert pair.far.quarantined_bytes == len(MESSAGE)
        if then == "the rest comes":
            # It still lands, which is why the memory was not free.
            await stranger.say(rest)
            await released
            assert into == MESSAGE
            assert not there.closed
        else:
            stranger.close()
            await released
            assert into != MESSAGE
        assert pair.far.quarantined_bytes == 0
    await there.wait_closed()
    assert len(inside.buffers(pair.far)) == 0


@pytest.mark.parametrize("ends", [by_deadline, by_cancel])
async def test_memory_that_is_sent_from(pair: Pair, ends: Ends) -> None:
    """The peer has asked for it and does not read: the kernel takes what it can."""
    deadline = 0.2 if ends is by_deadline else None
    whole = bytes(64 << 20)
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        request = there.send(TAG, whole, deadline=deadline)
        announced = await stranger.hear()
        number = announced.header.request
        ready = stranger.control(FrameType.READY, Ready(len(whole)), request=number)
        await stranger.say(ready)
        await until(lambda: inside.driver(there).link.queued_bytes)
        await ends(request)

        released = asyncio.create_task(request.released())
        await expect_busy(released)
        assert pair.far.quarantined_bytes == len(whole)
    await released
    assert pair.far.quarantined_bytes == 0
    await there.wait_closed()


async def test_memory_of_a_region_that_is_put_into(pair: Pair) -> None:
    """Closing it tells the peer at once, and returns when the chunk has ended."""
    memory = bytearray(len(MESSAGE))
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        region = pair.far.register(memory, "write")
        rest = await half_of_a_put(stranger, region.grant(there))
        await until(lambda: b"m" in memory)
        closing = asyncio.create_task(region.close())
        answer = await stranger.hear()
        assert answer.header.type == FrameType.FAIL
        await expect_busy(closing)
        await stranger.say(rest)
        await closing
    await there.wait_closed()
    assert len(inside.buffers(pair.far)) == 0
