"""Time that jumps: to the next timer, exactly, and never past what is ready."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import kvwire
from tests.scenarios.world import Memory
from tests.support.virtual_time import (
    LONGEST_S,
    START_S,
    Deadlock,
    VirtualTimeLoop,
    pass_time,
    run,
)


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_time_passes_exactly_and_only_for_the_loop() -> None:
    """Half an hour is over at once."""

    async def main() -> float:
        assert _now() == START_S
        await pass_time(1800.0)
        return _now()

    began = time.monotonic()
    assert run(main()) == START_S + 1800.0
    assert time.monotonic() - began < 60


def test_timers_fire_in_their_order_each_at_its_time() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[str, float]] = []

        def fire(name: str) -> None:
            fired.append((name, _now()))

        for name, delay_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            loop.call_later(delay_s, fire, name)
        await pass_time(10.0)
        return fired

    assert run(main()) == [(n, START_S + s) for n, s in (("a", 1), ("b", 2), ("c", 3))]


def test_no_time_passes_while_something_is_ready() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(0.001, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return _now()

    assert run(main()) == START_S


def test_a_timeout_is_a_timer() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().create_future()
        return _now()

    assert run(main()) == pytest.approx(START_S + 30)


def test_the_same_twice() -> None:
    """What happens depends on nothing outside."""

    async def main() -> list[float]:
        seen: list[float] = []

        async def tick(every_s: float) -> None:
            for _ in range(5):
                await pass_time(every_s)
                seen.append(_now() - START_S)

        await asyncio.gather(tick(0.3), tick(0.7), tick(0.11))
        return seen

    assert run(main()) == run(main())


def test_what_nothing_can_end_is_told_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="nothing is ready and no timer is set"):
        run(main())


def test_timers_alone_do_not_go_on_for_ever() -> None:
    """Such as the pings of a connection, while a test waits for something else."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ping() -> None:
            loop.call_later(2.0, ping)

        ping()
        await loop.create_future()

    with pytest.raises(Deadlock, match=f"{LONGEST_S:g} s of virtual time"):
        run(main())


def test_a_thread_may_call_in() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.waits_for_threads = True
        called: asyncio.Future[str] = loop.create_future()
        thread = threading.Thread(
            target=loop.call_soon_threadsafe, args=(called.set_result, "called")
        )
        thread.start()
        try:
            return await called
        finally:
            thread.join()

    assert run(main()) == "called"


async def test_real_time_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="real time"):
        await pass_time(1.0)


def test_a_lease_of_kvwire_ends_on_time() -> None:
    """What the loop is for: nobody asks, and 30 s later the blocks are free."""

    async def main() -> float:
        async with kvwire.open(name="alone", lease_s=30.0) as comm:
            out = comm.publish("t", Memory().cache, [1, 2])
            outcome = await out
            await out.drained()
            assert not outcome.complete
            return _now()

    assert run(main()) == pytest.approx(START_S + 30)
