"""Devices of a communicator: made when needed, once, and let go of."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.driver.devices import Devices
from kvwire.driver.trace_ring import RINGS, TRACE_EVENTS_MAX, close_ring, open_ring
from kvwire.errors import BackendUnavailable
from kvwire.limits import MIB
from kvwire.memory.device.ops import Stream
from kvwire.types import Device, MemoryKind
from tests.support.simulated_device import SimulatedDevice


async def test_one_desk_and_one_set_of_waiters(device: SimulatedDevice) -> None:
    devices = Devices(asyncio.get_running_loop(), MIB)
    copy_engine = devices.copy_engine(device.device)
    assert devices.copy_engine(device.device) is copy_engine
    assert copy_engine.slot_bytes == MIB
    assert devices.waiters(device) is devices.waiters(device)
    devices.close()
    with pytest.raises(BackendUnavailable, match="the communicator is closed"):
        devices.copy_engine(device.device)
    devices.close()


async def test_a_device_that_does_not_work(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own error, with the device's name, is one of kvwire's."""

    def broken() -> Stream:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device, "stream", broken)
    devices = Devices(asyncio.get_running_loop(), MIB)
    with pytest.raises(BackendUnavailable, match=r"simulated:\d+ does not work: CUDA"):
        devices.copy_engine(device.device)


async def test_a_gpu_that_is_not_there() -> None:
    devices = Devices(asyncio.get_running_loop(), MIB)
    with pytest.raises(BackendUnavailable, match=r"driver: libcuda|none has number 99"):
        devices.copy_engine(Device(MemoryKind.CUDA, 99))


# --- the last events of a loop: bounded, and there only while somebody may look -------


async def test_the_oldest_makes_room() -> None:
    loop = asyncio.get_running_loop()
    ring = open_ring(loop)
    assert open_ring(loop) is ring
    for number in range(TRACE_EVENTS_MAX + 2):
        ring.note("landed", "key", number)
    assert len(ring.events) == TRACE_EVENTS_MAX
    assert ring.events[0][1:] == ("landed", "key", (2,))
    close_ring(loop)
    assert RINGS[loop] is ring
    close_ring(loop)
    assert loop not in RINGS
