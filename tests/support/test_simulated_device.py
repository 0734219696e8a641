"""The simulated device: out of reach, asynchronous, in the order of its streams."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.memory.device.ops import Stream, contiguous
from tests.support.simulated_device import SimulatedDevice
from tests.support.tree import ROOT


@pytest.fixture
def stream(device: SimulatedDevice) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


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


def test_memory_stays_until_the_streams_are_done_with_it() -> None:
    """Also if a copy is under way while the device fails: it touches the memory."""
    device = SimulatedDevice()
    stream = device.stream()
    array, host = device.array(np.ones(4, np.uint8)), device.pinned(4)
    begun, goes_on = threading.Event(), threading.Event()

    def slowly() -> None:
        begun.set()
        goes_on.wait()
        host[:] = array.read().data

    stream.call(slowly)
    begun.wait()
    device.fail("it fell off the bus")
    closing = threading.Thread(target=device.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    goes_on.set()
    closing.join()
    assert bytes(host) == bytes([1]) * 4


def test_work_is_queued_and_not_done(device: SimulatedDevice, stream: Stream) -> None:
    """What was queued reads memory when its turn comes: forgotten waits show."""
    array, host = device.array(np.zeros(4, np.uint8)), device.pinned(4)
    device.hold()
    stream.to_host(contiguous(array.data_ptr(), 4, array, device.device), host)
    event = stream.record()
    assert not event.query()
    array.write(np.full(4, 7, np.uint8))
    device.release()
    event.synchronize()
    assert event.query()
    assert bytes(host) == bytes([7]) * 4
