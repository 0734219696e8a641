"""Transfers over NIXL that are aborted: what has drained is never written again.

Slow: 1,000 of them, and the memory watched for 10 s after the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import AxisOrder
from kvwire.testing.harness import Loopback, loopback
from tests.backends.kvwire_nixl.support import needs_nixl

pytestmark = [needs_nixl, pytest.mark.asyncio(loop_factories=["asyncio"])]

# 64 KiB a block and layer, 16 MiB a transfer: it is read in place, for milliseconds.
SPEC = KVSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")
BLOCKS = 64
CANARY = 0xA5


Cache: TypeAlias = tuple[PagedCache, list[npt.NDArray[np.uint16]]]
Caches: TypeAlias = tuple[Cache, Cache]


def cache(value: int) -> Cache:
    shape = (BLOCKS, 2, 16, 8, 128)
    tensors = [np.full(shape, value, np.uint16) for _ in range(SPEC.layers)]
    typed: Any = [each.view(np.float16) for each in tensors]
    return PagedCache(SPEC, typed, layout=AxisOrder("block kv token head dim")), tensors


def is_canary(tensors: list[npt.NDArray[np.uint16]]) -> bool:
    return all((each == CANARY).all() for each in tensors)


async def abort_midway(
    pair: Loopback, caches: Caches, number: int, layer_landed: int | None
) -> bool:
    """One transfer; whether it was aborted before its end."""
    (source, _), (target, landed) = caches
    if number % 4 < 2:
        incoming = pair.b.expect(number, target, range(BLOCKS))
        outgoing = pair.ab.push(number, source, range(BLOCKS))
    else:
        outgoing = pair.a.publish(number, source, range(BLOCKS))
        incoming = pair.ba.pull(number, target, range(BLOCKS))
    for layer in range(SPEC.layers):
        outgoing.ready(layers=layer)
    outgoing.finish()
    if layer_landed is not None:
        await incoming.layer(layer_landed)
    (incoming if number % 2 else outgoing).abort("no longer wanted")
    outcome = await incoming
    await incoming.drained()
    # Free from here on: whatever is found in it but this was written late.
    for each in landed:
        each[:] = CANARY
    await outgoing
    await outgoing.drained()
    assert is_canary(landed)
    return not outcome.complete


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("aborts", "watched_s"),
    [(20, 0.2), pytest.param(1000, 10.0, marks=pytest.mark.slow)],
)
async def test_nothing_is_written_after_drained(aborts: int, watched_s: float) -> None:
    chance = random.Random(aborts)  # the same delays in every run
    caches = cache(7), cache(0)
    _, (_, landed) = caches
    midway = 0
    async with loopback("nixl", require=("nixl",)) as pair:
        assert pair.ab.transport == "nixl"
        for number in range(aborts):
            # Abort at once, or as soon as one of the layers has come.
            landed_layer = chance.choice((None, 0, 0, 1, 1, 2))
            midway += await abort_midway(pair, caches, number, landed_layer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(watched_s):
                await asyncio.Event().wait()
        assert is_canary(landed)
        assert pair.ab.transport == "nixl"
        message = np.arange(1 << 20, dtype=np.uint8)
        sent = pair.ab.send(1, message)
        assert await pair.ba.recv(1) == message.tobytes()
        await sent
    print(f"{midway} of {aborts} aborted midway; 0 late writes")
    assert midway


async def test_a_broken_lane_leaves_the_data_to_the_control_link() -> None:
    wishes = kvwire.Config(prefer=("nixl",))
    async with kvwire.open(wishes, name="a") as a, kvwire.open(wishes, name="b") as b:
        ab = await a.connect(await b.listen("127.0.0.1:0"))
        ba = await b.accept()
        assert ab.transport == "nixl"
        backend: Any = a._state._backends["nixl"]
        for lane in list(backend._lanes):
            lane._end(kvwire.ConnectionLost("nixl: planted"))
            await lane.ended
        sent = ab.send(1, bytes(1 << 20))
        assert await ba.recv(1) == bytes(1 << 20)
        await sent
        assert ab.transport == "tcp"
        assert "nixl failed" in str(ab.transport_report)
