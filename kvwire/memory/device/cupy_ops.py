"""A GPU through CuPy, for processes without torch: raw kernels gather and scatter.

Written against CuPy 13 and 14. What of it has run on a GPU, docs/topics/gpu.md says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.device.ops import (
    CudaStream,
    DeviceOps,
    Event,
    Stream,
    contiguous,
)
from kvwire.types import Device, MemoryKind

# One block of threads copies one fragment, 16 bytes a thread: 4 KiB in one go.
_THREADS: Final = 256
# Blocks beyond this take more than one fragment each.
_GRID_MAX: Final = 4096
# `table` holds n addresses and then n + 1 offsets in the contiguous side.
_KERNELS: Final = """
__device__ void copy(unsigned char* to, const unsigned char* from,
                     unsigned long long n) {
  unsigned long long both = (unsigned long long)to | (unsigned long long)from | n;
  if (both % 16 == 0) {
    for (unsigned long long i = threadIdx.x; i < n / 16; i += blockDim.x)
      ((uint4*)to)[i] = ((const uint4*)from)[i];
  } else if (both % 4 == 0) {
    for (unsigned long long i = threadIdx.x; i < n / 4; i += blockDim.x)
      ((unsigned int*)to)[i] = ((const unsigned int*)from)[i];
  } else {
    for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
  }
}
extern "C" __global__ void gather(const unsigned long long* table,
                                  unsigned long long count,
                                  unsigned long long packed) {
  const unsigned long long* starts = table + count;
  for (unsigned long long i = blockIdx.x; i < count; i += gridDim.x)
    copy((unsigned char*)(packed + starts[i]), (const unsigned char*)table[i],
         starts[i + 1] - starts[i]);
}
extern "C" __global__ void scatter(const unsigned long long* table,
                                   unsigned long long count,
                                   unsigned long long packed) {
  const unsigned long long* starts = table + count;
  for (unsigned long long i = blockIdx.x; i < count; i += gridDim.x)
    copy((unsigned char*)table[i], (const unsigned char*)(packed + starts[i]),
         starts[i + 1] - starts[i]);
}
"""


class CupyOps(DeviceOps):
    """Implements the operations of a device by CuPy."""

    def __init__(self, index: int) -> None:
        try:
            import cupy  # noqa: PLC0415 - optional, and heavy
        except ImportError:
            raise BackendUnavailable("not installed") from None
        try:
            count = int(cupy.cuda.runtime.getDeviceCount())
        except cupy.cuda.runtime.CUDARuntimeError as exc:
            raise BackendUnavailable(f"CuPy {cupy.__version__}: {exc}") from None
        if index >= count:
            raise BackendUnavailable(
                f"CuPy finds {count} GPUs, none has number {index}"
            )
        self.cupy: Any = cupy
        self.device: Device = Device(MemoryKind.CUDA, index)

    def stream(self) -> Stream:
        return CupyStream(self)

    def record_current(self) -> Event:
        with self.cupy.cuda.Device(self.device.index):
            event = self.cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self.cupy.cuda.get_current_stream())
        return CupyEvent(event)

    def pinned(self, nbytes: int) -> memoryview:
        cupy = self.cupy
        try:
            with cupy.cuda.Device(self.device.index):
                memory = cupy.cuda.alloc_pinned_memory(nbytes)
        except (MemoryError, cupy.cuda.runtime.CUDARuntimeError) as exc:
            raise BackendUnavailable(
                f"{self.device}: {nbytes} bytes of pinned memory were refused: {exc}"
            ) from None
        # The pool may give more than it was asked for.
        return np.frombuffer(memory, np.uint8, nbytes).data

    def owns(self, event: object) -> bool:
        # CuPy's events do not say their GPU, and a stream may wait for those of others.
        return isinstance(event, self.cupy.cuda.Event)


class CupyEvent(Event):
    """Wraps an event, made with ``block=True``: whoever waits for it sleeps."""

    def __init__(self, native: Any) -> None:
        self.native: Any = native

    def query(self) -> bool:
        return bool(self.native.done)

    def synchronize(self) -> None:
        self.native.synchronize()


class CupyStream(CudaStream):
    """Queues kernels of our own and copies, on a stream that CuPy made."""

    def __init__(self, ops: CupyOps) -> None:
        self._ops = ops
        self._cupy = ops.cupy
        self.index = ops.device.index
        self._runtime = ops.cupy.cuda.runtime
        module = ops.cupy.RawModule(code=_KERNELS)
        with ops.cupy.cuda.Device(self.index):
            self._stream = ops.cupy.cuda.Stream(non_blocking=True)
            # Compiled here, at the start, and not in the middle of a transfer.
            self._gather = module.get_function("gather")
            self._scatter = module.get_function("scatter")

    @property
    def pointer(self) -> int:
        return int(self._stream.ptr)

    def record(self) -> Event:
        with self._entered():
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return CupyEvent(event)

    def buffer(self, nbytes: int) -> Fragments:
        with self._entered():
            memory = self._cupy.cuda.alloc(nbytes)
        return contiguous(memory.ptr, nbytes, memory, self._ops.device)

    def gather(self, source: Fragments, into: Fragments) -> None:
        self._launch(self._gather, source, into)

    def scatter(self, source: Fragments, into: Fragments) -> None:
        self._launch(self._scatter, into, source)

    def to_host(self, source: Fragments, into: memoryview) -> None:
        host = np.frombuffer(into, np.uint8).ctypes.data
        kind = self._runtime.memcpyDeviceToHost
        with self._entered():
            for address, start, nbytes in _runs(source):
                self._runtime.memcpyAsync(
                    host + start, address, nbytes, kind, self._stream.ptr
                )

    def to_device(self, source: memoryview, into: Fragments) -> None:
        host = np.frombuffer(source, np.uint8).ctypes.data
        kind = self._runtime.memcpyHostToDevice
        with self._entered():
            for address, start, nbytes in _runs(into):
                self._runtime.memcpyAsync(
                    address, host + start, nbytes, kind, self._stream.ptr
                )

    def close(self) -> None:
        """CUDA frees a stream that is destroyed once its work is done."""

    def _launch(self, kernel: Any, many: Fragments, packed: Fragments) -> None:
        table = np.concatenate((many.addresses, many.starts))
        with self._entered():
            # CuPy copies from pinned memory of its own, and so does not wait.
            on_device = self._cupy.asarray(table)
            kernel(
                (min(len(many), _GRID_MAX),),
                (_THREADS,),
                (on_device, np.uint64(len(many)), packed.addresses[0]),
            )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.index), self._stream:
            yield


def _runs(fragments: Fragments) -> Iterator[tuple[int, int, int]]:
    """(address, start, bytes) of each fragment; there are few."""
    return zip(
        fragments.addresses.tolist(),
        fragments.starts.tolist()[:-1],
        fragments.lengths.tolist(),
        strict=True,
    )
