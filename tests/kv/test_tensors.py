"""Arrays and torch-like tensors are read in place; others are refused by name."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import DType, KVSpec
from kvwire.kv.tensors import tensor_view
from kvwire.types import Device, MemoryKind
from tests.kv.tensors import torch_like
from tests.support.cases import each


def test_a_tensor_in_place() -> None:
    array = np.zeros((4, 6), np.uint16)[1:, ::2]
    tensor = torch_like(array, "torch.bfloat16")
    view = tensor_view(tensor, "t")
    assert view.address == array.ctypes.data
    assert (view.shape, view.strides) == (array.shape, array.strides)
    assert (view.dtype, view.item_bytes) == ("bfloat16", 2)
    assert view.writable
    assert view.owner is tensor


class CudaArray:
    """Speaks ``__cuda_array_interface__``, as CuPy does."""

    def __init__(self, **changed: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3, 4),
            "typestr": "<f2",
            "data": (0x7000_0000, False),
            "strides": None,
            "version": 3,
        } | changed
        self.device = SimpleNamespace(id=1)


def test_a_cuda_array_in_place() -> None:
    array = CudaArray()
    view = tensor_view(array, "t")
    assert view.device == Device(MemoryKind.CUDA, 1)
    assert (view.address, view.shape, view.strides) == (0x7000_0000, (3, 4), (8, 2))
    assert (view.dtype, view.item_bytes, view.writable) == ("float16", 2, True)
    assert view.owner is array
    strided = tensor_view(CudaArray(strides=(16, 4), data=(64, True)), "t")
    assert (strided.strides, strided.writable) == ((16, 4), False)


def test_bfloat16_of_a_cuda_array_is_bytes() -> None:
    """What torch's own interface says of it, and CuPy's of a view of its bytes."""
    for typestr in ("<V2", "<u2"):
        view = tensor_view(CudaArray(typestr=typestr), "t")
        view.require_dtype("bfloat16", "t")
        with pytest.raises(UsageError, match="but the spec has float16"):
            view.require_dtype("float16", "t")


def test_which_gpu_a_cuda_array_is_on() -> None:
    array = CudaArray()
    array.device = SimpleNamespace()
    with pytest.raises(UsageError, match="t: a CudaArray does not name its GPU"):
        tensor_view(array, "t")
    array.__dlpack_device__ = lambda: (2, 3)  # type: ignore[attr-defined]
    assert tensor_view(array, "t").device == Device(MemoryKind.CUDA, 3)


def test_a_masked_cuda_array_is_refused() -> None:
    with pytest.raises(UsageError, match="t: a masked array"):
        tensor_view(CudaArray(mask=object()), "t")


OTHER_ORDER = "<f4" if sys.byteorder == "big" else ">f4"


# Each looks like elements of the spec's type, and its memory holds something else.
@each(
    "case",
    {
        "byte order": (np.zeros(3, OTHER_ORDER), "float32", "the opposite byte"),
        "raw, byte order": (
            np.zeros(3, OTHER_ORDER.replace("f4", "u2")),
            "bfloat16",
            "order",
        ),
        "mask": (np.ma.array(np.zeros(3, np.float32), mask=True), "float32", "masked"),
        "fields": (np.zeros(3, [("a", "u1"), ("b", "i1")]), "bfloat16", "has fields"),
        "fields, byte order": (
            np.zeros(3, [("a", OTHER_ORDER)]),
            "float32",
            "has fields",
        ),
        "records": (np.rec.array([(1,)], [("a", "<f4")]), "float32", "has fields"),
        "objects": (np.zeros(3, object), "float32", "dtype is object"),
        "GPU, byte order": (CudaArray(typestr=OTHER_ORDER), "float32", "opposite byte"),
        "GPU, fields": (
            CudaArray(typestr="|V2", descr=[("a", "|u1"), ("b", "|i1")]),
            "bfloat16",
            "has fields",
        ),
    },
)
def test_memory_that_is_not_its_values_is_refused(case: tuple[Any, DType, str]) -> None:
    tensor, dtype, said = case
    with pytest.raises(UsageError, match=f"^t: .*{said}"):
        tensor_view(tensor, "t").require_dtype(dtype, "t")


@pytest.mark.parametrize("descr", [None, [("", "|V2")]])
def test_a_plain_description_of_a_cuda_array(descr: Any) -> None:
    view = tensor_view(CudaArray(typestr="|V2", descr=descr), "t")
    view.require_dtype("bfloat16", "t")
    assert view.item_bytes == 2


def test_a_cache_of_the_other_byte_order_is_refused() -> None:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=4, block_tokens=2, dtype="float32")
    tensor = np.zeros((2, 2, 2, 1, 4), OTHER_ORDER)
    with pytest.raises(UsageError, match=r'pass array.astype\("float32"\)'):
        PagedCache(spec, [tensor])


def test_other_memory_is_refused() -> None:
    """R38-like: at start-up, not at the first transfer."""
    tensor = torch_like(np.zeros(3), "torch.float16", device="mps")
    with pytest.raises(UsageError, match=r"tensors\[3\]: device is mps; .* CUDA"):
        tensor_view(tensor, "tensors[3]")


class OnlyDLPack:
    """An array of a library that speaks nothing else."""

    def __init__(
        self, array: Any, device: tuple[int, int] = (1, 0), capsule: object = None
    ) -> None:
        self._array = array
        self._device = device
        self._capsule = capsule
        self.streams: list[int | None] = []

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None
    ) -> Any:
        self.streams.append(stream)
        return self._capsule or self._array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dtype=st.sampled_from(["uint8", "int16", "float16", "float32", "int64", "float64"]),
    step=st.integers(1, 3),
    turned=st.booleans(),
)
def test_what_numpy_exports(
    shape: list[int], dtype: str, step: int, *, turned: bool
) -> None:
    """DLPack is read from the C struct itself; NumPy's exporter is the reference."""
    array = np.zeros(shape, dtype)[::step]
    array = array.T if turned else array
    found, expected = tensor_view(OnlyDLPack(array), "t"), tensor_view(array, "t")
    # NumPy is free to say any step of a dimension that has one element.
    steps = [
        mine if extent > 1 else its
        for extent, mine, its in zip(
            array.shape, found.strides, array.strides, strict=True
        )
    ]
    assert replace(found, owner=None, strides=tuple(steps)) == replace(
        expected, owner=None
    )


def test_dlpack_keeps_the_memory_and_does_not_synchronise() -> None:
    array = np.arange(1000, dtype=np.uint8)
    found = tensor_view(OnlyDLPack(array[10:]), "t")
    del array
    assert list((ctypes.c_uint8 * 3).from_address(found.address)) == [10, 11, 12]
    exporter = OnlyDLPack(np.zeros(3), (2, 1))
    assert tensor_view(exporter, "t").device == Device(MemoryKind.CUDA, 1)
    assert exporter.streams == [-1]


class OldDLPack(OnlyDLPack):
    """One that cannot say whether its memory is immutable."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:  # type: ignore[override]
        return self._array.__dlpack__()


def test_only_memory_that_is_said_to_be_writable_is_written_to() -> None:
    """Libraries with immutable arrays let them share buffers."""
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    assert not tensor_view(OnlyDLPack(read_only), "t").writable
    assert not tensor_view(OldDLPack(np.zeros(3)), "t").writable
    assert tensor_view(OnlyDLPack(np.zeros(3)), "t").writable


def test_what_dlpack_does_not_export_is_refused() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for wrong in (OldDLPack(read_only), OnlyDLPack(None, capsule=object())):
        with pytest.raises(UsageError, match="t: DLPack cannot export this O"):
            tensor_view(wrong, "t")
    with pytest.raises(UsageError, match="t: device is number 8 of DLPack"):
        tensor_view(OnlyDLPack(read_only, (8, 0)), "t")


class Storage:
    """The storage of a tensor, as torch shows it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = lambda: nbytes


@pytest.mark.parametrize(("nbytes", "works"), [(0, False), (47, False), (48, True)])
def test_a_tensor_whose_storage_was_freed_is_refused(nbytes: int, works: bool) -> None:
    """As by engines that sleep: what lies there now is not the tensor's."""
    tensor = torch_like(np.zeros((3, 4)), "torch.float32")
    tensor.shape, tensor.stride = (3, 2), lambda: (4, 1)
    tensor.element_size, tensor.storage_offset = lambda: 4, lambda: 2
    tensor.untyped_storage = lambda: Storage(nbytes)
    if works:
        assert tensor_view(tensor, "t").shape == (3, 2)
        return
    with pytest.raises(UsageError, match=f"needs 48 bytes of its storage, .* {nbytes}"):
        tensor_view(tensor, "t")


def test_one_cache_one_device() -> None:
    host = np.zeros((3, 2, 2, 1, 4), np.float16)
    device = torch_like(np.zeros_like(host), "torch.float16", "cuda")
    one = KVSpec(layers=1, kv_heads=1, head_dim=4, block_tokens=2, dtype="float16")
    with pytest.raises(
        UsageError, match="group 'b': it is in memory of cuda:0, the first"
    ):
        PagedCache.grouped({"a": (one, host), "b": (one, device)})
    cache = PagedCache(one, device)
    assert cache.device == Device(MemoryKind.CUDA, 0)
    assert cache.kind is MemoryKind.CUDA


@pytest.mark.parametrize("other", [[1.0], b"abc", memoryview(b"abc"), None, 7])
def test_what_is_no_tensor_is_refused(other: Any) -> None:
    with pytest.raises(UsageError, match="is neither a NumPy array nor a torch tensor"):
        tensor_view(other, "t")


@pytest.mark.parametrize(
    ("stored", "dtype", "fits"),
    [
        (np.uint16, "bfloat16", True),
        (np.int16, "bfloat16", True),
        (np.dtype("V2"), "bfloat16", True),
        (np.uint8, "float8_e4m3fn", True),
        (np.int8, "float8_e5m2", True),
        (np.float16, "float16", True),
        (np.int8, "int8", True),
        (np.uint8, "bfloat16", False),
        (np.float16, "bfloat16", False),
        (np.uint16, "float8_e4m3fn", False),
        (np.uint16, "float16", False),
        (np.float64, "float32", False),
        (np.uint8, "int8", False),
        (np.dtype("V1"), "int8", False),
    ],
    ids=str,
)
def test_dtypes_that_stand_for_another(stored: Any, dtype: DType, fits: bool) -> None:
    view = tensor_view(np.zeros(3, stored), "t")
    if fits:
        view.require_dtype(dtype, "t")
        return
    with pytest.raises(UsageError, match=f"t: dtype is {view.dtype}, but the spec has"):
        view.require_dtype(dtype, "t")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_tensors_whose_memory_is_not_their_values() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plain = torch.ones((9, 2, 16, 4, 8))
    nested = torch.nested.nested_tensor([plain[0], plain[1]])
    for tensor, said in (
        (torch._neg_view(plain), "pass tensor.resolve_conj"),
        (plain.to_sparse(), "pass tensor.to_dense"),
        (nested, "pass one of tensor.unbind"),
    ):
        with pytest.raises(UsageError, match=f"^t: .*{said}"):
            tensor_view(tensor, "t")
    assert tensor_view(plain, "t").shape == (9, 2, 16, 4, 8)
