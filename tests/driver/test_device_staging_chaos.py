"""Many transfers of device memory at once: devices stall, lanes break, some give up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvwire import KVSpec, Outgoing, PagedCache
from kvwire.limits import KIB, MIB
from tests.support import inside
from tests.support.pairs import Pair, connected, until
from tests.support.simulated_device import SimulatedDevice, SimulatedStream

SPEC = KVSpec(layers=3, kv_heads=4, head_dim=32, block_tokens=16, dtype="bfloat16")
SHAPE = (40, 2, 16, 4, 32)
TRANSFERS = 8


@pytest.fixture
def devices() -> Iterator[tuple[SimulatedDevice, SimulatedDevice]]:
    made = SimulatedDevice(256 * MIB), SimulatedDevice(256 * MIB)
    yield made
    for device in made:
        device.close()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_memory_drains_and_bytes_are_right(
    seed: int, devices: tuple[SimulatedDevice, SimulatedDevice]
) -> None:
    rng = random.Random(seed)
    scheme = rng.choice(["tcp", "inproc"])
    lanes = rng.choice([1, 2, 3])
    async with connected(scheme, chunk_bytes=64 * KIB, lanes=lanes) as pair:
        trouble = asyncio.create_task(disturb(pair, rng, devices))
        outcomes = await asyncio.gather(
            *(transfer(pair, rng, n, devices) for n in range(TRANSFERS))
        )
        trouble.cancel()
        for device in devices:
            device.release()
        assert outcomes[0], "nobody aborted it, and a lost lane is no reason"
        await until(
            lambda: not len(inside.buffers(pair.near)) + len(inside.buffers(pair.far))
        )
        assert pair.near.quarantined_bytes == pair.far.quarantined_bytes == 0


async def disturb(
    pair: Pair, rng: random.Random, devices: tuple[SimulatedDevice, ...]
) -> None:
    """Stop devices for a while, and break a lane now and then."""
    while True:
        device = rng.choice(devices)
        device.hold()
        await turns(rng, 100)
        device.release()
        up = inside.lanes(pair.left).open
        if up and rng.random() < 0.1:
            rng.choice(up).lane.abort()
        await turns(rng, 100)


async def transfer(
    pair: Pair,
    rng: random.Random,
    number: int,
    devices: tuple[SimulatedDevice, SimulatedDevice],
) -> bool:
    """One transfer either way; whether it was complete."""
    there, here = devices
    content = np.random.default_rng(number)
    values = [content.integers(0, 2**16, SHAPE, np.uint16) for _ in range(3)]
    source = [there.array(v, "bfloat16") for v in values]
    target = [here.array(np.zeros_like(v), "bfloat16") for v in values]
    blocks, into = rng.sample(range(40), 12), rng.sample(range(40), 12)
    publishes, pulls = rng.choice([(pair.near, pair.right), (pair.far, pair.left)])
    inc = pulls.pull(number, PagedCache(SPEC, target), into)
    out = publishes.publish(number, PagedCache(SPEC, source), blocks)
    compute = there.stream()
    producer = asyncio.create_task(produce(out, compute, rng))
    if number and rng.random() < 0.3:  # the first one is to be complete
        await turns(rng, 300)
        rng.choice([inc, out]).abort("at random")
    complete = (await inc).complete
    await out
    await producer
    await inc.drained()
    await out.drained()
    if complete:
        for before, after in zip(values, target, strict=True):
            assert np.array_equal(after.read()[into], before[blocks])
    done = compute.record()
    await until(done.query)
    compute.close()
    return complete


async def produce(out: Outgoing, compute: SimulatedStream, rng: random.Random) -> None:
    """Mark layer after layer, some behind events, until it is over."""
    for layer in range(3):
        await turns(rng, 20)
        if out.done():
            return
        compute.call(lambda: None)
        out.ready(layers=layer, after=compute.record() if rng.random() < 0.7 else None)
    out.finish()


async def turns(rng: random.Random, at_most: int) -> None:
    """Let the loop do some of what it has to do."""
    for _ in range(rng.randrange(at_most)):
        await asyncio.sleep(0)
