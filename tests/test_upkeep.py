"""Being away and coming back: pauses that grow, one loop, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.aio import Upkeep
from tests.support.virtual_time import START_S, pass_time, run

FIRST_S, LAST_S = 0.1, 1.6


def _now() -> float:
    return asyncio.get_running_loop().time()


@given(st.integers(0, 2**32), st.floats(0.01, 10), st.integers(0, 12))
def test_each_pause_is_within_a_limit_that_doubles(
    seed: int, first_s: float, doublings: int
) -> None:
    random.seed(seed)
    last_s = first_s * 2**doublings
    upkeep = Upkeep(first_s, last_s)
    for number in range(doublings + 5):
        limit_s = min(first_s * 2**number, last_s)
        assert limit_s / 2 <= upkeep.pause_s() <= limit_s


def _tried(upkeep: Upkeep, fails: int, seed: int = 1) -> list[float]:
    """When something is tried that fails some times, after the beginning."""

    async def main() -> list[float]:
        times: list[float] = []
        async for _ in upkeep:
            times.append(_now() - START_S)
            if len(times) > fails:
                upkeep.back()
                return times
            upkeep.lost(f"failure {len(times)}")
        raise AssertionError("the loop has ended by itself")

    random.seed(seed)
    return run(main())


def test_a_loop_tries_at_once_and_then_after_each_pause() -> None:
    upkeep = Upkeep(FIRST_S, LAST_S)
    times = _tried(upkeep, 8)
    assert times[0] == 0.0
    pauses = [b - a for a, b in itertools.pairwise(times)]
    limits = [min(FIRST_S * 2**n, LAST_S) for n in range(8)]
    for pause, limit in zip(pauses, limits, strict=True):
        assert limit / 2 <= pause <= limit * 1.001
    assert upkeep.reason == ""
    # The same seed is the same times, to the last bit.
    assert times == _tried(Upkeep(FIRST_S, LAST_S), 8)
    assert times != _tried(Upkeep(FIRST_S, LAST_S), 8, seed=2)


def test_what_fails_together_is_one_loss() -> None:
    async def main() -> None:
        upkeep = Upkeep(FIRST_S, LAST_S)
        assert not upkeep.resting
        assert upkeep.lost("a")
        for reason in "bcdefgh":
            assert not upkeep.lost(reason)
        assert (upkeep.reason, upkeep.resting) == ("h", True)
        await pass_time(FIRST_S)
        assert not upkeep.resting, "the first pause, and not the eighth"
        assert upkeep.reason == "h", "nobody knows yet that it is back"
        assert upkeep.back()
        assert not upkeep.back()
        assert upkeep.reason == ""

    run(main())


@pytest.mark.parametrize(("up_s", "short"), [(0.5, False), (2.0, True)])
def test_what_breaks_as_soon_as_it_is_back_is_tried_after_a_long_pause(
    up_s: float, short: bool
) -> None:
    async def main() -> float:
        upkeep = Upkeep(FIRST_S, 60.0, steady_s=1.0)
        for _ in range(8):
            upkeep.lost("down")
            await anext(upkeep)
        upkeep.back()
        await pass_time(up_s)
        began = _now()
        upkeep.lost("down again")
        await anext(upkeep)
        return _now() - began

    assert (run(main()) <= FIRST_S) == short


def test_a_pause_may_have_an_end_of_its_own() -> None:
    async def main() -> None:
        upkeep = Upkeep(60.0, 60.0)
        upkeep.lost("down", within_s=2.0)
        await anext(upkeep)
        assert _now() == pytest.approx(START_S + 2.0)

    run(main())


def test_a_cancelled_pause_goes_on_for_the_next_who_waits() -> None:
    async def main() -> None:
        upkeep = Upkeep(60.0, 60.0)
        upkeep.lost("down")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(upkeep)
        assert upkeep.resting
        await anext(upkeep)
        assert START_S + 30.0 <= _now() <= START_S + 60.1

    run(main())


def test_a_loop_that_never_pauses_lets_others_run() -> None:
    async def main() -> None:
        upkeep = Upkeep(FIRST_S, LAST_S)
        others: list[bool] = []
        asyncio.get_running_loop().call_soon(others.append, True)
        async for _ in upkeep:
            if others:
                break
        assert others

    run(main())


def test_one_task_brings_it_back() -> None:
    async def main() -> None:
        upkeep = Upkeep(FIRST_S, LAST_S)
        begun: list[bool] = []

        async def bring_back() -> None:
            begun.append(True)
            async for _ in upkeep:
                await pass_time(1.0)
                upkeep.back()
                break

        await upkeep.close()
        upkeep.lost("down")
        for _ in range(3):
            upkeep.start(bring_back)
        await pass_time(2.0)
        assert (len(begun), upkeep.reason) == (1, "")
        upkeep.lost("down")
        upkeep.start(bring_back)
        await pass_time(FIRST_S + 0.5)
        await upkeep.close()
        assert not upkeep.running
        assert (len(begun), upkeep.reason) == (2, "down")
        await upkeep.close()

    run(main())


def test_a_cancelled_close_is_cancelled() -> None:
    """And not taken for the end of what it waits for."""

    async def main() -> None:
        upkeep, go = Upkeep(FIRST_S, LAST_S), asyncio.Event()

        async def slow() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await go.wait()

        upkeep.start(slow)
        await asyncio.sleep(0)
        closing = asyncio.create_task(upkeep.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
        assert upkeep.running
        go.set()
        await upkeep.close()
        assert not upkeep.running

    run(main())
