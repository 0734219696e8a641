"""The simulated device: out of reach, asynchronous, in the order of its streams."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.kv.tensors import tensor_view
from kvwire.memory.device.ops import Event, Stream, device_ops, event_ops
from kvwire.types import MemoryKind
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


def test_an_array_is_what_was_written(device: SimulatedDevice) -> None:
    values = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    array = device.array(values, "bfloat16")
    assert np.array_equal(array.read(), values)
    view = tensor_view(array, "t")
    assert (view.shape, view.strides) == (values.shape, values.strides)
    assert (view.dtype, view.device) == ("bfloat16", device.device)
    assert view.kind is MemoryKind.SIMULATED
    assert view.address % 256 == 0


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


def test_copies_of_runs(device: SimulatedDevice, stream: Stream) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 32), np.uint8)
    array = device.array(np.zeros_like(values))
    host = device.pinned(96)
    host[:] = values[:3].tobytes()
    stream.to_device(host, pieces(array, [6, 0, 2], 32))
    stream.record().synchronize()
    assert np.array_equal(array.read()[[6, 0, 2]], values[:3])


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


def test_a_stream_waits_for_an_event(device: SimulatedDevice, stream: Stream) -> None:
    other, order = device.stream(), list[str]()
    device.hold()
    other.call(lambda: order.append("first"))
    stream.wait(other.record())
    stream.call(lambda: order.append("second"))  # type: ignore[attr-defined]
    event = stream.record()
    device.release()
    event.synchronize()
    assert order == ["first", "second"]
    other.close()


def test_the_current_stream_is_that_of_the_thread(device: SimulatedDevice) -> None:
    own, gate = device.stream(), threading.Event()
    own.call(lambda: void(gate.wait()))
    device.set_current(own)
    mine, theirs = device.record_current(), list[Event]()
    other = threading.Thread(target=lambda: theirs.append(device.record_current()))
    other.start()
    other.join()
    assert theirs[0].query(), "another thread has queued nothing"
    assert not mine.query()
    gate.set()
    mine.synchronize()
    own.close()


def test_an_error_stays(device: SimulatedDevice, stream: Stream) -> None:
    before = stream.record()
    before.synchronize()
    device.fail("the device fell off the bus")
    stream.to_host(stream.buffer(8), device.pinned(8))
    event = stream.record()
    with pytest.raises(RuntimeError, match="fell off"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="fell off"):
        event.query()
    assert before.query()


def test_what_there_is_not(device: SimulatedDevice) -> None:
    device.pinned_bytes_max = 100
    device.pinned(100)
    with pytest.raises(BackendUnavailable, match="1 bytes of pinned memory"):
        device.pinned(1)
    with pytest.raises(UsageError, match="are not free"):
        device.allocate(2**40)


def test_devices_and_events_are_found(device: SimulatedDevice, stream: Stream) -> None:
    event = stream.record()
    assert device_ops(device.device) is device
    assert event_ops(event) is device
    assert event_ops(object()) is None
    device.close()
    with pytest.raises(UsageError, match="there is none, or it was closed"):
        device_ops(device.device)
    assert event_ops(event) is None
    device.close()  # a second time, as by the fixture, does no harm


def void(_: object) -> None:
    """For work whose result nobody wants."""
