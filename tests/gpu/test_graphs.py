"""On a GPU: layers of a captured graph, marked by the word that the graph writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwire import KVSpec, PagedCache
from kvwire.limits import KIB
from kvwire.memory import LayerCounter
from tests.gpu.devices import Gpu
from tests.support.pairs import connected

pytestmark = pytest.mark.gpu

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
