"""The simulated device: out of reach, asynchronous, in the order of its streams."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.kv.fragments import Fragments
from kvwire.kv.tensors import tensor_view
from kvwire.memory.device.ops import Stream
from tests.support.simulated_device import SimulatedArray, SimulatedDevice
from tests.support.tree import ROOT


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    yield made
    made.close()


@pytest.fixture
def stream(device: SimulatedDevice) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


def pieces(array: SimulatedArray, indices: list[int], nbytes: int) -> Fragments:
    """Pieces of an array, by index."""
    addresses = np.array(indices, np.uint64) * np.uint64(nbytes)
    view = tensor_view(array, "t")
    return Fragments(
        addresses + np.uint64(array.data_ptr()),
        np.full(len(indices), nbytes, np.uint64),
        owner=array,
        writable=True,
        device=view.device,
    )


def test_the_host_cannot_touch_its_memory() -> None:
    """In a process of its own, since the processor ends it."""
    code = (
        "import ctypes, numpy as np\n"
        "from tests.support.simulated_device import SimulatedDevice\n"
        "array = SimulatedDevice().array(np.zeros(8))\n"
        "assert not array.read().any()\n"
        "ctypes.string_at(array.data_ptr(), 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_gather_and_scatter(device: SimulatedDevice, stream: Stream) -> None:
    values = np.random.default_rng(0).integers(0, 256, (64, 96), np.uint8)
    array, other = device.array(values), device.array(np.zeros_like(values))
    chosen = [7, 3, 60, 4]
    packed = stream.buffer(4 * 96)
    host = device.pinned(4 * 96)
    stream.gather(pieces(array, chosen, 96), packed)
    stream.to_host(packed, host)
    stream.scatter(packed, pieces(other, [0, 9, 5, 1], 96))
    stream.record().synchronize()
    assert bytes(host) == values[chosen].tobytes()
    assert np.array_equal(other.read()[[0, 9, 5, 1]], values[chosen])
    assert np.count_nonzero(other.read().any(axis=1)) <= 4


def test_work_is_queued_and_not_done(device: SimulatedDevice, stream: Stream) -> None:
    """What was queued reads memory when its turn comes: forgotten waits show."""
    array, host = device.array(np.zeros(4, np.uint8)), device.pinned(4)
    device.hold()
    stream.to_host(pieces(array, [0], 4), host)
    event = stream.record()
    assert not event.query()
    array.write(np.full(4, 7, np.uint8))
    device.release()
    event.synchronize()
    assert event.query()
    assert bytes(host) == bytes([7]) * 4
