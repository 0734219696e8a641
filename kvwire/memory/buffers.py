"""Converts any object that holds bytes into a payload, without a copy.

Accepted: anything with the buffer protocol (bytes, bytearray, mmap, NumPy arrays),
NumPy arrays of dtypes that protocol cannot name (bfloat16, float8), torch tensors on
the CPU or a GPU, arrays of other libraries on a GPU, and ready-made fragments. Refused
with the reason: memory that is not C-contiguous, read-only memory as a destination, and
memory that holds pointers.
"""

from __future__ import annotations

import ctypes
import re
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments, Payload
from kvwire.kv.tensors import TensorView, check_values, tensor_view
from kvwire.limits import KIB

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Tensor(Protocol):
    """A torch tensor, which lacks the buffer protocol."""

    def data_ptr(self) -> int:
        """Return the address of the first element."""


class CudaArray(Protocol):
    """An array on a GPU, of CuPy, Numba or JAX."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Return a dict with its address, shape and strides."""


Memory: TypeAlias = "Buffer | np.ndarray[Any, Any] | Tensor | CudaArray | Fragments"
"""Objects whose bytes can be sent or, if they are writable, received into."""

MID_PAGE_BYTES: Final = 2 * KIB
"""The offset within a page at which our own memory begins.

The C library and the kernel copy with ``rep movsb``. On AMD's processors this
instruction falls to a third of its rate if the destination begins 1 to 31 bytes further
into a page than the source (glibc bug 30994). NumPy's memory begins 16 bytes into a
page, torch's 64, a mapping 0: copies from and to the middle of a page never meet that
case.
"""
_PAGE_BYTES: Final = 4 * KIB

# The letters for objects and other pointers in buffer formats (PEP 3118 and ctypes),
# after the field names between colons were removed.
_POINTERS: Final = re.compile("[OPz&X]")
_FIELD_NAMES: Final = re.compile(":[^:]*:")
# One-letter formats of plain numbers: nearly all that is ever passed.
_PLAIN: Final = frozenset("?BbcHhIiLlQqefdnN")
# Most messages are sent from arrays of bytes.
_ARRAY: Final = np.ndarray
_UINT8: Final = np.dtype(np.uint8)
# bytearray(n) writes n zeros; resizing to n bytes writes none.
_RESIZE: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_ssize_t)(
    ("PyByteArray_Resize", ctypes.pythonapi)
)


def as_payload(buffer: Any, *, writable: bool, what: str = "buffer") -> Payload:
    """Return ``buffer`` as a view of bytes or as fragments, which keep it alive.

    Raises:
        UsageError: Its memory cannot be used; the text names ``what`` and the remedy.
    """
    kind = type(buffer)
    if kind is bytearray or (kind is bytes and not writable):
        return memoryview(buffer)
    if kind is _ARRAY and buffer.dtype is _UINT8 and buffer.ndim == 1:
        view = memoryview(buffer)
        if view.c_contiguous and not (writable and view.readonly):
            return view
    if isinstance(buffer, Fragments):
        if writable and not buffer.writable:
            raise UsageError(f"{what}: the memory of these fragments is read-only")
        return buffer
    payload = _payload_of(buffer, what)
    read_only = (
        not payload.writable if isinstance(payload, Fragments) else payload.readonly
    )
    if writable and read_only:
        raise UsageError(
            f"{what}: {type(buffer).__name__} is read-only; pass a bytearray, a "
            f"writable NumPy array or a tensor to receive into"
        )
    return payload


def uncleared(nbytes: int) -> bytearray:
    """Make a bytearray whose pages are allocated only when they are written.

    Use it for a size that a peer has announced: it costs only address space until the
    bytes arrive. Its content is undefined, so hand it out only once all of it has been
    written.

    Raises:
        MemoryError: There is not enough address space.
    """
    made = bytearray()
    _RESIZE(made, nbytes)
    return made


def slice_payload(payload: Payload, offset: int, length: int) -> Payload:
    """Return the bytes ``[offset, offset + length)`` of a payload."""
    if isinstance(payload, Fragments):
        return payload.slice(offset, length)
    return payload[offset : offset + length]


def _payload_of(buffer: Any, what: str) -> Payload:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        _check_tensor(torch, buffer, what)
        if buffer.device.type != "cpu":
            return _device_bytes(tensor_view(buffer, what), what)
        # NumPy has no bfloat16 and no float8, so torch makes a view of the bytes first.
        buffer = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    try:
        if (
            isinstance(buffer, np.ndarray)
            and buffer.flags.c_contiguous
            and not buffer.dtype.hasobject
        ):
            # Arrays of bfloat16 and float8 (ml_dtypes) have no buffer format.
            buffer = buffer.reshape(-1).view(np.uint8)
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        if (described := _on_device(buffer, what)) is not None:
            return _device_bytes(described, what)
        raise _no_memory(buffer, what) from None
    if view.format not in _PLAIN and _POINTERS.search(
        _FIELD_NAMES.sub("", view.format)
    ):
        raise UsageError(
            f"{what}: {type(buffer).__name__} of format {view.format!r} holds "
            "pointers, which are meaningless in another process; pass an array of "
            "numbers"
        )
    if not view.c_contiguous:
        raise _not_contiguous(what, view.shape or (), view.strides or ())
    if view.format == "B" and view.ndim == 1:
        return view
    if view.nbytes == 0:
        # A shape with a zero cannot be cast, and has no bytes.
        return memoryview(bytearray() if not view.readonly else b"")
    return view.cast("B")


def _check_tensor(torch: Any, tensor: Any, what: str) -> None:
    """Refuse a torch tensor whose memory is not simply its values, in order."""
    check_values(torch, tensor, what)
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{what}: the tensor is on {tensor.device}; kvwire moves host memory "
            f"and CUDA memory, so pass tensor.cpu()"
        )
    if not tensor.is_contiguous():
        raise UsageError(
            f"{what}: the tensor is not contiguous (shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}); pass tensor.contiguous()"
        )


def _on_device(buffer: Any, what: str) -> TensorView | None:
    """Return the place of an array's elements on a device; None for host memory."""
    if not hasattr(buffer, "data_ptr") and not hasattr(
        buffer, "__cuda_array_interface__"
    ):
        return None
    view = tensor_view(buffer, what)
    return None if view.device is None else view


def _device_bytes(view: TensorView, what: str) -> Payload:
    if 0 in view.shape:
        return memoryview(bytearray() if view.writable else b"")
    nbytes = view.item_bytes
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != nbytes:
            raise _not_contiguous(what, view.shape, view.strides)
        nbytes *= size
    return Fragments(
        np.array([view.address], np.uint64),
        np.array([nbytes], np.uint64),
        owner=view.owner,
        writable=view.writable,
        device=view.device,
    )


def _no_memory(buffer: object, what: str) -> UsageError:
    advice = "bytes, a bytearray, a NumPy array or a torch tensor"
    if isinstance(buffer, str):
        advice = "its bytes, text.encode()"
    return UsageError(
        f"{what}: {type(buffer).__name__} is not memory that kvwire can use; pass "
        f"{advice}"
    )


def _not_contiguous(
    what: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> UsageError:
    return UsageError(
        f"{what}: the memory is not C-contiguous (shape {shape}, strides {strides}); "
        f"pass a contiguous array or make a copy"
    )


def mid_page_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory that begins in the middle of a page, with undefined content."""
    memory = np.empty(nbytes + _PAGE_BYTES, np.uint8)
    # NumPy's own ways take four times as long.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.data))
    begin = (MID_PAGE_BYTES - address) % _PAGE_BYTES
    return memory[begin : begin + nbytes]
