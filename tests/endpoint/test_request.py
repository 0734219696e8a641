"""Requests: exactly one completion, whoever awaits, in whatever way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from kvwire import DeadlineExceeded, Instant, PeerCancelled, RequestCancelled
from tests.support import inside
from tests.support.pairs import Pair, until

LARGE = bytes(range(256)) * 1024


# --- ways to await --------------------------------------------------------------------


async def test_a_result_is_there_from_the_completion_on(pair: Pair) -> None:
    request = pair.right.recv(1)
    assert not request.done()
    with pytest.raises(asyncio.InvalidStateError):
        request.result()
    await pair.left.send(1, b"once")
    first = await request
    assert request.done()
    assert await request is first
    assert request.result() is first


async def test_a_request_is_true(pair: Pair) -> None:
    """Its length is refused, and `if request:` asks whether there is one."""
    received = pair.right.recv(1)
    assert bool(received) is True
    await pair.left.send(1, b"")
    assert not await received
    assert bool(received) is True


async def test_an_error_is_raised_each_time(pair: Pair) -> None:
    request = pair.right.recv(1)
    assert "recv of tag 1" in repr(request)
    request.cancel()
    assert "cancelled on this side" in repr(request)
    for _ in range(2):
        with pytest.raises(RequestCancelled):
            await request
    with pytest.raises(RequestCancelled):
        request.result()


async def test_a_request_is_made_a_task_more_than_once(pair: Pair) -> None:
    request = pair.right.recv(1)
    tasks = [asyncio.create_task(request) for _ in range(2)]
    await asyncio.sleep(0)
    await pair.left.send(1, b"both")
    assert await asyncio.gather(*tasks) == [b"both", b"both"]
    assert await asyncio.create_task(request) == b"both"


async def test_gather_and_wait_for_take_requests(pair: Pair) -> None:
    async with asyncio.TaskGroup() as group:
        received = group.create_task(pair.right.recv(1))
        sent = group.create_task(pair.left.send(1, LARGE))
    assert received.result() == LARGE
    assert sent.result() == len(LARGE)
    length, message = await asyncio.gather(
        pair.left.send(2, b"x"), asyncio.wait_for(pair.right.recv(2), 60)
    )
    assert length == 1
    assert message == b"x"


# --- cancelling the await -------------------------------------------------------------


async def test_a_cancelled_receive_takes_no_message_until_it_is_awaited_again(
    pair: Pair,
) -> None:
    into = bytearray(8)
    request = pair.right.recv(1, into)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request, 0.01)
    await request.released()
    await pair.left.send(1, b"for the next")
    assert await pair.right.recv(1) == b"for the next"
    assert not request.done()
    await pair.left.send(1, b"again")
    assert await request == 5
    assert into[:5] == b"again"


async def test_a_task_cancelled_before_it_ran_takes_no_message(pair: Pair) -> None:
    task = asyncio.create_task(pair.right.recv(1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair.left.send(1, b"for the next")
    assert await pair.right.recv(1) == b"for the next"


async def test_a_receive_stays_posted_while_somebody_waits(pair: Pair) -> None:
    request = pair.right.recv(1)

    async def wait() -> bytearray:
        return await request

    patient, hasty = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    hasty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hasty
    await pair.left.send(1, b"patience")
    assert await patient == b"patience"


async def test_a_receive_under_way_goes_on_without_its_waiter(pair: Pair) -> None:
    into = bytearray(len(LARGE))
    sent = pair.left.send(1, LARGE)
    task = asyncio.create_task(pair.right.recv(1, into))
    await until(sent.done)
    task.cancel()
    request = pair.right.recv(1)
    await pair.left.send(1, b"second")
    assert await request == b"second"
    assert into == LARGE


async def test_cancelling_the_await_of_a_send_stops_nothing(pair: Pair) -> None:
    request = pair.left.send(1, LARGE)
    task = asyncio.create_task(request)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pair.right.recv(1) == LARGE
    assert await request == len(LARGE)


async def test_posting_again_after_the_end_completes_the_request(pair: Pair) -> None:
    request = pair.right.recv(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await request
    await pair.right.close()
    for _ in range(2):
        with pytest.raises(Exception, match="closed"):
            await request
    assert request.done()


# --- request.cancel() -----------------------------------------------------------------


async def test_cancel_ends_a_receive_for_this_side(pair: Pair) -> None:
    request = pair.right.recv(1, bytearray(4))
    request.cancel()
    request.cancel()
    with pytest.raises(RequestCancelled):
        await request
    await request.released()
    await pair.left.send(1, b"next")
    assert await pair.right.recv(1) == b"next"


async def test_cancel_takes_an_announced_message_back(pair: Pair) -> None:
    request = pair.left.send(1, LARGE)
    request.cancel()
    with pytest.raises(RequestCancelled):
        await request
    await request.released()
    await pair.left.send(2, b"behind the announcement and its end")
    await pair.right.recv(2)
    await pair.left.send(1, b"instead")
    assert await pair.right.recv(1) == b"instead"


async def test_cancel_of_a_send_fails_the_receive_that_met_it(pair: Pair) -> None:
    request = pair.left.send(1, LARGE)
    receiving = pair.right.recv(1)
    request.cancel()
    with pytest.raises(PeerCancelled, match="cancelled on this side"):
        await receiving


async def test_cancel_tells_the_other_side(pair: Pair) -> None:
    whole = bytes(64 << 20)
    sending = pair.left.send(1, whole)
    receiving = pair.right.recv(1, bytearray(len(whole)))
    await until(lambda: inside.core(pair.left).sending)
    receiving.cancel()
    with pytest.raises(RequestCancelled):
        await receiving
    with pytest.raises(PeerCancelled):
        await sending
    await asyncio.gather(sending.released(), receiving.released())
    await pair.left.send(2, b"alive")
    assert await pair.right.recv(2) == b"alive"


async def test_cancel_after_the_completion_does_nothing(pair: Pair) -> None:
    request = pair.left.send(1, b"x")
    await request
    request.cancel()
    assert await request == 1


# --- deadlines and memory -------------------------------------------------------------


def instant() -> Instant:
    return Instant(asyncio.get_running_loop().time() + 0.01)


@pytest.mark.parametrize(
    "deadline", [lambda: 0.01, lambda: timedelta(milliseconds=10), instant]
)
async def test_a_deadline_fails_the_request_and_not_the_connection(
    pair: Pair, deadline: Callable[[], float | timedelta | Instant]
) -> None:
    waiting = pair.right.recv(1, deadline=deadline())
    announced = pair.left.send(2, LARGE, deadline=deadline())
    for request in (waiting, announced):
        with pytest.raises(DeadlineExceeded) as caught:
            await request
        assert isinstance(caught.value, TimeoutError)
        await request.released()
    await pair.left.send(1, b"late")
    assert await pair.right.recv(1) == b"late"


async def test_released_waits_until_the_memory_is_free(pair: Pair) -> None:
    into = bytearray(len(LARGE))
    request = pair.right.recv(1, into)
    released = asyncio.create_task(request.released())
    await asyncio.sleep(0)
    assert not released.done()
    await pair.left.send(1, LARGE)
    await released
    assert request.done()
    assert into == LARGE


async def test_a_whole_eager_send_is_released_at_once(pair: Pair) -> None:
    memory = bytearray(b"mine")
    request = pair.left.send(1, memory)
    await request.released()
    memory[:] = b"gone"
    assert await pair.right.recv(1) == b"mine"


async def test_a_second_completion_is_a_bug(pair: Pair) -> None:
    request = pair.left.send(1, b"x")
    with pytest.raises(AssertionError, match="completed twice"):
        request._complete(8, None)
    assert await request == 1
