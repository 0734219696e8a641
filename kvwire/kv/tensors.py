"""Arrays and tensors as address, shape and strides, without importing their library.

=================================  ========================  =======================
read through                       such as                   in
=================================  ========================  =======================
``__array_interface__``            NumPy                     host memory
``data_ptr``, ``stride``, ...      torch                     host memory, CUDA
``__cuda_array_interface__``       CuPy, Numba, JAX          CUDA
DLPack                             whatever is left          host memory, CUDA
=================================  ========================  =======================

Only address, length and device count; elements are never looked at. An element type
that a library lacks (bfloat16, float8) may come as raw bytes: any integer or void type
of as many bytes stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.dlpack import CUDA, CUDA_HOST, HOST, DLPackLike, read_dlpack
from kvwire.kv.spec import DTYPE_BYTES
from kvwire.types import Device, MemoryKind


@dataclass(frozen=True, slots=True)
class TensorView:
    """Describes where the elements of one tensor lie."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    device: Device | None
    writable: bool
    owner: object

    @property
    def kind(self) -> MemoryKind:
        """Return which memory it is in."""
        return MemoryKind.HOST if self.device is None else self.device.kind

    def require_dtype(self, dtype: str, where: str) -> None:
        """Refuse elements of another type than the spec's."""
        if self.dtype == dtype:
            return
        raw = dtype in _NOT_IN_NUMPY and self.dtype.startswith(_RAW_PREFIXES)
        if not raw or self.item_bytes != DTYPE_BYTES[dtype]:
            raise UsageError(
                f"{where}: dtype is {self.dtype} and the spec says {dtype}; elements "
                "are moved as they are, never converted"
            )


def tensor_view(tensor: object, where: str) -> TensorView:
    """Read where an array or tensor lies."""
    if isinstance(tensor, np.ndarray):
        return _view_of_array(tensor)
    if isinstance(tensor, _TorchLike):
        return _view_of_torch(tensor, where)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _view_of_cuda_array(tensor, where)
    if isinstance(tensor, DLPackLike):
        return _view_of_dlpack(tensor, where)
    raise UsageError(
        f"{where}: a {type(tensor).__name__} is neither a NumPy array nor a torch "
        "tensor, nor does it speak __cuda_array_interface__ or DLPack"
    )


# What a cache of bytes that NumPy has no name for is usually allocated as.
_NOT_IN_NUMPY: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
_RAW_PREFIXES: Final = ("uint", "int", "void")
_DEVICE_KINDS: Final = {
    "cuda": MemoryKind.CUDA,
    "simulated": MemoryKind.SIMULATED,
}


class _TorchDevice(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


@runtime_checkable
class _TorchLike(Protocol):
    """Names what is used of a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> _TorchDevice: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...
    def element_size(self) -> int: ...


def _view_of_array(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
) -> TensorView:
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


def _view_of_torch(tensor: _TorchLike, where: str) -> TensorView:
    # By its pointer and never by its array interface: that of torch has no float8, and
    # refuses tensors that ask for a gradient.
    item_bytes = tensor.element_size()
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


def _torch_device(device: _TorchDevice, where: str) -> Device | None:
    if device.type == "cpu":
        return None
    kind = _DEVICE_KINDS.get(device.type)
    if kind is None:
        raise _unknown(where, device.type)
    return Device(kind, device.index or 0)


def _view_of_cuda_array(array: Any, where: str) -> TensorView:
    described: Mapping[str, Any] = array.__cuda_array_interface__
    if described.get("mask") is not None:
        raise UsageError(f"{where}: a masked array; only plain memory can be moved")
    dtype = np.dtype(described["typestr"])
    address, read_only = described["data"]
    shape = tuple(int(n) for n in described["shape"])
    strides = described.get("strides")
    if strides is None:
        # The interface says so of arrays that are contiguous in C order.
        strides = [dtype.itemsize] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
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
    """Return the GPU of an array, which its CUDA interface does not name."""
    index = getattr(getattr(array, "device", None), "id", None)  # CuPy
    if isinstance(index, int):
        return index
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    raise UsageError(
        f"{where}: a {type(array).__name__} does not say which GPU it is on (neither "
        "by .device.id nor by __dlpack_device__); wrap it with cupy.asarray"
    )


def _view_of_dlpack(array: DLPackLike, where: str) -> TensorView:
    found = read_dlpack(array, where)
    kind, index = found.device
    if kind not in (HOST, CUDA, CUDA_HOST):
        raise _unknown(where, f"number {kind} of DLPack")
    return TensorView(
        address=found.address,
        shape=found.shape,
        strides=found.strides,
        dtype=found.dtype,
        item_bytes=found.item_bytes,
        device=Device(MemoryKind.CUDA, index) if kind == CUDA else None,
        writable=True,
        owner=found.owner,
    )


def _unknown(where: str, device: str) -> UsageError:
    return UsageError(
        f"{where}: device is {device}; kvwire moves host memory and that of CUDA "
        "devices, so pass a tensor on one of these"
    )
