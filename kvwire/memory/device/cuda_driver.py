"""The functions of NVIDIA's driver for streams, events and copies, by ctypes.

Every program that uses a GPU, also through torch or CuPy, has loaded the driver's
library already: nothing needs to be installed, and no version has to match. All
functions used here exist in all drivers since CUDA 11.2.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

from kvwire.errors import BackendUnavailable
from kvwire.memory.device.ops import HANDLE_BYTES

_LIBRARY: Final = "libcuda.so.1"

# The value of CUresult for success, in cuda.h.
_SUCCESS: Final = 0
_NOT_READY: Final = 600

_OUT: Final = POINTER(c_void_p)
_POINTER: Final = c_uint64  # CUdeviceptr


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: names an allocation of one process to others."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


# Functions that return at once, so they are called with the GIL held.
_BRIEF: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
}
# Functions that may wait: for the device, for room in its queue, or for the kernel.
_WAITING: Final[dict[str, tuple[Any, ...]]] = {
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuModuleLoadData": (_OUT, c_char_p),
    "cuModuleGetFunction": (_OUT, c_void_p, c_char_p),
    "cuStreamCreate": (_OUT, c_uint),
    "cuEventSynchronize": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemAllocAsync": (POINTER(_POINTER), c_size_t, c_void_p),
    "cuMemFreeAsync": (_POINTER, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _POINTER, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (_POINTER, c_void_p, c_size_t, c_void_p),
    "cuMemGetAddressRange_v2": (POINTER(_POINTER), POINTER(c_size_t), _POINTER),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _POINTER),
    "cuIpcOpenMemHandle_v2": (POINTER(_POINTER), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, _OUT, _OUT),
}


class CudaError(RuntimeError):
    """A call to the driver failed."""


class CudaDriver:
    """The driver's functions.

    Raises:
        BackendUnavailable: There is no driver, or it finds no GPU.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        try:
            for load, names in ((ctypes.PyDLL, _BRIEF), (ctypes.CDLL, _WAITING)):
                library = load(_LIBRARY)
                for name, arguments in names.items():
                    self._functions[name] = function = getattr(library, name)
                    function.argtypes = arguments
            self._text: Any = ctypes.CDLL(_LIBRARY).cuGetErrorString
            self("cuInit", 0)
        except (OSError, AttributeError, CudaError) as exc:
            raise BackendUnavailable(f"NVIDIA's driver: {exc}") from None

    def __call__(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            CudaError: The call failed.
        """
        result = self._functions[name](*arguments)
        if result != _SUCCESS:
            raise CudaError(f"{name}: {self._described(result)}")

    def is_done(self, name: str, *arguments: object) -> bool:
        """Call a function that may report "not ready"; return whether it is done."""
        result = self._functions[name](*arguments)
        if result in (_SUCCESS, _NOT_READY):
            return bool(result == _SUCCESS)
        raise CudaError(f"{name}: {self._described(result)}")

    def attempt(self, name: str, *arguments: object) -> bool:
        """Call a function that may fail on a broken device; return its success."""
        return bool(self._functions[name](*arguments) == _SUCCESS)

    def handle(self, name: str, *arguments: object) -> int:
        """Call a function that stores a handle at its first argument; return it."""
        made = c_void_p()
        self(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def number(self, name: str, *arguments: object) -> int:
        """Call a function that stores a number at its first argument; return it."""
        made = c_int()
        self(name, ctypes.byref(made), *arguments)
        return made.value

    def _described(self, result: int) -> str:
        text = c_char_p()
        self._text(result, ctypes.byref(text))
        return (text.value or b"unknown").decode(errors="replace") + f" ({result})"
