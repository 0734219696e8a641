"""The spec of a cache from its tensors alone; what has two readings is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.kv.layout import AxisOrder, Layout
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from tests.kv.tensors import torch_like

PLAIN: Any = "block kv token head dim"
SPEC = KVSpec(layers=3, kv_heads=4, head_dim=8, block_tokens=16, dtype="float16")


def layers(*shape: int, dtype: Any = np.float16) -> list[Any]:
    return [np.zeros(shape, dtype) for _ in range(SPEC.layers)]


@pytest.mark.parametrize(
    ("tensors", "layout", "order"),
    [
        (layers(9, 2, 16, 4, 8), "NHD", "block kv token head dim"),
        (layers(2, 9, 16, 4, 8), "NHD", "kv block token head dim"),
        (layers(9, 2, 4, 16, 8), "HND", "block kv head token dim"),
        (layers(9, 4, 16, 16), "block head token (kv dim)", "block head token kv dim"),
        (
            list(zip(layers(9, 16, 4, 8), layers(9, 16, 4, 8), strict=True)),
            "NHD",
            "block token head dim",
        ),
        (
            {f"model.layers.{n}": t for n, t in enumerate(layers(9, 2, 16, 4, 8))},
            "NHD",
            "block kv token head dim",
        ),
        (
            np.zeros((9, 3, 2, 16, 4, 8), np.float16),
            "block layer kv token head dim",
            "block layer kv token head dim",
        ),
    ],
    ids=["NHD", "kv first", "HND", "folded", "pairs", "mapping", "one tensor"],
)
def test_the_shape_gives_the_spec(tensors: Any, layout: Layout, order: str) -> None:
    cache = PagedCache.of(tensors, layout)
    assert cache.spec == SPEC
    assert cache.num_blocks == 9
    found = [axis for axis in cache.groups["kv"].order if axis in order.split()]
    assert found == order.split()


def test_a_latent_has_no_heads() -> None:
    cache = PagedCache.of(layers(9, 16, 8))
    assert (cache.spec.components, cache.spec.kv_heads) == (1, 1)
    assert (cache.spec.block_tokens, cache.spec.head_dim) == (16, 8)


def test_the_rest_is_said() -> None:
    """A fingerprint, a stage, and the type of elements in raw memory."""
    raw = [torch_like(t, "torch.uint16") for t in layers(9, 2, 16, 4, 8)]
    with pytest.raises(
        UsageError, match="pass the type that they represent, such as dtype="
    ):
        PagedCache.of(raw)
    cache = PagedCache.of(raw, dtype="bfloat16", fingerprint="m", first_layer=3)
    assert (cache.spec.dtype, cache.spec.layer_indices) == ("bfloat16", range(3, 6))


@pytest.mark.parametrize(
    ("tensors", "options", "error"),
    [
        (layers(2, 2, 16, 4, 8), {}, "is ambiguous"),
        (layers(9, 3, 16, 4, 8), {}, "fits no known layout; name its axes"),
        (layers(9, 16, 4, 8), {}, "name its axes"),
        ([], {}, "pass at least one tensor"),
        ([()], {}, "the first layer has no tensor"),
        (layers(9, 2, 16, 4, 8), {"layout": ["NHD"]}, "layout: pass a text"),
        (np.zeros((9, 2, 16, 4, 8), np.float16), {}, "one tensor of all layers"),
        (
            np.zeros((9, 2, 16, 4, 8)),
            {"layout": PLAIN},
            "no axis",
        ),
        (
            layers(9, 2, 16, 32),
            {"layout": AxisOrder("block kv token (head dim)")},
            "head and dim",
        ),
        (
            layers(9, 2, 16, 4),
            {"layout": PLAIN},
            "has 4 dimensions",
        ),
        (
            layers(9, 2, 16, 4, 8),
            {"block_tokens": 16},
            "only for a cache of the transformers",
        ),
        (
            layers(9, 2, 16, 4, 8, dtype=np.float64),
            {},
            "the elements have type float64",
        ),
        (
            [*layers(9, 2, 16, 4, 8)[:2], np.zeros((9, 2, 8, 4, 8), np.float16)],
            {},
            "should be",
        ),
        (7, {}, "neither a NumPy array nor a torch tensor"),
    ],
)
def test_what_cannot_be_known_is_refused(
    tensors: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(UsageError, match=error):
        PagedCache.of(tensors, **options)
