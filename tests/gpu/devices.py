"""A GPU for a test, through torch or through CuPy; without one the test is skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.kv.tensors import tensor_view
from kvwire.memory.device.ops import DeviceOps
from kvwire.memory.device.registry import device_ops
from kvwire.types import Device, MemoryKind

LIBRARIES = ("torch", "cupy")
# Of what a test between two processes is run with: a device of the tests, or a GPU.
KINDS = ("simulated", pytest.param("gpu", marks=pytest.mark.gpu))


def need_gpu(kind: str) -> None:
    """Skip a test that needs a GPU where there is none."""
    if kind == "gpu":
        Gpu("torch")


def pieces(array: object, indices: npt.ArrayLike, nbytes: int) -> Fragments:
    """Pieces of so many bytes of an array on a GPU, by their number."""
    view = tensor_view(array, "t")
    rows = np.asarray(indices, np.uint64)
    return Fragments(
        rows * np.uint64(nbytes) + np.uint64(view.address),
        np.full(rows.size, nbytes, np.uint64),
        owner=array,
        writable=True,
        device=view.device,
    )


class Gpu:
    def __init__(self, library: str) -> None:
        self.library = library
        try:
            self.ops: DeviceOps = device_ops(Device(MemoryKind.CUDA, 0))
        except BackendUnavailable as exc:
            pytest.skip(f"no GPU: {exc}")
        pytest.importorskip(library)

    def array(self, values: npt.NDArray[Any], dtype: str = "") -> Any:
        """An array on the GPU; ``dtype`` of torch where NumPy has none such."""
        if self.library == "cupy":
            import cupy

            return cupy.asarray(values)
        import torch

        # NumPy's unsigned types are bytes to torch, and seen as what they are there.
        tensor = torch.from_numpy(values.view(np.uint8).copy()).cuda()
        return tensor.view(getattr(torch, dtype or str(values.dtype)))

    def values(self, array: Any, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What an array on the GPU holds, bit for bit."""
        if self.library == "cupy":
            host: npt.NDArray[Any] = array.get()
            return host.view(like.dtype)
        import torch

        flat: npt.NDArray[Any] = array.view(torch.uint8).cpu().numpy()
        return flat.view(like.dtype).reshape(like.shape)

    def event(self) -> Any:
        """An event on the library's current stream, as an application records it."""
        if self.library == "cupy":
            import cupy

            event = cupy.cuda.Event(disable_timing=True)
            event.record()
            return event
        import torch

        recorded = torch.cuda.Event()
        recorded.record()
        return recorded

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy, so that what forgets to wait is too early."""
        cycles = int(seconds * 1e9)
        if self.library == "torch":
            import torch

            torch.cuda._sleep(cycles)
            return
        import cupy

        spinning = cupy.RawKernel(
            'extern "C" __global__ void spin(long long n) {'
            "long long t = clock64(); while (clock64() - t < n) {} }",
            "spin",
        )
        spinning((1,), (1,), (np.int64(cycles),))
