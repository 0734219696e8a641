"""Turns of lanes that UCX cannot free: few, in order, and woken rather than polled."""

import asyncio
import threading

import pytest

from kvwire.aio import end_task, start_task
from kvwire_ucx.turns import Turns


async def _begun(turns: Turns, *holders: str) -> list[asyncio.Task[bool]]:
    tasks = [start_task(turns.take(holder)) for holder in holders]
    await asyncio.sleep(0)
    return tasks


async def test_a_turn_that_is_given_back_goes_to_the_first_that_waits() -> None:
    turns = Turns(1)
    assert await turns.take("a")
    second, third = await _begun(turns, "b", "c")
    turns.give_back("a")
    assert await second
    assert not third.done()
    turns.give_back("b")
    assert await third


@pytest.mark.parametrize("how", ["cancelled", "given back"])
async def test_one_that_waits_no_more_leaves_its_place(how: str) -> None:
    turns = Turns(1)
    assert await turns.take("a")
    second, third = await _begun(turns, "b", "c")
    if how == "cancelled":
        await end_task(second)
    else:
        turns.give_back("b")
        assert not await second
    turns.give_back("a")
    assert await third


async def test_one_that_is_cancelled_while_it_is_woken_passes_its_turn_on() -> None:
    turns = Turns(1)
    assert await turns.take("a")
    second, third = await _begun(turns, "b", "c")
    turns.give_back("a")
    await end_task(second)
    assert await third


async def test_nobody_waits_for_turns_that_are_kept() -> None:
    turns = Turns(1)
    assert await turns.take("a")
    (second,) = await _begun(turns, "b")
    turns.keep("a")
    assert turns.none_left
    assert not await second
    assert not await turns.take("c")


async def test_a_turn_is_passed_to_the_loop_of_another_thread() -> None:
    turns = Turns(1)
    assert await turns.take("a")
    begun = threading.Event()

    async def wait() -> bool:
        (second,) = await _begun(turns, "b")
        begun.set()
        return await second

    theirs = asyncio.create_task(asyncio.to_thread(asyncio.run, wait()))
    await asyncio.to_thread(begun.wait)
    turns.give_back("a")
    assert await theirs


async def test_a_loop_that_was_closed_takes_no_turn() -> None:
    turns = Turns(1)
    assert await turns.take("a")

    def leave() -> None:
        loop = asyncio.new_event_loop()
        taking = turns.take("b")
        asyncio.set_event_loop(loop)
        loop.call_soon(taking.send, None)
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        left.append(taking)

    left: list[object] = []
    await asyncio.to_thread(leave)
    (third,) = await _begun(turns, "c")
    turns.give_back("a")
    assert await third
