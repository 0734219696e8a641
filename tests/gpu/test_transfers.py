"""On a GPU: KV transfers over TCP for every layout and element type, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import AxisOrder
from kvwire.kv.spec import DTYPE_BYTES, DType
from kvwire.limits import KIB
from tests.gpu.devices import LIBRARIES, Gpu
from tests.support.pairs import connected

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS = 3, 40
LAYOUTS = {
    "NHD": (BLOCKS, 2, 16, 4, 32),
    "HND": (BLOCKS, 2, 4, 16, 32),
    "kv block token head dim": (2, BLOCKS, 16, 4, 32),
}
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
SOURCE = [7, 3, 39, 20, 21, 22, 0, 11, 30, 31, 5, 1]
TARGET = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@pytest.fixture(params=LIBRARIES)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(request.param)


def contents(layout: str, dtype: str, seed: int) -> list[npt.NDArray[Any]]:
    """The values of each layer, as words of the element's size."""
    size = DTYPE_BYTES[dtype]
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 2 ** (8 * size), LAYOUTS[layout], _WORDS[size])
        for _ in range(LAYERS)
    ]


def device_dtype(gpu: Gpu, dtype: str) -> str:
    """CuPy has no bfloat16 and no float8: there the cache is of plain words."""
    return dtype if gpu.library == "torch" else ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device_side", ["producer", "consumer", "both"])
async def test_every_bit_arrives(
    gpu: Gpu, layout: str, dtype: DType, device_side: str
) -> None:
    spec = KVSpec(layers=LAYERS, kv_heads=4, head_dim=32, block_tokens=16, dtype=dtype)
    named = dtype if dtype not in ("float16", "float32") else ""
    host = contents(layout, dtype, 1)
    empty = [np.zeros_like(v) for v in host]
    source: list[Any] = [v.view(dtype) if not named else v for v in host]
    target: list[Any] = [v.view(dtype) if not named else v for v in empty]
    if device_side != "consumer":
        source = [gpu.array(v, device_dtype(gpu, dtype)) for v in source]
    if device_side != "producer":
        target = [gpu.array(v, device_dtype(gpu, dtype)) for v in target]
    async with connected("tcp", chunk_bytes=64 * KIB) as pair:
        inc = pair.right.pull("t", PagedCache(spec, target, AxisOrder(layout)), TARGET)
        cache = PagedCache(spec, source, AxisOrder(layout))
        async with pair.near.publish("t", cache, SOURCE) as out:
            for layer in range(LAYERS):
                out.ready(layers=layer, after=gpu.event())
        assert (await inc).complete
        await inc.drained()
        await out.drained()
    for before, after, zeros in zip(host, target, empty, strict=True):
        got = zeros if device_side == "producer" else gpu.values(after, zeros)
        if layout.startswith("kv"):
            assert np.array_equal(got[:, TARGET], before[:, SOURCE])
        else:
            assert np.array_equal(got[TARGET], before[SOURCE])


async def test_a_layer_that_is_still_computed_is_waited_for(gpu: Gpu) -> None:
    """The event is recorded long before it fires; nobody calls synchronize."""
    spec = KVSpec(layers=1, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
    late, zeros = contents("NHD", "float16", 2)[0], np.zeros(LAYOUTS["NHD"], np.uint16)
    source = gpu.array(zeros.view(np.float16))
    computed = gpu.array(late.view(np.float16))
    target = np.zeros(LAYOUTS["NHD"], np.float16)
    async with connected("tcp", chunk_bytes=64 * KIB) as pair:
        inc = pair.right.pull("t", PagedCache(spec, [target]), TARGET)
        async with pair.near.publish("t", PagedCache(spec, [source]), SOURCE) as out:
            gpu.spin(0.2)
            source[:] = computed
            out.ready(after=gpu.event())
            assert not inc.layer_landed(0)
        assert (await inc).complete
        await inc.drained()
        await out.drained()
    assert np.array_equal(target.view(np.uint16)[TARGET], late[SOURCE])


async def test_a_consumer_s_stream_sees_what_has_landed(gpu: Gpu) -> None:
    spec = KVSpec(layers=1, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
    source = contents("NHD", "float16", 3)[0]
    zeros = np.zeros(LAYOUTS["NHD"], np.uint16)
    target = gpu.array(zeros.view(np.float16))
    async with connected("tcp", chunk_bytes=64 * KIB) as pair:
        inc = pair.right.pull("t", PagedCache(spec, [target]), TARGET)
        cache = PagedCache(spec, [source.view(np.float16)])
        async with pair.near.publish("t", cache, SOURCE) as out:
            out.ready()
        await inc.layer(0)
        stream = gpu.ops.stream()
        stream.wait(inc.layer_event(0))
        stream.record().synchronize()
        assert np.array_equal(gpu.values(target, zeros)[TARGET], source[SOURCE])
        assert (await inc).complete
        await inc.drained()
        await out.drained()
        stream.close()
