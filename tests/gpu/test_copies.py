"""On a GPU: gathers, scatters, copies and events, against NumPy's own indexing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvwire.memory.device.ops import Stream
from kvwire.memory.device.registry import event_ops
from tests.gpu.devices import LIBRARIES, Gpu, pieces

pytestmark = pytest.mark.gpu


@pytest.fixture(params=LIBRARIES)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(request.param)


@pytest.fixture
def stream(gpu: Gpu) -> Iterator[Stream]:
    made = gpu.ops.stream()
    yield made
    made.close()


@pytest.mark.parametrize("nbytes", [3, 16, 100, 1024, 20_480])
def test_out_of_the_gpu_and_back(gpu: Gpu, stream: Stream, nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    values = rng.integers(0, 256, (64, nbytes), np.uint8)
    there, back = gpu.array(values), gpu.array(np.zeros_like(values))
    chosen = rng.permutation(64)[:40].tolist()
    slot = gpu.ops.pinned(40 * nbytes)
    packed = stream.buffer(40 * nbytes)
    stream.wait(gpu.event())  # what made the arrays
    stream.gather(pieces(there, chosen, nbytes), packed)
    stream.to_host(packed, slot)
    stream.record().synchronize()
    assert bytes(slot) == values[chosen].tobytes()
    stream.to_device(slot, packed)
    stream.scatter(packed, pieces(back, chosen, nbytes))
    stream.record().synchronize()
    result = gpu.values(back, values)
    assert np.array_equal(result[chosen], values[chosen])
    assert not np.delete(result, chosen, axis=0).any()


def test_runs_are_copied_without_a_gather(gpu: Gpu, stream: Stream) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 4096), np.uint8)
    array, slot = gpu.array(values), gpu.ops.pinned(3 * 4096)
    stream.wait(gpu.event())
    stream.to_host(pieces(array, [6, 0, 2], 4096), slot)
    stream.record().synchronize()
    assert bytes(slot) == values[[6, 0, 2]].tobytes()
    stream.to_device(slot, pieces(array, [1, 3, 5], 4096))
    stream.record().synchronize()
    assert np.array_equal(gpu.values(array, values)[[1, 3, 5]], values[[6, 0, 2]])


def test_a_stream_waits_for_the_application_s_event(gpu: Gpu, stream: Stream) -> None:
    array, slot = gpu.array(np.zeros(4096, np.uint8)), gpu.ops.pinned(4096)
    for seconds in (0.0, 0.2):  # a kernel that is loaded waits for those that run
        gpu.spin(seconds)
        array[:] = 7
        event = gpu.event()
        stream.wait(event)
        stream.to_host(pieces(array, [0], 4096), slot)
        done = stream.record()
    assert not done.query(), "the caller and the device do not wait"
    done.synchronize()
    assert bytes(slot) == bytes([7]) * 4096
    assert done.query()


def test_an_event_is_found_to_be_the_device_s(gpu: Gpu) -> None:
    assert event_ops(gpu.event()) is gpu.ops
