"""Arrays and tensors as address, shape and strides, without importing their library.

NumPy arrays are read through ``__array_interface__``; tensors through ``data_ptr``,
``stride`` and ``element_size``, which is what torch offers. An element type that NumPy
lacks (bfloat16, float8) may also come as raw bytes: any integer or void type of as many
bytes stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.spec import DTYPE_BYTES
from kvwire.types import MemoryKind


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where the elements of one tensor lie.

    Attributes:
        address: Of the first element.
        shape: Elements along each dimension.
        strides: Bytes from one element to the next along each dimension.
        dtype: The element type's name, as its library prints it.
        item_bytes: Bytes of one element.
        kind: Which memory it is in.
        writable: Whether it may be written to.
        owner: The tensor, which keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    kind: MemoryKind
    writable: bool
    owner: object

    def require_dtype(self, dtype: str, where: str) -> None:
        """Refuse elements of another type than the spec's.

        Raises:
            UsageError: Names the tensor, its type and the spec's.
        """
        if self.dtype == dtype:
            return
        raw = dtype in _NOT_IN_NUMPY and self.dtype.startswith(_RAW_PREFIXES)
        if not raw or self.item_bytes != DTYPE_BYTES[dtype]:
            raise UsageError(
                f"{where}: dtype is {self.dtype} and the spec says {dtype}; elements "
                "are moved as they are, never converted"
            )


def tensor_view(tensor: object, where: str) -> TensorView:
    """Read where a NumPy array or a torch-like tensor lies.

    Args:
        tensor: The array or tensor; nothing is copied.
        where: What to call it in errors, such as ``"tensors[3]"``.

    Raises:
        UsageError: It is neither, or it is not in host memory.
    """
    if isinstance(tensor, np.ndarray):
        return _view_of_array(tensor)
    if isinstance(tensor, _TorchLike):
        return _view_of_torch(tensor, where)
    if hasattr(tensor, "__cuda_array_interface__"):
        raise _not_host(where, "CUDA")
    raise UsageError(
        f"{where}: a {type(tensor).__name__} is neither a NumPy array nor a torch "
        "tensor"
    )


# What a cache of bytes that NumPy has no name for is usually allocated as.
_NOT_IN_NUMPY: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
_RAW_PREFIXES: Final = ("uint", "int", "void")


class _Device(Protocol):
    @property
    def type(self) -> str: ...


@runtime_checkable
class _TorchLike(Protocol):
    """What is used of a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> _Device: ...
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
        kind=MemoryKind.HOST,
        writable=array.flags.writeable,
        owner=array,
    )


def _view_of_torch(tensor: _TorchLike, where: str) -> TensorView:
    if tensor.device.type != "cpu":
        raise _not_host(where, tensor.device.type)
    item_bytes = tensor.element_size()
    return TensorView(
        address=tensor.data_ptr(),
        shape=tuple(int(n) for n in tensor.shape),
        strides=tuple(int(n) * item_bytes for n in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=item_bytes,
        kind=MemoryKind.HOST,
        writable=True,
        owner=tensor,
    )


def _not_host(where: str, device: str) -> UsageError:
    return UsageError(
        f"{where}: device is {device}; a PagedCache holds host memory, so pass a "
        "tensor on the CPU"
    )
