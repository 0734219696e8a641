"""Messages that are acted on in the callback in which they arrive."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

import kvwire
from kvwire.limits import EAGER_BYTES, MIB
from kvwire.spi import each_message
from kvwire_certify.oracle import content
from tests.support.pairs import Pair, connected, turns, until

SMALL = 64
LARGE = 4 * EAGER_BYTES


@pytest.mark.parametrize("nbytes", [0, SMALL, EAGER_BYTES, LARGE])
async def test_each_message_is_answered_from_the_callback(
    pair: Pair, nbytes: int
) -> None:
    """Small answers, and large ones between them, come in the order of their sends."""

    def act(message: memoryview) -> bool:
        pair.right.send(2, bytes(message))
        pair.right.send(2, content(LARGE))
        pair.right.send(2, b"behind it")
        return True

    serving = asyncio.create_task(each_message(pair.right, 1, act))
    for number in range(8):
        question = content(nbytes, number)
        await pair.left.send(1, question)
        assert await pair.left.recv(2) == question
        assert await pair.left.recv(2) == content(LARGE)
        assert await pair.left.recv(2) == b"behind it"
    await pair.left.close()
    with pytest.raises(kvwire.ConnectionClosed):
        await serving


async def test_what_is_sent_from_a_callback_may_change_afterwards(pair: Pair) -> None:
    """A small message is over when its send returns, whenever it leaves."""

    def act(message: memoryview) -> bool:
        assert pair.right.send(2, message).done()
        message[:] = bytes(len(message))
        return True

    serving = asyncio.create_task(each_message(pair.right, 1, act))
    await pair.left.send(1, b"as it was")
    assert await pair.left.recv(2) == b"as it was"
    serving.cancel()


async def test_a_part_of_a_constant_is_sent_from_a_callback(pair: Pair) -> None:
    whole = b"before, part, after"

    def act(message: memoryview) -> bool:
        assert pair.right.send(2, memoryview(whole)[8:12]).done()
        return True

    serving = asyncio.create_task(each_message(pair.right, 1, act))
    await pair.left.send(1, b"which?")
    assert await pair.left.recv(2) == b"part"
    serving.cancel()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_an_act_that_wants_no_more(pair: Pair, nbytes: int) -> None:
    """The next message waits for another receive."""
    got: list[memoryview] = []

    def act(message: memoryview) -> bool:
        got.append(message)
        return len(got) < 2

    for number in range(3):
        pair.left.send(1, content(nbytes, number))
    await each_message(pair.right, 1, act)
    assert got == [content(nbytes, number) for number in range(2)]
    assert await pair.right.recv(1) == content(nbytes, 2)


async def test_an_act_that_raises_ends_it_alone(pair: Pair) -> None:
    def act(message: memoryview) -> bool:
        raise ValueError(bytes(message))

    await pair.left.send(1, b"wrong")
    with pytest.raises(ValueError, match="wrong"):
        await each_message(pair.right, 1, act)
    await pair.left.send(1, b"right")
    assert await pair.right.recv(1) == b"right"


async def test_a_cancel_after_a_message_that_had_arrived_before(pair: Pair) -> None:
    """It is acted on while the sink is posted; the next one waits all the same."""
    got: list[memoryview] = []

    def act(message: memoryview) -> bool:
        got.append(message)
        return True

    await pair.left.send(1, b"before")
    await pair.left.send(2, b"behind it")
    await pair.right.recv(2)
    serving = asyncio.create_task(each_message(pair.right, 1, act))
    await turns(2)
    assert got == [b"before"]
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await pair.left.send(1, b"later")
    await pair.left.send(2, b"behind it")
    await pair.right.recv(2)
    assert pair.right.unreceived == {1: 1}
    assert await pair.right.recv(1) == b"later"


async def test_a_message_that_arrives_in_the_turn_of_a_cancel(pair: Pair) -> None:
    """It is acted on, as the wait has not ended yet."""
    got: list[memoryview] = []

    def act(message: memoryview) -> bool:
        got.append(message)
        if bytes(message) == b"first":
            serving.cancel()
        return True

    serving = asyncio.create_task(each_message(pair.right, 1, act))
    await turns(2)
    pair.left.send(1, b"first")
    pair.left.send(1, b"second")
    with pytest.raises(asyncio.CancelledError):
        await serving
    if got != [b"first", b"second"]:
        await pair.left.send(2, b"behind it")
        await pair.right.recv(2)
        assert pair.right.unreceived == {1: 1}


async def test_a_callback_that_sends_more_than_the_link_takes() -> None:
    """The rest is announced: a peer that has room for all is not taken for stuck."""
    count = 1000

    def act(message: memoryview) -> bool:
        for number in range(count):
            pair.right.send(2, content(EAGER_BYTES, number))
        return True

    room: dict[str, Any] = {
        "window_bytes": 2 * count * EAGER_BYTES,
        "window_messages": 2 * count,
    }
    async with connected("tcp", **room) as pair:
        serving = asyncio.create_task(each_message(pair.right, 1, act))
        await pair.left.send(1, b"all of it")
        for number in range(count):
            assert await pair.left.recv(2) == content(EAGER_BYTES, number)
        serving.cancel()


async def test_a_large_message_that_is_arriving_at_a_cancel_is_dropped() -> None:
    """The function is not called once the wait has ended."""
    got: list[int] = []

    def act(message: memoryview) -> bool:
        got.append(message.nbytes)
        return True

    async with connected("tcp") as pair:
        serving = asyncio.create_task(each_message(pair.right, 1, act))
        await turns(2)
        sent = pair.left.send(1, bytes(32 * MIB))
        await until(lambda: re.search(r" [1-9]\d* of \d+ bytes moved", repr(sent)))
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        await sent
        await pair.left.send(2, b"behind it")
        await pair.right.recv(2)
        assert not got
