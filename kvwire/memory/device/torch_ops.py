"""A GPU through torch: its streams, its allocator, gathers by ``index_select``.

Written against torch 2.4 to 2.13. What of it has run on a GPU, docs/topics/gpu.md says.

A library's own gather (``index_select``) moves equal rows of a table. Fragments become
that: the table begins at the lowest address and has one row for every *step*, the
largest number of bytes that divides all their lengths and all distances between them.
The table may span memory that is not ours: only the rows that are named are touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.device.ops import (
    CudaStream,
    DeviceArray,
    DeviceOps,
    Event,
    Stream,
    contiguous,
)
from kvwire.types import Device, MemoryKind

# Rows are moved as the widest element that divides them: fewer threads for more bytes.
_WIDTH_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class FragmentRows:
    """Describes fragments as rows of a table.

    Attributes:
        base: The address of row 0.
        row_bytes: Bytes of a row.
        count: Rows in the table's span.
        index: Shape (n,), int64: the rows of the fragments, in their order.
    """

    base: int
    row_bytes: int
    count: int
    index: npt.NDArray[np.int64]


def as_rows(fragments: Fragments) -> FragmentRows:
    """View fragments, at least one, as rows of one table."""
    addresses, lengths = fragments.addresses, fragments.lengths
    base = addresses.min()
    offsets = addresses - base
    step = np.gcd(np.gcd.reduce(lengths), np.gcd.reduce(offsets))
    first = (offsets // step).astype(np.int64)
    rows = (lengths // step).astype(np.int64)
    if (rows == 1).all():
        index = first
    else:
        # Row k of the stream is the k-th row of its fragment, counted from its first.
        begins = np.cumsum(rows) - rows
        index = np.arange(rows.sum()) + np.repeat(first - begins, rows)
    return FragmentRows(int(base), int(step), int(index.max()) + 1, index)


class TorchOps(DeviceOps):
    """Implements the operations of a device by torch."""

    def __init__(self, index: int) -> None:
        try:
            import torch  # noqa: PLC0415 - optional, and heavy
        except ImportError:
            raise BackendUnavailable("not installed") from None
        if not torch.cuda.is_available():
            raise BackendUnavailable(f"torch {torch.__version__} finds no GPU")
        if index >= torch.cuda.device_count():
            raise BackendUnavailable(
                f"torch finds {torch.cuda.device_count()} GPUs, none has number {index}"
            )
        self.torch: Any = torch
        self.device: Device = Device(MemoryKind.CUDA, index)

    def stream(self) -> Stream:
        return TorchStream(self)

    def record_current(self) -> Event:
        cuda = self.torch.cuda
        event = cuda.Event(blocking=True)
        event.record(cuda.current_stream(self.device.index))
        return TorchEvent(event)

    def pinned(self, nbytes: int) -> memoryview:
        torch = self.torch
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:
            raise BackendUnavailable(
                f"{self.device}: {nbytes} bytes of pinned memory were refused: {exc}"
            ) from None
        view: memoryview = tensor.numpy().data
        return view

    def owns(self, event: object) -> bool:
        if not isinstance(event, self.torch.cuda.Event):
            return False
        # An event that was never recorded has no device; every stream may wait for it.
        device = getattr(event, "device", None)
        return device is None or device.index == self.device.index


class TorchEvent(Event):
    """Wraps an event, made with ``blocking=True``: whoever waits for it sleeps."""

    def __init__(self, native: Any) -> None:
        self.native: Any = native

    def query(self) -> bool:
        return bool(self.native.query())

    def synchronize(self) -> None:
        self.native.synchronize()


class TorchStream(CudaStream):
    """Queues gathers and copies of torch, on a stream that no other waits for."""

    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops
        self._torch = ops.torch
        self.index = ops.device.index
        self._stream = ops.torch.cuda.Stream(device=self.index)

    @property
    def pointer(self) -> int:
        return int(self._stream.cuda_stream)

    def record(self) -> Event:
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return TorchEvent(event)

    def buffer(self, nbytes: int) -> Fragments:
        torch = self._torch
        # Allocated for this stream, so that the allocator orders its reuse by it.
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._where)
        return contiguous(tensor.data_ptr(), nbytes, tensor, self._ops.device)

    def gather(self, source: Fragments, into: Fragments) -> None:
        rows = as_rows(source)
        with self._torch.cuda.stream(self._stream):
            table, index, packed = self._tables(rows, into)
            self._torch.index_select(table, 0, index, out=packed)

    def scatter(self, source: Fragments, into: Fragments) -> None:
        rows = as_rows(into)
        with self._torch.cuda.stream(self._stream):
            table, index, packed = self._tables(rows, source)
            table.index_copy_(0, index, packed)

    def to_host(self, source: Fragments, into: memoryview) -> None:
        host = self._torch.frombuffer(into, dtype=self._torch.uint8)
        with self._torch.cuda.stream(self._stream):
            for begin, end, run in self._runs(source):
                host[begin:end].copy_(run, non_blocking=True)

    def to_device(self, source: memoryview, into: Fragments) -> None:
        host = self._torch.frombuffer(source, dtype=self._torch.uint8)
        with self._torch.cuda.stream(self._stream):
            for begin, end, run in self._runs(into):
                run.copy_(host[begin:end], non_blocking=True)

    def close(self) -> None:
        """Do nothing: torch keeps its streams in a pool for the life of the process."""

    @property
    def _where(self) -> str:
        return f"cuda:{self.index}"

    def _tables(self, rows: FragmentRows, packed: Fragments) -> tuple[Any, Any, Any]:
        """Return the table, the index on the GPU and contiguous rows."""
        address = packed.addresses.item(0)
        width = math.gcd(_WIDTH_MAX, rows.row_bytes, rows.base, address)
        typestr, items = f"<i{width}", rows.row_bytes // width
        table = self._at(rows.base, (rows.count, items), typestr)
        compact = self._at(address, (rows.index.size, items), typestr)
        # Pinned, so that the copy is queued; torch keeps it until that is done.
        index = self._torch.from_numpy(rows.index).pin_memory()
        return table, index.to(self._where, non_blocking=True), compact

    def _runs(self, fragments: Fragments) -> list[tuple[int, int, Any]]:
        """(begin, end, tensor) for each fragment; there are few."""
        starts = fragments.starts.tolist()
        return [
            (begin, end, self._at(address, (end - begin,), "|u1"))
            for address, begin, end in zip(
                fragments.addresses.tolist(), starts[:-1], starts[1:], strict=True
            )
        ]

    def _at(self, address: int, shape: tuple[int, ...], typestr: str) -> Any:
        """Return a tensor over memory at an address; the caller keeps its owner."""
        return self._torch.as_tensor(
            DeviceArray(address, shape, typestr), device=self._where
        )
