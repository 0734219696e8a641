"""Time that jumps: to the next timer, exactly, and never past what is ready."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.virtual_time import LONGEST_S, START_S, Deadlock, pass_time, run


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
