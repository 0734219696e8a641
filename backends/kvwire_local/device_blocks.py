"""Reads the blocks of a window in a device's memory, from one process to another.

The owner describes the allocations that contain the window, with a handle for each
(CUDA IPC). The reader opens them on the device of its own cache, copies pieces from
device to device, and then reads the generations, which are in host memory::

    pieces copied, on a stream of ours      the device
    its event has fired                     a thread has slept on it
    generations, then the cookie            one process_vm_readv

**Why no torn block is reported.** The event fires when every load of the copy has
completed. Only then are the generations read. The owner withdraws with a store and a
full fence, before it queues a kernel that writes. So if a load has seen a byte that
such a kernel wrote, the new generation was visible when that load completed, and the
reader finds it. A kernel does not see bytes from before its start in a private cache:
the processors' own caches are invalidated when it starts, and the other caches are
coherent. Offered bytes must have been written by kernels that have ended, which
``Window.offer`` requires.

**Which process is read.** The cookie is read after the generations. When a process
ends, the kernel removes its address space before it closes its descriptors, among them
the driver's. So if the cookie was still there, the owner's allocations existed during
the whole copy. This is why such a window needs ``process_vm_readv`` instead of a mapped
table.

**Which memory is read.** A piece is read only within its tensor, and a tensor only
within an allocation whose size this process's own driver reports.

**What CUDA leaves undefined.** The owner's memory may disappear while a copy reads it,
because its process dies, or frees the memory before ``Window.close`` has returned.
Drivers keep memory that another process has open, but no document promises that.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np

from kvwire.backend import BlockRead, WindowMemory
from kvwire.errors import (
    BackendUnavailable,
    ConnectionLost,
    ProtocolError,
    begin_thread,
    lacks_threads,
    with_remedy,
)
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Array, Fragments
from kvwire.limits import MIB
from kvwire.memory.device.device_copies import DeviceFailed
from kvwire.memory.device.moves import DeviceMoves
from kvwire.memory.device.ops import HANDLE_BYTES, OpenedAllocation, device_errors
from kvwire.memory.device.registry import device_ops
from kvwire.memory.generations import ENTRY_BYTES
from kvwire.types import Device, MemoryKind
from kvwire_local.blocks import ProcessBlocks, WindowBlocks
from kvwire_local.descriptor import RULE
from kvwire_local.peer import PeerMemory
from kvwire_local.templates import Span, WindowTemplates, checked_spans, checked_table

# The kind of memory, and the number of allocations that follow.
_HEAD: Final = struct.Struct("<II")
# An allocation's address at its owner, and its handle.
_ALLOCATION: Final = struct.Struct(f"<Q{HANDLE_BYTES}s")
_KINDS: Final = {1: MemoryKind.CUDA, 2: MemoryKind.SIMULATED}
_CODES: Final = {kind: code for code, kind in _KINDS.items()}
ALLOCATIONS_MAX: Final = 256
"""The most allocations that may contain a window."""
_NOTHING: Final = np.empty(0, np.uint64)
Handle = tuple[int, bytes]
"""An allocation's address at its owner, and its handle."""


def shared_allocations(memory: WindowMemory) -> bytes:
    """Return a window's allocations, for its reader.

    Raises:
        BackendUnavailable: One cannot be shared, or there are too many.
    """
    device = memory.device
    assert device is not None
    ops = device_ops(device)
    found: list[Handle] = []
    end = 0
    for first, behind in checked_spans(memory.spans):
        # Adjacent tensors form one span, which may lie in several allocations.
        while (begin := max(first, end)) < behind:
            allocation = ops.share(begin)
            end = allocation.address + allocation.nbytes
            if end <= begin or len(found) >= ALLOCATIONS_MAX:
                raise BackendUnavailable(
                    f"local: a window on {device} lies in more than {ALLOCATIONS_MAX} "
                    f"allocations"
                )
            found.append((allocation.address, allocation.handle))
    head = _HEAD.pack(_CODES[device.kind], len(found))
    return head + b"".join(_ALLOCATION.pack(*one) for one in found)


def read_allocations(body: bytes) -> tuple[MemoryKind, list[Handle]]:
    """Decode the result of the peer's :func:`shared_allocations`.

    Raises:
        ProtocolError: A correct peer would not return that.
    """
    if len(body) >= _HEAD.size:
        code, count = _HEAD.unpack_from(body)
        rest = body[_HEAD.size :]
        kind = _KINDS.get(code)
        sized = count <= ALLOCATIONS_MAX and len(rest) == count * _ALLOCATION.size
        if kind is not None and sized:
            return kind, list(_ALLOCATION.iter_unpack(rest))
    raise ProtocolError(
        RULE, f"local: {len(body)} bytes are not a list of device allocations"
    )


class DeviceBlocks(WindowBlocks):
    """A window in device memory.

    Args:
        memory: The window.
        body: Its allocations, as the peer has described them.
        peer: The owner's process.

    Raises:
        ProtocolError: A correct owner would not have such tensors, table or
            allocations.
    """

    immediate = False
    turn_bytes = 64 * MIB

    def __init__(self, memory: WindowMemory, body: bytes, peer: PeerMemory) -> None:
        self.memory_kind, self._handles = read_allocations(body)
        self.way = f"{self.memory_kind}_ipc"
        self._spans = checked_spans(memory.spans)
        first, end = checked_table(memory.table)
        self._entries = (end - first) // ENTRY_BYTES
        table = WindowMemory(spans=(), table=memory.table)
        self._generations = ProcessBlocks(table, peer)
        self._loop = asyncio.get_running_loop()
        # One for each device of this process into which the window is read.
        self._opened: dict[Device, asyncio.Future[DeviceWindow]] = {}
        self._thread = ThreadPoolExecutor(1, "kvwire device window")
        self._moving = 0
        self._closed = False
        self.quiet: asyncio.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Return whether the device may still touch memory."""
        return self._moving > 0

    def read(self, batch: BlockRead) -> asyncio.Future[Bits]:
        return asyncio.Task(self._read(batch), loop=self._loop)

    async def _read(self, batch: BlockRead) -> Bits:
        """Copy the bytes, then compare the generations.

        Cancel safety: a queued copy continues, and ``busy`` reports it.
        """
        device = batch.device
        if device is None or device.kind is not self.memory_kind:
            raise BackendUnavailable(
                f"local: a window in memory of kind {self.memory_kind} is not read "
                f"into {device or 'host memory'}"
            )
        window = await asyncio.shield(self._open(device))
        if self._closed:
            raise ConnectionLost("local: the reader is closed")
        template = window.templates.of(batch)
        landed = template.inside(batch)
        origin, target = template.addresses(batch, landed)
        if origin.size:
            await asyncio.shield(self._move(window, batch, origin, target))
        table = batch._replace(pieces_from=_NOTHING, pieces_to=_NOTHING, run=0)
        landed &= self._generations.read(table)
        return landed

    def close(self) -> None:
        """End reading; ``quiet`` is done once the allocations are closed."""
        if not self._closed:
            self._closed = True
            if self._opened:
                self.quiet = self._loop.create_future()
                self._release()

    def _open(self, device: Device) -> asyncio.Future[DeviceWindow]:
        """Open the window on a device, which may take milliseconds."""
        opening = self._opened.get(device)
        if opening is None:
            if self._closed:
                raise ConnectionLost("local: the reader is closed")
            make = partial(
                DeviceWindow,
                device,
                self._spans,
                self._handles,
                self._entries,
                self._loop,
            )
            try:
                opening = self._loop.run_in_executor(self._thread, make)
            except RuntimeError as exc:
                # The executor has queued the call, for a thread that it starts later.
                self._thread.shutdown(wait=False, cancel_futures=True)
                self._thread = ThreadPoolExecutor(1, "kvwire device window")
                reason = with_remedy(lacks_threads(exc))
                raise BackendUnavailable(f"local: {reason}") from None
            self._opened[device] = opening  # bounded by the devices of this host
            opening.add_done_callback(lambda _: self._release())
        return opening

    def _move(
        self, window: DeviceWindow, batch: BlockRead, origin: Array, target: Array
    ) -> asyncio.Future[None]:
        """Queue the copy of pieces; return a future for its end.

        Raises:
            DeviceFailed: The device has failed.
        """
        over: asyncio.Future[None] = self._loop.create_future()

        def done(error: Exception | None) -> None:
            self._moving -= 1
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(_failed(window.device, error))
            self._release()

        # This includes the peer's pieces, which the device only reads.
        pieces = partial(
            Fragments.uniform,
            length=batch.run,
            owner=batch.owner,
            writable=True,
            device=window.device,
        )
        self._moving += 1
        try:
            window.moves.move(pieces(origin), pieces(target), done)
        except Exception as exc:
            self._moving -= 1
            self._release()
            raise _failed(window.device, exc) from exc
        return over

    def _release(self) -> None:
        """Close the allocations, on a thread, once nothing reads them."""
        if not (self._closed and self._opened) or self._moving:
            return
        if not all(opening.done() for opening in self._opened.values()):
            return
        windows = [
            opening.result()
            for opening in self._opened.values()
            if not opening.cancelled() and opening.exception() is None
        ]
        self._opened.clear()
        if windows:
            close = partial(self._close_windows, windows)
            try:
                # A daemon, since a device that hangs must not hold up the process' end.
                begin_thread(
                    threading.Thread(
                        target=close, name="kvwire window's end", daemon=True
                    )
                )
            except BackendUnavailable:
                self._thread.submit(close)  # by the thread that opened them
        else:
            self._quiet()
        self._thread.shutdown(wait=False)

    def _close_windows(self, windows: list[DeviceWindow]) -> None:
        for window in windows:
            window.close()
        # No waiter is left on a closed loop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._quiet)

    def _quiet(self) -> None:
        if self.quiet is not None and not self.quiet.done():
            self.quiet.set_result(None)


class DeviceWindow:
    """A window's allocations, open on one device of this process.

    It is created on a thread, since the driver may wait for the device.

    Attributes:
        device: The device.
        templates: The local places of its pieces.
        moves: Copies the pieces.

    Raises:
        BackendUnavailable: An allocation cannot be opened there, or no allocation
            contains a tensor.
    """

    def __init__(
        self,
        device: Device,
        spans: Sequence[Span],
        handles: Sequence[Handle],
        entries: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.device = device
        self._allocations: list[OpenedAllocation] = []
        ops = device_ops(device)
        try:
            with device_errors(device):
                for _, handle in handles:
                    self._allocations.append(ops.open_shared(handle))
                bases = [base for base, _ in handles]
                cut, shifts = _cut(spans, bases, self._allocations)
                self.templates = WindowTemplates(cut, shifts, 0, entries)
                self.moves = DeviceMoves(ops, loop.call_soon_threadsafe)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the allocations, which nothing reads any more; may wait."""
        if hasattr(self, "moves"):
            self.moves.close()
        for allocation in self._allocations:
            allocation.close()


def _cut(
    spans: Sequence[Span], bases: Sequence[int], opened: Sequence[OpenedAllocation]
) -> tuple[list[Span], list[int]]:
    """Return the parts of spans within allocations, with their local offsets.

    Raises:
        BackendUnavailable: No allocation contains a part of a span.
    """
    parts: list[Span] = []
    shifts: list[int] = []
    pairs = sorted(zip(bases, opened, strict=True))
    for first, end in spans:
        begin = first
        for base, allocation in pairs:
            if base <= begin < base + allocation.nbytes and begin < end:
                stop = min(end, base + allocation.nbytes)
                parts.append((begin, stop))
                shifts.append(allocation.address - base)
                begin = stop
        if begin < end:
            raise BackendUnavailable(
                f"local: {end - begin} bytes of the window at {begin:#x} are in no "
                f"allocation that the peer shares"
            )
    return parts, shifts


def _failed(device: Device, error: Exception) -> DeviceFailed:
    return DeviceFailed(f"{device} failed: {error}")
