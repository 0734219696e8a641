"""Arrays of any library that speaks DLPack, read in place.

A producer's ``__dlpack__`` gives a capsule around a C struct (``DLManagedTensor``,
https://dmlc.github.io/dlpack/latest/c_api.html) that says where the elements lie. The
capsule is kept as the owner and not consumed: its producer frees the struct, and lets
go of the memory, when the capsule goes.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvwire.errors import UsageError

HOST: Final = 1
CUDA: Final = 2
# What CUDA calls pinned and managed memory: the host may touch both.
CUDA_HOST: Final = 3
# The order of a stream is the caller's to establish (see docs/topics/gpu.md): -1 asks
# the producer not to synchronise anything.
_NO_SYNC: Final = -1
# More dimensions than any KV cache has; a struct that claims more is not one.
_NDIM_MAX: Final = 32
_KINDS: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
# Later versions of the standard number the types of 8 bits.
_FLOAT8: Final = {10: "float8_e4m3fn", 12: "float8_e5m2"}


@runtime_checkable
class DLPackLike(Protocol):
    """Names what is used of an array."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class DLPackArray(NamedTuple):
    """Describes where the elements of an array lie."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    device: tuple[int, int]
    owner: object


def read_dlpack(array: DLPackLike, where: str) -> DLPackArray:
    """Read where an array lies; nothing is copied or converted."""
    kind, index = array.__dlpack_device__()
    try:
        capsule = array.__dlpack__(stream=_NO_SYNC if kind == CUDA else None)
        pointer = _get_pointer(capsule, b"dltensor")
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        raise UsageError(
            f"{where}: a {type(array).__name__} that DLPack does not export: {exc}"
        ) from None
    tensor = _Tensor.from_address(pointer)
    if not 0 <= tensor.ndim <= _NDIM_MAX or tensor.lanes != 1 or tensor.bits % 8:
        raise UsageError(
            f"{where}: DLPack says {tensor.ndim} dimensions of {tensor.lanes} x "
            f"{tensor.bits} bits; elements must be one number of whole bytes"
        )
    item_bytes = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    steps = tensor.strides[: tensor.ndim] if tensor.strides else _compact(shape)
    return DLPackArray(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=tuple(step * item_bytes for step in steps),
        dtype=_dtype(tensor.code, tensor.bits),
        item_bytes=item_bytes,
        device=(int(kind), int(index)),
        owner=(array, capsule),
    )


class _Tensor(ctypes.Structure):
    """``DLTensor``, with which a ``DLManagedTensor`` begins."""

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


# A prototype of our own: `ctypes.pythonapi` is shared by the whole process.
_get_pointer: Final = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _compact(shape: tuple[int, ...]) -> list[int]:
    steps, step = [], 1
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return steps[::-1]


def _dtype(code: int, bits: int) -> str:
    if code in _FLOAT8 and bits == 8:
        return _FLOAT8[code]
    return f"{_KINDS.get(code, f'dlpack{code}_')}{bits}"
