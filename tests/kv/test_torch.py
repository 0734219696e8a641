"""Real torch tensors; a fake covers the same code where torch is not installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire.errors import UsageError
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec

torch = pytest.importorskip(
    "torch", reason="torch is not installed; tests/kv/test_tensors.py has a stand-in"
)

SPEC = KVSpec(layers=3, kv_heads=4, head_dim=8, block_tokens=2)


def test_bfloat16_views_of_one_tensor() -> None:
    big = torch.zeros((9, 3, 2, 2, 4, 8), dtype=torch.bfloat16)
    group = PagedCache(SPEC, [big[:, layer] for layer in range(3)]).groups["kv"]
    assert group.bases[0, 0] == big.data_ptr()
    assert group.order == ("block", "layer", "kv", "token", "head", "dim")
    assert group.writable


def test_float8_as_it_is_and_as_bytes() -> None:
    spec = replace(SPEC, layers=1, dtype="float8_e4m3fn")
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        tensor = torch.zeros((9, 2, 2, 4, 8), dtype=dtype)
        assert PagedCache(spec, [tensor]).groups["kv"].bases[0, 0] == tensor.data_ptr()


def test_wrong_tensors_are_named() -> None:
    big = torch.zeros((9, 3, 2, 2, 4, 8), dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="dtype is float16 and the spec says bfloat16"):
        PagedCache(SPEC, big.to(torch.float16))
    with pytest.raises(UsageError, match="device is meta"):
        PagedCache(SPEC, big.to("meta"))
    with pytest.raises(UsageError, match="axis 'block' has stride 0"):
        PagedCache(SPEC, big[:1].expand(9, -1, -1, -1, -1, -1))
