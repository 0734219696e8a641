"""Messages between two connected communicators, and the ways a connection ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.errors import WireCode
from kvwire.limits import CHUNK_BYTES, EAGER_BYTES
from kvwire_certify.oracle import content
from tests.support import inside
from tests.support.pairs import Pair, connected

# Either side of each border between the ways a message can travel.
SIZES = (0, 1, 4097, EAGER_BYTES, EAGER_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1)
LARGE = content(4 * EAGER_BYTES)


# --- messages -------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
async def test_the_send_comes_first(pair: Pair, nbytes: int) -> None:
    sent = content(nbytes)
    request = pair.left.send(1, sent)
    await pair.left.send(2, b"behind it")
    await pair.right.recv(2)
    message = await pair.right.recv(1)
    assert message == sent
    assert type(message) is bytearray
    assert await request == nbytes
    message += b"mine to change"


@pytest.mark.parametrize("tag", [np.int64(7), np.uint64(2**64 - 1), WireCode.OTHER])
@pytest.mark.parametrize("nbytes", [1, EAGER_BYTES + 1])
async def test_a_tag_is_any_whole_number(pair: Pair, tag: int, nbytes: int) -> None:
    pair.left.send(tag, content(nbytes))
    assert await pair.right.recv(int(tag)) == content(nbytes)
    pair.right.send(int(tag), content(nbytes))
    assert await pair.left.recv(tag) == content(nbytes)
    assert pair.right.discard(tag) == 0


@pytest.mark.parametrize("nbytes", SIZES)
async def test_what_nobody_wants_is_counted_and_discarded(
    pair: Pair, nbytes: int
) -> None:
    """Before it comes and after; the next receive of the tag is as any other."""
    late = pair.left.send(1, content(nbytes))
    await pair.left.send(2, b"behind it")
    await pair.right.recv(2)
    assert pair.right.unreceived == {1: 1}
    assert pair.right.discard(1) == 1
    later = pair.left.send(1, content(nbytes))
    await pair.left.send(2, b"behind that")
    await pair.right.recv(2)
    assert pair.right.unreceived == {}
    assert pair.right.discard(1) == 0
    for request in (late, later):
        if nbytes <= EAGER_BYTES:
            assert await request == nbytes
        else:
            with pytest.raises(
                kvwire.PeerCancelled, match="discards messages of tag 1"
            ):
                await request
    assert not inside.driver(pair.right).held
    received = pair.right.recv(1)
    request = pair.left.send(1, content(nbytes))
    assert await received == content(nbytes)
    assert await request == nbytes


async def test_what_cannot_be_discarded(pair: Pair) -> None:
    with pytest.raises(kvwire.UsageError, match="tag=-1"):
        pair.right.discard(-1)
    received = asyncio.ensure_future(pair.right.recv(1))
    await asyncio.sleep(0)
    with pytest.raises(kvwire.UsageError, match="cancel that receive first"):
        pair.right.discard(1)
    await pair.left.send(1, b"taken")
    assert await received == b"taken"


@pytest.mark.parametrize("nbytes", SIZES)
async def test_the_receive_comes_first(pair: Pair, nbytes: int) -> None:
    sent, into = content(nbytes), bytearray(nbytes)
    request = pair.right.recv(1, into)
    await asyncio.sleep(0)
    assert await pair.left.send(1, sent) == nbytes
    assert await request == nbytes
    assert into == sent


# One loop and once per scheme: what differs between loops differs at 2 MiB as well.
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_64_mib_and_both_directions_at_once(pair: Pair) -> None:
    there = np.arange(64 << 17, dtype=np.uint64)
    back = np.flip(there[: 1 << 17]).copy()
    got_there, got_back = np.zeros_like(there), np.zeros_like(back)
    await asyncio.gather(
        pair.left.send(1, there),
        pair.right.send(1, back),
        pair.left.recv(1, got_back),
        pair.right.recv(1, got_there),
    )
    assert np.array_equal(there, got_there)
    assert np.array_equal(back, got_back)


@pytest.mark.parametrize("nbytes", [64, 4 * EAGER_BYTES])
async def test_a_message_may_be_shorter_than_its_buffer(
    pair: Pair, nbytes: int
) -> None:
    for receive_first in (True, False):
        into = bytearray(b"-" * (nbytes + 10))
        if receive_first:
            received = pair.right.recv(1, into)
            sending = pair.left.send(1, content(nbytes))
        else:
            sending = pair.left.send(1, content(nbytes))
            received = pair.right.recv(1, into)
        assert await received == nbytes
        assert into == content(nbytes) + b"-" * 10
        await sending


@pytest.mark.parametrize("nbytes", [64, 4 * EAGER_BYTES])
async def test_a_buffer_that_is_too_small_leaves_the_message(
    pair: Pair, nbytes: int
) -> None:
    into = bytearray(nbytes - 1)
    early = pair.right.recv(1, into)
    sending = pair.left.send(1, content(nbytes))
    with pytest.raises(kvwire.MessageTooLarge, match=f"{nbytes} bytes"):
        await early
    with pytest.raises(kvwire.MessageTooLarge):
        await pair.right.recv(1, into)
    assert await pair.right.recv(1) == content(nbytes)
    await sending


# --- order ----------------------------------------------------------------------------


async def test_messages_of_one_tag_keep_their_order_whatever_their_size(
    pair: Pair,
) -> None:
    rng = random.Random(2)
    sizes = [rng.choice((0, 9, EAGER_BYTES, EAGER_BYTES + 1)) for _ in range(60)]
    bodies = [number.to_bytes(4, "little") + bytes(n) for number, n in enumerate(sizes)]
    sends = [pair.left.send(1, body) for body in bodies]
    first = [pair.right.recv(1) for _ in bodies[:30]]
    into = [bytearray(len(body)) for body in bodies[30:]]
    then = [pair.right.recv(1, memory) for memory in into]
    assert [bytes(message) for message in await asyncio.gather(*first)] == bodies[:30]
    assert await asyncio.gather(*then) == [len(memory) for memory in into]
    assert into == bodies[30:]
    await asyncio.gather(*sends)


# --- who is there ---------------------------------------------------------------------


async def test_a_connection_knows_its_peer_and_its_transport(pair: Pair) -> None:
    scheme = pair.address.scheme
    assert (pair.left.peer.name, pair.right.peer.name) == ("far", "near")
    assert pair.left.peer.incarnation == pair.far.incarnation
    assert pair.left.transport == pair.right.transport == scheme
    assert pair.left.transport_report == pair.right.transport_report
    assert pair.left.transport_report.taken == scheme
    assert pair.left._digest == pair.right._digest
    assert repr(pair.left).startswith("<Connection to ")
    assert f"to 'far' ({pair.far.incarnation.hex()[:8]})" in repr(pair.left)
    assert repr(pair.left).partition(f" over {scheme}, open for ")[2]


# --- graceful ends --------------------------------------------------------------------


async def test_what_was_sent_before_a_graceful_close_arrives(pair: Pair) -> None:
    pair.left.send(1, b"eager")
    pair.left.send(2, b"second")
    large = pair.left.send(3, LARGE)
    receiving = pair.right.recv(3, bytearray(len(LARGE)))
    await pair.left.close()
    assert await large == await receiving == len(LARGE)
    await pair.right.wait_closed()
    assert await pair.right.recv(1) == b"eager"
    assert await pair.right.recv(2, bytearray(6)) == 6
    with pytest.raises(kvwire.ClosedOK):
        await pair.right.recv(1)


async def test_use_after_close_is_an_error_that_says_so(pair: Pair) -> None:
    region = pair.near.register(bytearray(8))
    grant = region.grant(pair.left)
    await pair.left.close()
    for end in (pair.left, pair.right):
        await end.wait_closed()
        assert end.closed
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (end.send, (1, b"x")),
            (end.send, (1, LARGE)),
            (end.recv, (1,)),
            (end.recv, (1, bytearray(4))),
            (end.put, (bytes(8), grant)),
            (end.get, (grant, bytearray(8))),
        ]
        for call, arguments in calls:
            with pytest.raises(kvwire.ClosedOK, match="closed"):
                await call(*arguments)
    with pytest.raises(kvwire.ClosedOK):
        region.grant(pair.left)
    assert len(inside.buffers(pair.near)) == 1
    await region.close()
    assert len(inside.buffers(pair.near)) == len(inside.buffers(pair.far)) == 0


async def test_a_block_closes_its_connection(pair: Pair) -> None:
    async with pair.left as same:
        assert same is pair.left
        await same.send(1, b"x")
    assert same.closed
    await pair.right.wait_closed()
    assert await pair.right.recv(1) == b"x"


# --- other ends -----------------------------------------------------------------------


async def test_abort_fails_everything_on_both_sides(pair: Pair) -> None:
    requests: list[kvwire.Request[Any]] = [
        pair.left.send(1, LARGE),
        pair.left.recv(2),
        pair.right.recv(3, bytearray(8)),
        pair.right.send(4, LARGE),
    ]
    await pair.left.send(5, b"behind the announcement")
    await pair.right.recv(5)
    pair.left.abort("because of the test")
    pair.left.abort()
    for request in requests[:2]:
        with pytest.raises(kvwire.ConnectionLost, match="because of the test"):
            await request
    for request in requests[2:]:
        with pytest.raises(kvwire.ConnectionLost):
            await request
    for end in (pair.left, pair.right):
        await end.wait_closed()
        with pytest.raises(kvwire.ConnectionLost):
            await end.send(1, b"x")
    for request in requests:
        await request.released()
    assert len(inside.buffers(pair.near)) == len(inside.buffers(pair.far)) == 0


async def test_a_block_left_by_an_exception_aborts(pair: Pair) -> None:
    waiting = pair.right.recv(1)
    with pytest.raises(ZeroDivisionError):
        async with pair.left:
            raise ZeroDivisionError
    with pytest.raises(kvwire.ConnectionLost):
        await waiting


async def test_abort_while_closing(pair: Pair) -> None:
    request = pair.left.send(1, LARGE)
    closing = asyncio.create_task(pair.left.close())
    await asyncio.sleep(0)
    pair.left.abort("enough")
    await closing
    with pytest.raises(kvwire.ConnectionLost, match="enough"):
        await request


async def test_a_close_that_takes_too_long_ends_all_the_same() -> None:
    async with connected(close_timeout_s=0.05) as pair:
        request = pair.left.send(1, LARGE)
        await pair.left.close()
        with pytest.raises(kvwire.ConnectionLost, match="did not finish closing"):
            await request


async def test_cancelling_close_does_not_stop_it(pair: Pair) -> None:
    closing = asyncio.create_task(pair.left.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await pair.left.wait_closed()
    await pair.right.wait_closed()
    with pytest.raises(kvwire.ClosedOK):
        await pair.right.send(1, b"x")


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_every_request_has_exactly_one_completion(pair: Pair, end: str) -> None:
    """Goal R5, over requests of all kinds and sizes at every stage of their lives."""
    rng = random.Random(3)
    requests: list[kvwire.Request[Any]] = []
    for number in range(200):
        side: kvwire.Connection = rng.choice((pair.left, pair.right))
        tag, nbytes = number % 7, rng.choice((0, 100, EAGER_BYTES + 1, 100_000))
        if rng.random() < 0.5:
            requests.append(side.send(tag, bytes(nbytes)))
        else:
            requests.append(side.recv(tag, bytearray(100_000)))
        if rng.random() < 0.2:
            rng.choice(requests).cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    completions = [0] * len(requests)

    async def count(number: int) -> None:
        with suppress(kvwire.KVWireError):
            await requests[number]
        completions[number] += 1

    counting = [asyncio.create_task(count(n)) for n in range(len(requests))]
    await asyncio.sleep(0)
    if end == "abort":
        pair.left.abort()
    await asyncio.gather(pair.left.close(), pair.right.close())
    await asyncio.gather(*counting)
    assert completions == [1] * len(requests)
    for request in requests:
        await request.released()
    assert len(inside.buffers(pair.near)) == len(inside.buffers(pair.far)) == 0
