"""Address, shape and strides of arrays and tensors, without importing their library.

=================================  ========================  =======================
read through                       such as                   in
=================================  ========================  =======================
``__array_interface__``            NumPy                     host memory
``data_ptr``, ``stride``, ...      torch                     host memory, CUDA
``__cuda_array_interface__``       CuPy, Numba, JAX          CUDA
DLPack                             any other library         host memory, CUDA
=================================  ========================  =======================

The elements themselves are never read. If a library lacks an element type (bfloat16,
float8), the array may have any integer or void type of the same size instead.

A producer's ``__dlpack__`` returns a capsule around a C struct (``DLManagedTensor``,
https://dmlc.github.io/dlpack/latest/c_api.html) with the address. The capsule is kept
as the memory's owner and not consumed: when it is garbage-collected, the producer frees
the struct and releases the memory.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.spec import DTYPE_BYTES
from kvwire.types import Device, MemoryKind


@dataclass(frozen=True, slots=True)
class TensorView:
    """The address, shape, strides and element type of one tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    device: Device | None
    writable: bool
    owner: object

    def require_dtype(self, dtype: str, where: str) -> None:
        """Refuse elements whose type is not the spec's.

        Raises:
            UsageError: The types differ, and the elements are not raw bytes of the same
                size.
        """
        if self.dtype == dtype:
            return
        raw = dtype in _NOT_IN_NUMPY and self.dtype.startswith(_RAW_PREFIXES)
        if not raw or self.item_bytes != DTYPE_BYTES[dtype]:
            raise UsageError(
                f"{where}: dtype is {self.dtype}, but the spec has {dtype}; kvwire "
                "never converts elements"
            )


def tensor_view(tensor: object, where: str) -> TensorView:
    """Return the location of an array's or tensor's elements, views included.

    Raises:
        UsageError: Its type, device or byte order is not supported.
    """
    if isinstance(tensor, TensorView):
        return tensor
    if isinstance(tensor, np.ndarray):
        return _view_of_array(tensor, where)
    if hasattr(tensor, "data_ptr"):
        return _view_of_torch(tensor, where)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _view_of_cuda_array(tensor, where)
    if hasattr(tensor, "__dlpack__"):
        return _view_of_dlpack(tensor, where)
    raise UsageError(
        f"{where}: a {type(tensor).__name__} is neither a NumPy array nor a torch "
        "tensor, and supports neither __cuda_array_interface__ nor DLPack"
    )


# Caches of a type that NumPy lacks are usually allocated with one of the raw types.
_NOT_IN_NUMPY: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
_RAW_PREFIXES: Final = ("uint", "int", "void")
_DEVICE_KINDS: Final = {
    "cuda": MemoryKind.CUDA,
    "simulated": MemoryKind.SIMULATED,
}
# DLPack's numbers for the kinds of devices.
_HOST: Final = 1
_CUDA: Final = 2
# CUDA's pinned and managed memory, which the host may access.
_CUDA_HOST: Final = 3
# The caller orders streams (see docs/topics/gpu.md): -1 asks the producer not to
# synchronise.
_NO_SYNC: Final = -1
# The most dimensions of a struct that counts as a tensor; no KV cache has more.
_NDIM_MAX: Final = 32
_KINDS: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
# DLPack's numbers for 8-bit floats, from later versions of the standard.
_FLOAT8: Final = {10: "float8_e4m3fn", 12: "float8_e5m2"}


def check_array(array: np.ndarray[Any, Any], where: str) -> None:
    """Refuse an array whose memory is not simply an array of native numbers.

    Raises:
        UsageError: It is masked, has fields, or has the other byte order.
    """
    refuse_masked(array, where)
    _check_elements(array.dtype, where)


def refuse_masked(values: object, where: str) -> None:
    """Refuse a masked array, because a read of its memory would ignore the mask.

    Raises:
        UsageError: It has a mask.
    """
    if type(values) is np.ndarray or not isinstance(values, np.ndarray):
        return  # np.ma is not loaded, and need not be
    if isinstance(values, np.ma.MaskedArray):
        raise _masked(where)


def _check_elements(dtype: np.dtype[Any], where: str) -> None:
    if dtype.fields is not None:
        raise UsageError(
            f"{where}: dtype is {dtype}, which has fields; each element must be one "
            "number"
        )
    if not dtype.isnative:
        raise UsageError(
            f"{where}: dtype {dtype.str} has the opposite byte order of this machine, "
            f'and kvwire never converts elements; pass array.astype("{dtype.name}")'
        )


def _masked(where: str) -> UsageError:
    return UsageError(
        f"{where}: a masked array keeps its mask in another array; pass a plain "
        "array, such as array.filled() or array.compressed()"
    )


def _view_of_array(array: np.ndarray[Any, Any], where: str) -> TensorView:
    check_array(array, where)
    return TensorView(
        address=array.__array_interface__["data"][0],
        shape=array.shape,
        strides=array.strides,
        dtype=array.dtype.name,
        item_bytes=array.itemsize,
        device=None,
        writable=array.flags.writeable,
        owner=array,
    )


def check_values(torch: Any, tensor: Any, where: str) -> None:
    """Refuse a torch tensor whose memory does not hold its values.

    Raises:
        UsageError: It is nested or sparse, or a view that changes their signs.
    """
    if tensor.is_nested:
        raise UsageError(f"{where}: the tensor is nested; pass one of tensor.unbind()")
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{where}: the tensor's layout is {tensor.layout}; pass tensor.to_dense()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            f"{where}: the tensor is a view whose values are not those in memory; pass "
            f"tensor.resolve_conj().resolve_neg()"
        )


def _view_of_torch(tensor: Any, where: str) -> TensorView:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        check_values(torch, tensor, where)
    # The pointer is used, not the array interface, because torch's interface lacks
    # float8 and refuses tensors that require a gradient.
    item_bytes = tensor.element_size()
    _check_storage(tensor, item_bytes, where)
    return TensorView(
        address=tensor.data_ptr(),
        shape=tuple(int(n) for n in tensor.shape),
        strides=tuple(int(n) * item_bytes for n in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=item_bytes,
        device=_torch_device(tensor.device, where),
        writable=True,
        owner=tensor,
    )


def _check_storage(tensor: Any, item_bytes: int, where: str) -> None:
    """Refuse a tensor whose storage was freed or made smaller.

    Engines that sleep or offload do that. Such a tensor keeps its shape, and memory
    behind the end of its storage belongs to something else.
    """
    storage = getattr(tensor, "untyped_storage", None)
    if storage is None or not all(tensor.shape):
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
    nbytes = storage().nbytes()
    needed = (last + 1) * item_bytes
    if needed > nbytes:
        raise UsageError(
            f"{where}: this tensor needs {needed} bytes of its storage, which has "
            f"{nbytes}: it was freed or resized; wake the engine up, or allocate the "
            "cache again"
        )


def _torch_device(device: Any, where: str) -> Device | None:
    if device.type == "cpu":
        return None
    kind = _DEVICE_KINDS.get(device.type)
    if kind is None:
        raise _unknown(where, device.type)
    return Device(kind, device.index or 0)


def _view_of_cuda_array(array: Any, where: str) -> TensorView:
    described: Mapping[str, Any] = array.__cuda_array_interface__
    if described.get("mask") is not None:
        raise _masked(where)
    dtype = np.dtype(described["typestr"])
    fields = described.get("descr") or [("", dtype.str)]
    _check_elements(dtype if len(fields) == 1 else np.dtype(fields), where)
    address, read_only = described["data"]
    shape = tuple(int(n) for n in described["shape"])
    strides = described.get("strides")
    if strides is None:
        strides = _compact(shape, dtype.itemsize)
    return TensorView(
        address=int(address),
        shape=shape,
        strides=tuple(int(n) for n in strides),
        dtype=dtype.name,
        item_bytes=dtype.itemsize,
        device=Device(MemoryKind.CUDA, _cuda_index(array, where)),
        writable=not read_only,
        owner=array,
    )


def _cuda_index(array: Any, where: str) -> int:
    """Return the index of an array's GPU, which its CUDA interface does not contain."""
    index = getattr(getattr(array, "device", None), "id", None)  # CuPy
    if isinstance(index, int):
        return index
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    raise UsageError(
        f"{where}: a {type(array).__name__} does not name its GPU (it has neither "
        ".device.id nor __dlpack_device__); wrap it with cupy.asarray"
    )


def _view_of_dlpack(array: Any, where: str) -> TensorView:
    kind, index = map(int, array.__dlpack_device__())
    if kind not in (_HOST, _CUDA, _CUDA_HOST):
        raise _unknown(where, f"number {kind} of DLPack")
    stream = _NO_SYNC if kind == _CUDA else None
    # Before version 1.0 an exporter could not say that its memory is immutable, and
    # some libraries share one buffer between such arrays. So only memory that is said
    # to be writable is written to.
    writable = False
    try:
        try:
            capsule = array.__dlpack__(stream=stream, max_version=_DLPACK_VERSION)
        except TypeError:  # an exporter of an earlier version
            capsule = array.__dlpack__(stream=stream)
        if _is_valid(capsule, _VERSIONED):
            managed = _get_pointer(capsule, _VERSIONED)
            versioned = _Versioned.from_address(managed)
            if versioned.major != _DLPACK_VERSION[0]:
                raise BufferError(f"it has version {versioned.major} of DLPack")
            writable = not versioned.flags & _READ_ONLY
            pointer = managed + ctypes.sizeof(_Versioned)
        else:
            pointer = _get_pointer(capsule, b"dltensor")
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        raise UsageError(
            f"{where}: DLPack cannot export this {type(array).__name__}: {exc}"
        ) from None
    tensor = _Tensor.from_address(pointer)
    if not 0 <= tensor.ndim <= _NDIM_MAX or tensor.lanes != 1 or tensor.bits % 8:
        raise UsageError(
            f"{where}: DLPack describes {tensor.ndim} dimensions of {tensor.lanes} x "
            f"{tensor.bits} bits; each element must be one number of whole bytes"
        )
    item_bytes = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = _compact(shape, item_bytes)
    if tensor.strides:
        strides = tuple(n * item_bytes for n in tensor.strides[: tensor.ndim])
    return TensorView(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=_dtype(tensor.code, tensor.bits),
        item_bytes=item_bytes,
        device=Device(MemoryKind.CUDA, index) if kind == _CUDA else None,
        writable=writable,
        owner=(array, capsule),
    )


_DLPACK_VERSION: Final = (1, 0)
_VERSIONED: Final = b"dltensor_versioned"
_READ_ONLY: Final = 1


class _Versioned(ctypes.Structure):
    """The members of the C struct ``DLManagedTensorVersioned`` before the tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )

    major: int
    flags: int


class _Tensor(ctypes.Structure):
    """The C struct ``DLTensor``, the first member of ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    data: int | None
    ndim: int
    code: int
    bits: int
    lanes: int
    shape: list[int]
    strides: list[int]
    byte_offset: int


# Separate prototypes, because `ctypes.pythonapi` is shared by the whole process.
_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer: Final = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _compact(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the strides of an array that is contiguous in C order."""
    inside = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return tuple(count * item_bytes for count in inside)


def _dtype(code: int, bits: int) -> str:
    if code in _FLOAT8 and bits == 8:
        return _FLOAT8[code]
    return f"{_KINDS.get(code, f'dlpack{code}_')}{bits}"


def _unknown(where: str, device: str) -> UsageError:
    return UsageError(
        f"{where}: device is {device}; pass a tensor in host memory or on a CUDA device"
    )
