"""Blocks of caches on a device: in and out of a store, in order, and after a failure.

A simulated device plays the GPU: host code that touched its memory would end the
process, and its streams run beside everything else.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvwire import BackendUnavailable, Outcome, PagedCache, UsageError
from kvwire.kv.layout import Layout
from kvwire.limits import KIB
from kvwire.memory.device import device_copies
from kvwire_store import BlockStore
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.simulated_device import SimulatedArray, SimulatedDevice

IDS = [7, 3, 15, 0, 11, 12]
INTO = [2, 4, 6, 8, 10, 1]
HASHES = chain(len(IDS))


class OnDevice:
    """A cache on a device, filled with the bytes of a seed; None for zeros."""

    def __init__(
        self, device: SimulatedDevice, seed: int | None, layout: Layout = "NHD"
    ) -> None:
        self.host = Filled(16, LARGE, layout, seed)
        self.arrays: list[SimulatedArray] = [device.array(t) for t in self.host.tensors]
        self.cache = PagedCache(LARGE, self.arrays, layout=layout)

    def blocks(self, ids: list[int]) -> Any:
        values = _bits([array.read() for array in self.arrays])[:, ids]
        return (
            values if self.host.layout == "NHD" else values.transpose(0, 1, 2, 4, 3, 5)
        )


def _bits(layers: list[Any]) -> Any:
    """All layers bit for bit: random halves are no numbers now and then."""
    return np.stack(layers).view(np.uint16)


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take many pieces, cut in the middle of a block."""
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 40 * KIB)


@pytest.mark.parametrize("into", ["NHD", "HND"])
@pytest.mark.parametrize("tier", ["", "disk"])
async def test_blocks_come_back_to_a_device(
    device: SimulatedDevice, tmp_path: Any, tier: str, into: Layout
) -> None:
    source, target = OnDevice(device, 1), OnDevice(device, None, into)
    tiers = ["memory:2MiB"] + ([f"disk:{tmp_path / 'kv'}?size=4MiB"] if tier else [])
    async with BlockStore.open(tiers) as store:
        request = store.put(HASHES, source.cache, IDS)
        await request.drained()
        source.arrays[0].write(np.zeros_like(source.host.tensors[0]))  # they are free
        assert (await request).complete
        got = store.get(HASHES, target.cache, INTO)
        assert (await got).complete
        assert got.is_drained
    expected = _bits(source.host.tensors)[:, IDS]
    assert np.array_equal(target.blocks(INTO), expected)
    assert not target.blocks([i for i in range(16) if i not in INTO]).any()


async def test_hashes_of_other_lengths_than_blocks(device: SimulatedDevice) -> None:
    """Two blocks stand for one hash: the pieces of an image are woven."""
    source, target = OnDevice(device, 3), OnDevice(device, None)
    tokens = 2 * LARGE.block_tokens
    async with BlockStore.open(["memory:4MiB"]) as store:
        for cache, verb in ((source, store.put), (target, store.get)):
            outcome = await verb(HASHES[:3], cache.cache, IDS, hash_tokens=tokens)
            assert outcome.complete
    assert np.array_equal(target.blocks(IDS), source.blocks(IDS))


@pytest.mark.parametrize("said", [True, False])
async def test_a_put_waits_for_what_writes_the_blocks(
    device: SimulatedDevice, *, said: bool
) -> None:
    source, target = OnDevice(device, None), OnDevice(device, None)
    written = Filled(16, LARGE, seed=4).tensors
    producer, gate = device.stream(), threading.Event()
    if not said:
        device.set_current(producer)
    async with BlockStore.open(["memory:2MiB"]) as store:
        producer.call(partial(_pass, gate))
        for array, values in zip(source.arrays, written, strict=True):
            producer.call(partial(array.write, values))
        after = producer.record() if said else None
        request = store.put(HASHES, source.cache, IDS, after=after)
        with pytest.raises(TimeoutError):  # enough for a copy that waits for nothing
            async with asyncio.timeout(0.1):
                await request.drained()
        gate.set()
        assert (await request).complete
        assert (await store.get(HASHES, target.cache, INTO)).complete
    producer.close()
    assert np.array_equal(target.blocks(INTO), _bits(written)[:, IDS])


async def test_a_kernel_that_never_ends_holds_up_no_other_call(
    device: SimulatedDevice,
) -> None:
    """Its call waits beside the threads and streams on which others are copied."""
    source, target = OnDevice(device, 8), OnDevice(device, None)
    producer, gate = device.stream(), threading.Event()
    producer.call(partial(_pass, gate))
    after = producer.record()
    async with BlockStore.open(["memory:8MiB"]) as store:
        stuck = [
            store.put(chain(len(IDS), str(number)), source.cache, IDS, after=after)
            for number in range(6)
        ]
        stuck.append(store.get(HASHES, target.cache, INTO, after=after))
        assert (await store.put(HASHES, source.cache, IDS)).complete
        assert (await store.get(HASHES, target.cache, INTO)).complete
        assert not any(request.is_drained for request in stuck)
        gate.set()
        for request in stuck:
            assert (await request).complete
    producer.close()
    assert np.array_equal(target.blocks(INTO), source.blocks(IDS))


async def test_a_failed_device_keeps_what_it_wrote_to(device: SimulatedDevice) -> None:
    """A put only read, so its blocks are free; those of a get may still be written."""
    source, target = OnDevice(device, 5), OnDevice(device, None)
    async with BlockStore.open(["memory:2MiB"]) as store:
        assert (await store.put(HASHES, source.cache, IDS)).complete
        device.fail("an illegal address")
        more = chain(len(IDS), "more")
        put = store.put(more, source.cache, IDS)
        _missing_all(await put)
        assert put.is_drained
        get = store.get(HASHES, target.cache, INTO)
        _missing_all(await get)
        assert not get.is_drained
        # Others are served.
        host = Filled(16, LARGE)
        assert (await store.get(HASHES, host.cache, INTO)).complete
        assert await store.match(more, host.cache) == 0
    assert not get.is_drained


def _pass(gate: threading.Event) -> None:
    gate.wait()


def _missing_all(outcome: Outcome) -> None:
    assert outcome.state == "failed"
    (reason,) = outcome.missing.reasons
    assert "failed: an illegal address" in reason


async def test_a_device_without_pinned_memory_serves_later(
    device: SimulatedDevice,
) -> None:
    source = OnDevice(device, 6)
    async with BlockStore.open(["memory:2MiB"]) as store:
        device.pinned_bytes_max = 0
        with pytest.raises(BackendUnavailable, match="pinned memory were refused"):
            store.put(HASHES, source.cache, IDS)
        device.pinned_bytes_max = 1 << 30
        assert (await store.put(HASHES, source.cache, IDS)).complete


async def test_events_that_are_none(device: SimulatedDevice) -> None:
    on_device, host = OnDevice(device, None), Filled(16, LARGE)
    async with BlockStore.open(["memory:2MiB"]) as store:
        with pytest.raises(UsageError, match="pass an event of simulated"):
            store.put(HASHES, on_device.cache, IDS, after=object())
        with pytest.raises(UsageError, match="in host memory"):
            store.get(HASHES, host.cache, IDS, after=object())
