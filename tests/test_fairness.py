"""What fails at once lets the loop run: a program that tries again stops nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import kvwire
import kvwire_store
from kvwire.aio import yields_before_raising
from kvwire.wire.control import Announce, Fail, decode_body
from kvwire.wire.header import FrameType
from tests.fault.stranger import dial
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.pairs import connected

TRIES = 20
LARGE = bytes(kvwire.limits.EAGER_BYTES_MAX + 1)


async def expect_turns(attempt: Callable[[], Awaitable[Any]]) -> None:
    """It fails each time it is tried, and the loop has a turn for each of them."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    for _ in range(TRIES):
        with pytest.raises((kvwire.KVWireError, OSError)):
            await attempt()
    counting.cancel()
    assert turns >= TRIES - 1


async def test_calls_on_a_closed_connection() -> None:
    async with connected() as pair:
        left = pair.left
        grant = pair.far.register(bytearray(10), "readwrite").grant(pair.right)
        await left.close()
        for attempt in (
            lambda: left.send(1, b"x"),
            lambda: left.send(1, LARGE),
            lambda: left.recv(1),
            lambda: left.recv(1, bytearray(10)),
            lambda: left.put(bytes(10), grant),
            lambda: left.get(grant, bytearray(10)),
        ):
            await expect_turns(attempt)
        assert not len(inside.buffers(pair.near))


async def test_a_request_that_has_failed() -> None:
    async with connected() as pair:
        request = pair.left.recv(1)
        request.cancel()
        await expect_turns(lambda: request)


async def test_a_buffer_that_is_too_small() -> None:
    async with connected() as pair:
        await pair.left.send(1, b"four")
        first = pair.right.recv(1, bytearray(3))
        with pytest.raises(kvwire.MessageTooLarge):
            await first
        await expect_turns(lambda: pair.right.recv(1, bytearray(3)))
        assert await pair.right.recv(1) == b"four"


async def test_a_transfer_that_has_failed() -> None:
    async with connected() as pair:
        outgoing = pair.far.publish("t", Filled().cache, [1])
        incoming = pair.left.pull("t", Filled().cache, [2])
        outgoing.abort()
        assert not (await incoming).complete

        async def outcome(transfer: Any) -> None:
            if not (await transfer).complete:
                raise kvwire.KVWireError

        await expect_turns(lambda: incoming.layer(0))
        await expect_turns(lambda: outcome(incoming))
        await expect_turns(lambda: outcome(outgoing))
        await expect_turns(lambda: outcome(kvwire.join(incoming)))


async def test_communicators(tmp_path: Path) -> None:
    taken, nowhere = socket.socket(), str(tmp_path / "none")
    async with kvwire.open(name="alone") as comm:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        await expect_turns(lambda: comm.connect(nobody))
        await expect_turns(lambda: comm.connect("nosuch://x"))
        await expect_turns(lambda: comm.listen("0.0.0.0:0"))
        await expect_turns(lambda: comm.fired(object()))
    await expect_turns(comm.accept)
    taken.close()
    await expect_turns(lambda: kvwire.open(trust="psk", psk_file=nowhere))


async def test_stores(tmp_path: Path) -> None:
    store = await kvwire_store.BlockStore.open(["memory:256KiB"])
    await store.close()
    await expect_turns(lambda: store.match(chain(1)))
    await expect_turns(store.flush)
    (tmp_path / "file").touch()
    nowhere = f"disk:{tmp_path / 'file' / 'below'}?size=1MiB"
    await expect_turns(lambda: kvwire_store.BlockStore.open(["memory:256KiB", nowhere]))


async def test_the_first_error_is_the_one_that_is_raised() -> None:
    @yields_before_raising
    async def fails(word: str, *, twice: bool) -> int:
        raise ValueError(2 * word if twice else word)

    with pytest.raises(ValueError, match="nono"):
        await fails("no", twice=True)


# --- a message over the limit ---------------------------------------------------------


async def received_by_a_loop(
    connection: kvwire.Connection, seen: list[str]
) -> bytearray:
    """What a program gets that goes on after each error of a request."""
    while True:
        try:
            return await connection.recv(7)
        except kvwire.RequestError as exc:
            seen.append(str(exc))


async def test_an_announcement_over_the_limit_is_refused_once() -> None:
    """One frame of 50 bytes: the loop runs, and what was refused is gone."""
    async with connected() as pair, dial(pair.address) as stranger:
        there = await pair.far.accept()
        seen: list[str] = []
        receiving = asyncio.create_task(received_by_a_loop(there, seen))
        over = Announce((7).to_bytes(8, "little"), kvwire.limits.MESSAGE_BYTES + 1)
        await stranger.say(stranger.control(FrameType.ANNOUNCE, over, request=1))
        answer = await stranger.hear()
        assert answer.header.type == FrameType.FAIL
        assert answer.header.request == 1
        said = decode_body(FrameType.FAIL, answer.body)
        assert isinstance(said, Fail)
        assert said.code == kvwire.MessageTooLarge.code
        assert f"takes {kvwire.limits.MESSAGE_BYTES}" in said.reason
        await stranger.say(stranger.payload(FrameType.MESSAGE, b"next", offset=7))
        assert await receiving == b"next"
        assert len(seen) == 1
        assert "refused" in seen[0]


async def test_the_sender_learns_that_its_message_was_refused() -> None:
    async with connected(message_bytes=1000) as pair:
        sending = pair.left.send(1, LARGE)
        with pytest.raises(kvwire.MessageTooLarge, match="takes 1000; it was refused"):
            await pair.right.recv(1)
        with pytest.raises(
            kvwire.MessageTooLarge, match=r"the receiver: .* takes 1000"
        ):
            await sending
        await sending.released()


async def test_small_messages_over_the_limit_give_their_credit_back() -> None:
    async with connected(message_bytes=1000, window_messages=2) as pair:
        for _ in range(5):
            await pair.left.send(1, bytes(1001))
            with pytest.raises(kvwire.MessageTooLarge, match="refused"):
                await pair.right.recv(1)
        await pair.left.send(1, b"small")
        assert await pair.right.recv(1) == b"small"
        assert not inside.driver(pair.right).held
        assert not len(inside.buffers(pair.far))
