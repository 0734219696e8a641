"""Whatever holds bytes becomes a payload without a copy, or is refused with why."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments
from kvwire.memory.buffers import as_payload, slice_payload, uncleared
from kvwire.memory.copy import as_fragments
from tests.support.cases import each


def view_of(buffer: Any, *, writable: bool = True) -> memoryview:
    payload = as_payload(buffer, writable=writable)
    assert isinstance(payload, memoryview)
    return payload


class Pair(ctypes.Structure):
    # The names hold letters that mean pointers as formats.
    _fields_ = (("P", ctypes.c_int32), ("OX", ctypes.c_int32))


class Node(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int32), ("next", ctypes.c_void_p))


@each(
    "buffer",
    {
        "bytearray": (bytearray(24), 24),
        "view": (memoryview(bytearray(24)), 24),
        "typed view": (memoryview(bytearray(24)).cast("d"), 24),
        "2-D view": (memoryview(bytearray(24)).cast("H", (3, 4)), 24),
        "array.array": (array.array("q", [1, 2, 3]), 24),
        "float32": (np.zeros((2, 3), np.float32), 24),
        "0-D": (np.zeros((), np.float64), 8),
        "big endian": (np.zeros(3, ">u8"), 24),
        "half": (np.zeros((3, 4), np.float16), 24),
        "time": (np.zeros(3, "datetime64[s]"), 24),
        "records": (np.zeros(3, [("a", "u4"), ("b", "f4")]), 24),
        "ctypes array": ((ctypes.c_int64 * 3)(), 24),
        "ctypes chars": ((ctypes.c_char * 24)(), 24),
        "ctypes structures": ((Pair * 3)(), 24),
        "complex": (np.zeros(3, np.complex64), 24),
    },
)
def test_writable_memory(buffer: tuple[Any, int]) -> None:
    memory, nbytes = buffer
    view = view_of(memory)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, nbytes)
    view[0], view[-1] = 0xA5, 0x5A
    there = bytes(memoryview(memory)) if not isinstance(memory, np.ndarray) else None
    assert (there or memory.tobytes())[:: nbytes - 1] == b"\xa5\x5a"


@each(
    "buffer",
    {
        "bytes": b"",
        "bytearray": bytearray(),
        "array": np.zeros((4, 0, 2), np.float32),
        "view": memoryview(np.zeros((0, 3), np.int16)),  # type: ignore[arg-type]
    },
)
def test_no_bytes(buffer: Any) -> None:
    view = view_of(buffer, writable=False)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, 0)


def test_memory_map() -> None:
    with mmap.mmap(-1, 4096) as memory:
        view = view_of(memory)
        view[7] = 9
        assert memory[7] == 9
        view.release()


def test_read_only_memory_is_good_for_sending_only() -> None:
    frozen = np.arange(4, dtype=np.uint16)
    frozen.flags.writeable = False
    fragments = as_fragments(memoryview(b"abc"))
    assert view_of(b"abc", writable=False).readonly
    assert view_of(frozen, writable=False).nbytes == 8
    assert as_payload(fragments, writable=False) is fragments
    with pytest.raises(UsageError, match="into: bytes is read-only; pass a bytearray"):
        as_payload(b"abc", writable=True, what="into")
    with pytest.raises(UsageError, match="into: ndarray is read-only"):
        as_payload(frozen, writable=True, what="into")
    with pytest.raises(UsageError, match="fragments is read-only"):
        as_payload(fragments, writable=True)


@each(
    "buffer",
    {
        "array": np.zeros((4, 4))[:, ::2],
        "transposed": np.zeros((4, 3)).T,
        "view": memoryview(bytearray(10))[::2],
    },
)
def test_strided_memory_is_refused(buffer: Any) -> None:
    with pytest.raises(UsageError, match=r"not C-contiguous.*strides"):
        as_payload(buffer, writable=False)


@each(
    "buffer",
    {
        "objects": np.array([None, 1], object),
        "records": np.zeros(2, [("a", "O"), ("b", "u4")]),
        "view": memoryview(np.array([None, 1], object)),  # type: ignore[arg-type]
        "ctypes objects": (ctypes.py_object * 2)(),
        "ctypes strings": (ctypes.c_char_p * 2)(),
        "ctypes structure": Node(),
    },
)
def test_pointers_are_refused(buffer: Any) -> None:
    with pytest.raises(UsageError, match="holds pointers"):
        as_payload(buffer, writable=True)


def test_a_masked_array_is_refused() -> None:
    """Half of it is its mask, which lies elsewhere."""
    masked = np.ma.array([1, 2], mask=[False, True])
    with pytest.raises(UsageError, match="MaskedArray is not memory that kvwire can"):
        as_payload(masked, writable=False)


def test_payload_keeps_the_memory_alive() -> None:
    memory = np.arange(8, dtype=np.float32)
    alive = weakref.ref(memory)
    view = view_of(memory)
    del memory
    gc.collect()
    assert alive() is not None
    assert view.nbytes == 32


def test_slice_of_a_view_and_of_fragments() -> None:
    view = memoryview(b"0123456789")
    part = slice_payload(view, 3, 4)
    assert isinstance(part, memoryview)
    assert part.tobytes() == b"3456"
    piece = slice_payload(as_fragments(view), 3, 4)
    assert isinstance(piece, Fragments)
    assert ctypes.string_at(int(piece.addresses[0]), piece.nbytes) == b"3456"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensor() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.zeros((2, 3), dtype=torch.bfloat16)
    view = view_of(tensor)
    view[:] = bytes(range(12))
    assert tensor.view(torch.uint8).flatten().tolist() == list(range(12))
    with pytest.raises(UsageError, match=r"pass tensor\.contiguous"):
        as_payload(tensor.T, writable=False)
    with pytest.raises(UsageError, match="tensor is on meta"):
        as_payload(torch.zeros(2, device="meta"), writable=False)
    ones = torch.ones(2)
    for made, advice in (
        (ones.to_sparse(), "pass tensor.to_dense"),
        (torch.nested.nested_tensor([ones, ones]), "pass one of tensor.unbind"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "pass tensor.resolve_conj"),
        (ones.expand(3, 2), "pass tensor.contiguous"),
    ):
        with pytest.raises(UsageError, match=advice):
            as_payload(made, writable=False)


class OnGpu:
    """An array that says where it lies on a GPU, as CuPy's and Numba's do."""

    def __init__(self, shape: tuple[int, ...], **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            **more,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


def test_an_array_on_a_gpu() -> None:
    """Its address is not looked at; what cannot be one piece is refused."""
    payload = as_payload(OnGpu((2, 3), strides=(12, 4)), writable=True)
    assert isinstance(payload, Fragments)
    assert str(payload.device) == "cuda:1"
    assert (payload.addresses.tolist(), payload.nbytes) == ([4096], 24)
    alone = as_payload(OnGpu((1, 5), strides=(99, 4)), writable=False)
    assert alone.nbytes == 20
    for writable in (False, True):
        empty = as_payload(OnGpu((3, 0)), writable=writable)
        assert isinstance(empty, memoryview)
        assert (empty.nbytes, empty.readonly) == (0, False)
    frozen = OnGpu((2,), data=(4096, True))
    assert as_payload(frozen, writable=False).nbytes == 8
    with pytest.raises(UsageError, match="into: OnGpu is read-only"):
        as_payload(frozen, writable=True, what="into")
    with pytest.raises(UsageError, match=r"not C-contiguous \(shape \(2, 3\)"):
        as_payload(OnGpu((2, 3), strides=(4, 8)), writable=False)
    with pytest.raises(UsageError, match="masked array"):
        as_payload(OnGpu((2,), mask=object()), writable=False)


@pytest.mark.parametrize("nbytes", [0, 1, 100_000])
def test_a_bytearray_that_was_not_cleared_is_one(nbytes: int) -> None:
    """It grows, shrinks and can be written to, as any other one."""
    made = uncleared(nbytes)
    assert type(made) is bytearray
    made[:] = bytes(range(256)) * (nbytes // 256 + 1)
    del made[nbytes:]
    made += b"more"
    assert made == (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes] + b"more"


def test_a_bytearray_beyond_the_address_space() -> None:
    with pytest.raises(MemoryError):
        uncleared(2**62)
