"""Arrays and torch-like tensors are read in place; others are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from kvwire.kv.tensors import tensor_view
from kvwire.types import MemoryKind
from tests.kv.tensors import FakeTensor


def test_an_array_in_place() -> None:
    array = np.zeros((4, 6), np.float32)[1:, ::2]
    view = tensor_view(array, "t")
    assert view.address == array.ctypes.data
    assert (view.shape, view.strides) == ((3, 3), (24, 8))
    assert (view.dtype, view.item_bytes) == ("float32", 4)
    assert view.kind is MemoryKind.HOST
    assert view.writable
    assert view.owner is array


def test_a_read_only_array() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not tensor_view(array, "t").writable


def test_a_tensor_in_place() -> None:
    array = np.zeros((4, 6), np.uint16)[1:, ::2]
    tensor = FakeTensor(array, "torch.bfloat16")
    view = tensor_view(tensor, "t")
    assert view.address == array.ctypes.data
    assert (view.shape, view.strides) == (array.shape, array.strides)
    assert (view.dtype, view.item_bytes) == ("bfloat16", 2)
    assert view.writable
    assert view.owner is tensor


def test_other_memory_is_refused() -> None:
    """R38-like: at start-up, not at the first transfer."""
    tensor = FakeTensor(np.zeros(3), "torch.float16", device="cuda")
    with pytest.raises(UsageError, match=r"tensors\[3\]: device is cuda; .* CPU"):
        tensor_view(tensor, "tensors[3]")

    class CudaArray:
        __cuda_array_interface__: dict[str, object] = {}  # noqa: RUF012

    with pytest.raises(UsageError, match="t: device is CUDA"):
        tensor_view(CudaArray(), "t")


@pytest.mark.parametrize("other", [[1.0], b"abc", memoryview(b"abc"), None, 7])
def test_what_is_no_tensor_is_refused(other: Any) -> None:
    with pytest.raises(UsageError, match="is neither a NumPy array nor a torch tensor"):
        tensor_view(other, "t")


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (np.uint16, "bfloat16"),
        (np.int16, "bfloat16"),
        (np.dtype("V2"), "bfloat16"),
        (np.uint8, "float8_e4m3fn"),
        (np.int8, "float8_e5m2"),
        (np.float16, "float16"),
        (np.int8, "int8"),
    ],
    ids=str,
)
def test_dtypes_that_stand_for_another(stored: Any, dtype: str) -> None:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=3, block_tokens=1, dtype=dtype)
    array = np.zeros((2, 2, 1, 1, 3), stored)
    (group,) = PagedCache(spec, array).groups.values()
    assert group.bases[0, 0] == array.ctypes.data


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (np.uint8, "bfloat16"),
        (np.float16, "bfloat16"),
        (np.uint16, "float8_e4m3fn"),
        (np.uint16, "float16"),
        (np.float64, "float32"),
        (np.uint8, "int8"),
        (np.dtype("V1"), "int8"),
    ],
    ids=str,
)
def test_dtypes_that_do_not(stored: Any, dtype: str) -> None:
    view = tensor_view(np.zeros(3, stored), "t")
    with pytest.raises(UsageError, match=f"t: dtype is {view.dtype} and the spec says"):
        view.require_dtype(dtype, "t")
