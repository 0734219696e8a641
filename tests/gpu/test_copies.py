"""On a GPU: gathers, scatters, copies and events, against NumPy's own indexing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvwire import KVSpec, PagedCache
from kvwire.limits import KIB
from kvwire.memory import LayerCounter
from kvwire.memory.device.ops import Stream
from kvwire.memory.device.registry import event_ops
from kvwire_store import BlockStore
from tests.gpu.devices import LIBRARIES, Gpu, pieces
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import connected

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


# --- on a GPU: layers of a captured graph, marked by the word that the graph writes ---


LAYERS = 4
SHAPE = (16, 2, 16, 4, 32)


def captured(counter: LayerCounter, cache: list[Any], base: Any, step: Any) -> Any:
    """A graph that fills a layer and says so, layer after layer."""
    import torch

    word = torch.frombuffer(counter.word, dtype=torch.int64)
    numbers = [torch.full((1,), n + 1, dtype=torch.int64).cuda() for n in range(LAYERS)]
    said = [torch.zeros(1, dtype=torch.int64).cuda() for _ in range(LAYERS)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for n, layer in enumerate(cache):
            layer.copy_(step.expand_as(layer))
            torch.add(base, numbers[n], out=said[n])
            word.copy_(said[n], non_blocking=True)
    return graph


async def test_two_passes_of_one_graph() -> None:
    gpu = Gpu("torch")
    import torch

    spec = KVSpec(
        layers=LAYERS, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16"
    )
    cache: list[Any] = [
        torch.zeros(SHAPE, dtype=torch.float16).cuda() for _ in range(LAYERS)
    ]
    base = torch.zeros(1, dtype=torch.int64).cuda()
    step = torch.zeros(1, dtype=torch.float16).cuda()
    counter = LayerCounter(LAYERS, gpu.ops.pinned(8))
    graph = captured(counter, cache, base, step)
    async with connected("tcp", chunk_bytes=64 * KIB) as pair:
        for number in (1, 2):
            target = [np.zeros(SHAPE, np.float16) for _ in range(LAYERS)]
            inc = pair.right.pull(number, PagedCache(spec, target), range(16))
            out = pair.near.publish(number, PagedCache(spec, cache), range(16))
            run = counter.begin()
            async with out:
                for layer in range(LAYERS):
                    out.ready(layers=layer, after=run.layer(layer))
                base.fill_(run.base)
                step.fill_(number)
                graph.replay()
            assert (await inc).complete
            await inc.drained()
            await out.drained()
            assert all((layer == number).all() for layer in target)
    counter.close()


# --- on a GPU: blocks into a store and out of it, in the order of kernels -------------


IDS = [7, 3, 15, 0, 11, 12]
INTO = [2, 4, 6, 8, 10, 1]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_blocks_come_back_behind_the_kernels_around_them(
    library: str, tmp_path: Any
) -> None:
    """What slow kernels write is put; what they still read is not overwritten."""
    host, hashes = Filled(16, LARGE, "NHD", 1).tensors, chain(len(IDS))
    gpu = Gpu(library)
    zeros = [np.zeros_like(tensor) for tensor in host]
    source, target = [[gpu.array(z) for z in zeros] for _ in range(2)]
    written = [gpu.array(tensor) for tensor in host]
    async with BlockStore.open(
        ["memory:2MiB", f"disk:{tmp_path / 'kv'}?size=4MiB"]
    ) as store:
        gpu.spin(0.2)
        for array, values in zip(source, written, strict=True):
            array[:] = values
        request = store.put(hashes, PagedCache(LARGE, source), IDS)
        assert (await request).complete
        await request.drained()
        gpu.spin(0.2)
        read = [array + 0 for array in target]
        assert (await store.get(hashes, PagedCache(LARGE, target), INTO)).complete
    for values, before, after in zip(host, read, target, strict=True):
        assert not gpu.values(before, values).any()
        assert gpu.values(after, values)[INTO].tobytes() == values[IDS].tobytes()
