"""KV transfers with their data over UCX: pushed, pulled, aborted, and without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import AxisOrder
from kvwire.testing.harness import Loopback
from tests.backends.kvwire_ucx.support import needs_ucx, transports_of_this_loop

pytestmark = needs_ucx

# 4 KiB a block, layer and component: blocks lie apart on both sides.
SPEC = KVSpec(layers=4, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
BLOCKS = 64
OURS = list(range(0, BLOCKS, 2))
THEIRS = list(range(BLOCKS - 1, 0, -2))


def cache(filled: bool) -> tuple[PagedCache, list[npt.NDArray[np.float16]]]:
    shape = (BLOCKS, 2, 16, 4, 32)
    rng = np.random.default_rng(0)
    tensors = [
        rng.standard_normal(shape).astype(np.float16)
        if filled
        else np.zeros(shape, np.float16)
        for _ in range(SPEC.layers)
    ]
    return PagedCache(
        SPEC, tensors, layout=AxisOrder("block kv token head dim")
    ), tensors


@asynccontextmanager
async def pair() -> AsyncIterator[Loopback]:
    """Connected over TCP, with UCX preferred for the data."""
    wishes = kvwire.Config(
        prefer=("ucx",), backends={"ucx": {"TLS": transports_of_this_loop()}}
    )
    async with kvwire.open(wishes, name="a") as a, kvwire.open(wishes, name="b") as b:
        address = await b.listen("127.0.0.1:0")
        ab = await a.connect(address)
        yield Loopback(a=a, b=b, ab=ab, ba=await b.accept(), address=address)


@pytest.mark.parametrize("verb", ["push", "pull"])
async def test_every_layer_arrives_where_it_belongs(verb: str) -> None:
    source, sent = cache(filled=True)
    target, received = cache(filled=False)
    async with pair() as both:
        assert both.ab.transport == "ucx"
        if verb == "push":
            incoming = both.b.expect("t", target, THEIRS)
            outgoing = both.ab.push("t", source, OURS)
        else:
            outgoing = both.a.publish("t", source, OURS)
            incoming = both.ba.pull("t", target, THEIRS)
        for layer in range(SPEC.layers):
            outgoing.ready(layers=layer)
            await incoming.layer(layer)
            assert (received[layer][THEIRS] == sent[layer][OURS]).all()
            assert not received[layer][0::2].any()
        outgoing.finish()
        outcome = await incoming
        assert outcome.complete
        assert (await outgoing).complete
        await incoming.drained()
        await outgoing.drained()


async def test_the_control_link_takes_over_when_the_lane_breaks() -> None:
    """Allowed, since other transports are: and reported, never in silence."""
    async with pair() as both:
        await _break_lanes(both)
        request = both.ab.send(1, bytes(1 << 20))
        assert await both.ba.recv(1) == bytes(1 << 20)
        await request
        assert both.ab.transport == "tcp"
        assert "ucx failed" in str(both.ab.transport_report)


async def _break_lanes(both: Loopback) -> None:
    backend: Any = both.a._state._backends["ucx"]
    for lane in list(backend._lanes):
        lane._endpoint_failed(-25)
        await lane.ended
