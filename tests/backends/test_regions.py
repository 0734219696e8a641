"""Puts and gets over each lane: they are whole, and their memory is free when told."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvwire import RequestCancelled, StaleRegion
from kvwire.limits import KIB, MIB
from kvwire_certify.oracle import content
from tests.backends.transfers import (
    CANARY,
    Over,
    each_lane,
    go_on,
    pair,
    require_untouched,
)
from tests.support.pairs import turns

# Both ends of what a lane takes at once, and many of them.
SIZES = (32 * KIB - 1, 128 * KIB, MIB + 1, 9 * MIB)
LARGE = 6 * MIB
ENDINGS = ("cancel", "revoke", "close")


@each_lane
@pytest.mark.parametrize("nbytes", SIZES)
async def test_what_was_put_is_there_and_what_is_got_is_that(
    nbytes: int, over: Over
) -> None:
    data, memory, back = content(nbytes), *buffers(nbytes)
    async with pair(over.backend, over.settings()) as both:
        region = both.far.register(memory, access="readwrite")
        grant = region.grant(both.right)
        for _ in range(2):
            memory[:] = back[:] = bytes(nbytes)
            assert await both.left.put(data, grant) == nbytes
            assert memory == data
            assert await both.left.get(grant, back) == nbytes
            assert back == data
        await region.close()


@each_lane
@pytest.mark.parametrize(
    ("times", "watched_s"),
    [
        (24, 0.2),
        pytest.param(1000, 10.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
async def test_nothing_is_written_once_the_memory_is_said_to_be_free(
    over: Over, times: int, watched_s: float
) -> None:
    """A put or a get ends at any moment, by either side; its target is then watched."""
    chance = random.Random(times)  # the same moments in every run
    source, *targets = buffers(LARGE, 5)
    midway = 0
    async with pair(over.backend, over.settings()) as both:
        for turn in range(times):
            target = targets[turn % len(targets)]
            if turn >= len(targets):
                require_untouched(target)
            puts = chance.random() < 0.5
            region = both.far.register(target if puts else source, access="readwrite")
            grant = region.grant(both.right)
            request = (
                both.left.put(source, grant) if puts else both.left.get(grant, target)
            )
            # Often few: within one host all is over after some turns.
            await turns(chance.choice((0, 0, 1, 2, 3, 5, 8, 13, 21, 34)))
            ending = chance.choice(ENDINGS)
            if ending == "cancel":
                request.cancel()
            elif ending == "revoke":
                region.revoke()
            closed = asyncio.ensure_future(region.close())
            try:
                await request
            except (RequestCancelled, StaleRegion):
                midway += 1
            await request.released()
            await closed
            target[:] = bytes([CANARY]) * LARGE
        await go_on(both, watched_s)
        require_untouched(*targets)
        assert both.left.transport == over.backend
    assert midway


def buffers(nbytes: int, count: int = 2) -> list[bytearray]:
    return [bytearray(nbytes) for _ in range(count)]
