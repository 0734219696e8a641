"""KV transfers over lanes that move device memory themselves, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvwire import KVSpec, PagedCache
from kvwire.backend import Availability, Payload
from kvwire.backend.lane import Lane, LaneContext
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.memory.copy import copy
from kvwire.memory.device.registry import device_ops
from kvwire.types import MemoryKind
from kvwire_nccl.backend import NcclBackend
from kvwire_nccl.lane import NcclLane
from tests.backends.kvwire_nccl import fake
from tests.support.pairs import Pair, communicators
from tests.support.simulated_device import SimulatedArray, SimulatedDevice

SPEC = KVSpec(layers=3, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
SHAPE = (40, 2, 16, 4, 32)
SOURCE = [7, 3, 39, 20, 21, 22, 0, 11, 30, 31, 5, 1]
TARGET = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]
DEVICE_ONLY = frozenset({MemoryKind.SIMULATED})


class DeviceLibrary(fake.FakeLibrary):
    """Moves the memory of simulated devices, as NCCL does that of GPUs."""

    kinds = DEVICE_ONLY


def on_device(source: Payload, destination: Payload) -> None:
    """What the communicator's kernels do."""
    copy(reached(source), reached(destination))


def reached(payload: Payload) -> Fragments:
    assert isinstance(payload, Fragments)
    assert payload.device is not None
    device = device_ops(payload.device)
    assert isinstance(device, SimulatedDevice)
    return device.reach(payload)


@pytest.fixture(autouse=True)
def _over_device_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def availability(_: type[NcclBackend]) -> Availability:
        return Availability(available=True, reason="a fake for tests")

    def open_lane(_: NcclBackend, context: LaneContext) -> Lane:
        return NcclLane(context, DeviceLibrary())

    monkeypatch.setattr(NcclBackend, "availability", classmethod(availability))
    monkeypatch.setattr(NcclBackend, "open_lane", open_lane)
    monkeypatch.setattr(fake, "copy", on_device)
    yield
    fake._wires.clear()


@asynccontextmanager
async def connected_by(**wishes: Any) -> AsyncIterator[Pair]:
    """A pair over TCP, whose data goes by nccl."""
    async with communicators(chunk_bytes=64 * KIB, **wishes) as (near, far):
        address = await far.listen("127.0.0.1:0")
        left = await near.connect(address)
        right = await anext(far.connections())
        yield Pair(near, far, left, right, address)


def values(seed: int | None) -> list[npt.NDArray[Any]]:
    if seed is None:
        return [np.zeros(SHAPE, np.float16) for _ in range(3)]
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**16, SHAPE, np.uint16).view(np.float16) for _ in range(3)]


async def moved(pair: Pair, source: PagedCache, target: PagedCache) -> None:
    inc = pair.left.pull("t", target, TARGET)
    async with pair.far.publish("t", source, SOURCE) as out:
        out.ready()
    assert (await inc).complete
    await inc.drained()
    await out.drained()


def same(source: list[npt.NDArray[Any]], target: list[npt.NDArray[Any]]) -> bool:
    return all(
        a[SOURCE].tobytes() == b[TARGET].tobytes()
        for a, b in zip(source, target, strict=True)
    )


async def test_device_memory_takes_no_detour(device: SimulatedDevice) -> None:
    """Not by slots of the host: none is even made use of, though a device is held."""
    given = values(1)
    source: list[SimulatedArray] = [device.array(v) for v in given]
    target: list[SimulatedArray] = [device.array(v) for v in values(None)]
    async with connected_by(prefer=("nccl",)) as pair:
        assert pair.left.transport == "nccl"
        # Staging would wait for the device's streams, which stand still.
        device.hold()
        await moved(pair, PagedCache(SPEC, source), PagedCache(SPEC, target))
        device.release()
    assert same(given, [array.read() for array in target])


async def test_host_memory_takes_the_control_link() -> None:
    given, target = values(2), values(None)
    async with connected_by(prefer=("nccl",)) as pair:
        assert pair.left.transport == "nccl"
        await moved(pair, PagedCache(SPEC, given), PagedCache(SPEC, target))
        assert pair.left.transport == "nccl"
    assert same(given, target)


async def test_a_device_here_and_host_memory_there(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer's half cannot receive it: it ends and says why, and TCP goes on."""
    # The first reason is kept. A producer that notices the end before it is told of it
    # would say that the other end is gone, and might be heard first.
    monkeypatch.setattr(fake.FakeOneWay, "check", lambda self: None)
    given, target = values(3), values(None)
    source = [device.array(v) for v in given]
    async with connected_by(prefer=("nccl",)) as pair:
        await moved(pair, PagedCache(SPEC, source), PagedCache(SPEC, target))
        assert pair.left.transport == "tcp"
        assert "it moves simulated memory only, and this is host" in str(
            pair.left.transport_report
        )
    assert same(given, target)
