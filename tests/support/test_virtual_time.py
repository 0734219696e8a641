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
