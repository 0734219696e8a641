"""Rates on a GPU, as ratios of one run: ``python -m tests.gpu.rates``.

* Gather and copy to the host, through the code that staging uses, beside a plain copy
  of contiguous memory into pinned memory. Aim: 0.8 of it from 16 KiB fragments on. Then
  what one takes of the host, and the rate of many that are queued at once.
* Overlap: matrix products for each layer, alone and while each layer's cache is sent
  over TCP to this process. Efficiency is the first time by the second; aim: 0.95.

Interleaved, medians. It prints; it does not judge.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import kvwire
from kvwire import KVSpec, PagedCache
from kvwire.errors import BackendUnavailable
from kvwire.limits import KIB, MIB
from kvwire.memory.device.copy_engine import CopyEngine
from kvwire.memory.device.ops import DeviceOps
from kvwire.memory.device.registry import device_ops
from kvwire.types import Device, MemoryKind
from tests.gpu.devices import pieces

ROUNDS = 15
_AT_ONCE = 40
CHUNK_BYTES = 4 * MIB
LAYERS, BLOCKS = 16, 512


def main() -> int:
    """Measure, or say why not."""
    try:
        ops = device_ops(Device(MemoryKind.CUDA, 0))
    except BackendUnavailable as exc:
        print(f"no GPU: {exc}", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    for fragment_bytes in (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB):
        ratio, host_us, gb_s = gather_rates(ops, fragment_bytes)
        print(
            f"gather and copy, {fragment_bytes // KIB} KiB: {ratio:.2f} of a copy; "
            f"host {host_us:.0f} us, many at once {gb_s:.1f} GB/s"
        )
    print(f"overlap efficiency: {asyncio.run(overlap()):.3f}")
    return 0


def gather_rates(ops: DeviceOps, fragment_bytes: int) -> tuple[float, float, float]:
    """The rate of gathered chunks to that of contiguous ones; host us; GB/s of many."""
    pool = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0")
    slot = ops.pinned(CHUNK_BYTES)
    copy_engine = CopyEngine(ops, lambda call: None, CHUNK_BYTES)
    count = CHUNK_BYTES // fragment_bytes
    rows = np.random.default_rng(0).permutation(64 * MIB // fragment_bytes)[:count]
    scattered = pieces(pool, rows, fragment_bytes)
    plain = pieces(pool, [0], CHUNK_BYTES)
    stream = copy_engine.outbound.stream

    def gathered() -> None:
        copy_engine.to_host(scattered, slot, lambda error: None)
        stream.record().synchronize()

    def copied() -> None:
        stream.to_host(plain, slot)
        stream.record().synchronize()

    one, other = interleaved(gathered, copied)
    host_s = list[float]()
    began = time.perf_counter()
    for _ in range(_AT_ONCE):
        before = time.perf_counter()
        copy_engine.to_host(scattered, slot, lambda error: None)
        host_s.append(time.perf_counter() - before)
    stream.record().synchronize()
    many_s = time.perf_counter() - began
    copy_engine.close()
    host_us = statistics.median(host_s) * 1e6
    return other / one, host_us, _AT_ONCE * CHUNK_BYTES / many_s / 1e9


def interleaved(one: Callable[[], None], other: Callable[[], None]) -> list[float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for function, seen in zip((one, other), times, strict=True):
            began = time.perf_counter()
            function()
            seen.append(time.perf_counter() - began)
    return [statistics.median(seen) for seen in times]


async def overlap() -> float:
    """Time of a forward pass alone, by that of one whose cache is sent meanwhile."""
    spec = KVSpec(
        layers=LAYERS, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16"
    )
    shape = (BLOCKS, 2, 16, 8, 128)
    cache: list[Any] = [
        torch.zeros(shape, dtype=torch.float16, device="cuda") for _ in range(LAYERS)
    ]
    weights = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
    target = PagedCache(spec, [np.zeros(shape, np.float16) for _ in range(LAYERS)])
    alone, sending = list[float](), list[float]()
    async with kvwire.open(name="near") as near, kvwire.open(name="far") as far:
        connection = await near.connect(await far.listen("127.0.0.1:0"))
        for number in range(ROUNDS):
            alone.append(await asyncio.to_thread(_forward, weights, cache, None))
            inc = connection.pull(number, target, range(BLOCKS))
            out = far.publish(number, PagedCache(spec, cache), range(BLOCKS))
            async with out:
                sending.append(await asyncio.to_thread(_forward, weights, cache, out))
            await inc
            await inc.drained()
            await out.drained()
    return statistics.median(alone) / statistics.median(sending)


def _forward(weights: Any, cache: list[Any], out: Any) -> float:
    """Seconds of the device's own clock for all layers."""
    began = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    hidden = weights
    began.record()
    for n, layer in enumerate(cache):
        for _ in range(8):
            hidden = torch.tanh(hidden @ weights)
        layer.fill_(n)
        if out is not None:
            written = torch.cuda.Event()
            written.record()
            out.ready(layers=n, after=written)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


if __name__ == "__main__":
    sys.exit(main())
