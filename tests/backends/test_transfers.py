"""KV transfers over each lane: they arrive, end at any moment, and go on without it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kvwire import ConnectionLost, KVSpec, RequestCancelled, StaleRegion
from kvwire.backend import registry
from kvwire.backend.lane import Lane, LaneContext
from kvwire.limits import KIB, MIB
from kvwire_certify.oracle import content
from tests.backends import transfers
from tests.backends.transfers import (
    CANARY,
    Over,
    each_lane,
    go_on,
    pair,
    require_untouched,
)
from tests.support.lanes import NEVER_S, raise_again_after
from tests.support.pairs import turns, until


@transfers.each_lane
@pytest.mark.parametrize(
    "spec", [transfers.SMALL, transfers.LARGE], ids=["small", "large"]
)
@pytest.mark.parametrize("verb", ["push", "pull"])
async def test_every_layer_arrives_where_it_belongs(
    verb: str, spec: KVSpec, over: transfers.Over
) -> None:
    source, sent = transfers.cache(spec, 1)
    target, received = transfers.cache(spec, 9)
    async with transfers.pair(over.backend, over.settings()) as both:
        incoming, outgoing = transfers.begun(both, verb, "t", source, target)
        for layer in range(spec.layers):
            outgoing.ready(layers=layer)
            await incoming.layer(layer)
            assert (
                received[layer][transfers.THEIRS] == sent[layer][transfers.OURS]
            ).all()
            assert (received[layer][0::2] == 9 + layer).all()
        outgoing.finish()
        assert (await incoming).complete
        assert (await outgoing).complete
        await incoming.drained()
        await outgoing.drained()


@transfers.each_lane
@pytest.mark.parametrize(
    ("times", "watched_s"),
    [
        (24, 0.2),
        pytest.param(1000, 10.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
async def test_nothing_is_written_after_drained(
    over: transfers.Over, times: int, watched_s: float
) -> None:
    """Transfers are aborted at any moment; their memory is watched from then on."""
    chance = random.Random(times)  # the same moments in every run
    source, _ = transfers.cache(transfers.LARGE, 1)
    spare = [transfers.cache(transfers.LARGE, 9) for _ in range(4)]
    midway = 0
    async with transfers.pair(over.backend, over.settings()) as both:
        for turn in range(times):
            target, tensors = spare[turn % len(spare)]
            if turn >= len(spare):
                transfers.require_untouched(*tensors)
            verb = chance.choice(("push", "pull"))
            incoming, outgoing = transfers.begun(both, verb, turn, source, target)
            outgoing.ready(layers=slice(0, 2))
            outgoing.finish()
            if turn % 3 == 0:
                await incoming.layer(0)
            # Often few: within one host a transfer is over after some turns.
            await turns(chance.choice((0, 0, 1, 2, 3, 5, 8, 13, 21, 34)))
            (incoming if turn % 2 else outgoing).abort("no longer wanted")
            midway += not (await incoming).complete
            await incoming.drained()
            for tensor in tensors:
                tensor.view(np.uint8).fill(transfers.CANARY)
            await outgoing.drained()
        await transfers.go_on(both, watched_s)
        for _, tensors in spare:
            transfers.require_untouched(*tensors)
        assert both.left.transport == over.backend
    assert midway


@transfers.each_lane
async def test_the_control_link_takes_over_when_the_lane_breaks(
    over: transfers.Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allowed, since other transports are: and reported, never in silence."""
    lanes: list[Any] = []
    cls = registry.load(over.backend)
    open_lane = cls.open_lane

    def noted(self: Any, context: LaneContext) -> Lane:
        lane = open_lane(self, context)
        lanes.append(lane)
        return lane

    monkeypatch.setattr(cls, "open_lane", noted)
    raise_again_after(monkeypatch, NEVER_S)  # one that is up again did not fail
    async with transfers.pair(over.backend, over.settings()) as both:
        lanes[0].abort(ConnectionLost("planted"))
        await until(lambda: both.left.transport == "tcp")
        request = both.left.send(1, bytes(1 << 20))
        assert await both.right.recv(1) == bytes(1 << 20)
        await request
        assert f"{over.backend} failed" in str(both.left.transport_report)


# --- puts and gets over each lane: they are whole, and their memory is free when told


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
