"""Copies between a device's cache and a store's memory, through pinned slots.

A thread of the store queues one piece while the device moves the other::

    put: cache --gather--> slot 0 or 1 --memcpy--> images in memory
    get: images --memcpy--> slot 0 or 1 --scatter--> cache

The device may touch a cache until the event behind its last piece has fired; a copy
returns only after that. After a device has failed, its events prove nothing: it may go
on writing into a cache that was being filled, for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Final

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.copy import copy
from kvwire.memory.device.copy_engine import CopyEngine, StreamWaiters
from kvwire.memory.device.ops import DeviceOps, Event, device_errors
from kvwire.memory.device.registry import device_ops
from kvwire.types import Device

_SLOTS: Final = 2
# The part of a device's cache that one pinned slot takes at a time: its copy over PCIe
# takes a fifth of a millisecond, many times as long as queueing it. Each store has four
# pinned slots.
PIECE_BYTES: Final = 4 * MIB


class DeviceFailed(BackendUnavailable):
    """A device has failed, which is permanent."""


class DeviceCopies:
    """Copies between caches of devices and host memory, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # One for each device of this host.
        self._copiers: dict[Device, _DeviceCopier] = {}

    def prepare(self, device: Device | None, after: object) -> object:
        """Allocate streams and memory for a device; return the event to wait for.

        Args:
            device: The cache's device; None for host memory, where ``after`` is an
                error.
            after: An event behind which the blocks may be touched; None for all work
                that this thread has queued on its current stream.

        Raises:
            UsageError: ``after`` is not an event of this device.
            BackendUnavailable: The device does not work, or gives no pinned memory.
        """
        if device is None:
            raise UsageError(
                "after=: it is only for device memory, and this cache is in host memory"
            )
        ops = device_ops(device)
        if after is not None and not ops.owns(after):
            raise UsageError(
                f"after={type(after).__name__}: pass an event of {device} recorded "
                "after the last operation that uses the blocks, or None"
            )
        self.open(device)
        return ops.record_current() if after is None else after

    def open(self, device: Device) -> None:
        """Allocate streams and memory for a device, the first time.

        Raises:
            BackendUnavailable: The device does not work, or gives no pinned memory.
        """
        with self._lock:
            if device not in self._copiers:
                with device_errors(device):
                    self._copiers[device] = _DeviceCopier(device_ops(device))

    def waiters(self, device: Device, after: object) -> StreamWaiters | None:
        """Return the waiters of a prepared device; None if the event has fired."""
        if isinstance(after, Event) and after.query():
            return None
        return self._copiers[device].waiters

    def copy(
        self, source: Fragments, destination: Fragments, after: object = None
    ) -> None:
        """Copy between payloads of one length, one of them a device's. Blocks.

        Args:
            source: The bytes.
            destination: Where they go.
            after: An event for which the copy waits, as does every later copy in its
                direction; None for no event.

        Raises:
            DeviceFailed: The device has failed, now or earlier.
        """
        device = source.device or destination.device
        assert device is not None
        self._copiers[device].copy(source, destination, after)

    def close(self) -> None:
        """Release all devices; no copy may be running."""
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()


class _DeviceCopier:
    """Two streams of one device, and two pinned slots for each."""

    def __init__(self, ops: DeviceOps) -> None:
        memory = ops.pinned(2 * _SLOTS * PIECE_BYTES)
        views = [
            memory[begin : begin + PIECE_BYTES]
            for begin in range(0, len(memory), PIECE_BYTES)
        ]
        # Each stream makes the copies of one thread at a time.
        self._outbound = threading.Lock(), views[:_SLOTS]
        self._inbound = threading.Lock(), views[_SLOTS:]
        # The engine's own threads report events, and here only pass them on to the
        # waiting thread.
        self._engine = CopyEngine(ops, lambda report: report(), PIECE_BYTES)
        self.waiters = StreamWaiters(ops, lambda report: report())

    def copy(self, source: Fragments, destination: Fragments, after: object) -> None:
        out = source.device is not None
        lock, slots = self._outbound if out else self._inbound
        way = self._engine.outbound if out else self._engine.inbound
        device = self._engine.ops.device
        with lock:
            if self._engine.failed:
                raise DeviceFailed(f"{device} failed: {self._engine.failed}")
            try:
                if after is not None:
                    way.stream.wait(after)
                self._copy_pieces(source, destination, slots, out=out)
            except Exception as exc:
                # Copies that are in progress may still touch them.
                self._engine.kept += [source, destination, *slots]
                self._engine.failed = str(exc)
                raise DeviceFailed(f"{device} failed: {exc}") from exc

    def _copy_pieces(
        self,
        source: Fragments,
        destination: Fragments,
        slots: list[memoryview],
        *,
        out: bool,
    ) -> None:
        fired: SimpleQueue[Exception | None] = SimpleQueue()
        moving: deque[tuple[memoryview, Fragments]] = deque()  # bounded: _SLOTS

        def end_oldest() -> None:
            if (error := fired.get()) is not None:  # sleeps until the event has fired
                raise error
            slot, target = moving.popleft()
            if out:
                copy(slot, target)

        for number, begin in enumerate(range(0, source.nbytes, PIECE_BYTES)):
            nbytes = min(PIECE_BYTES, source.nbytes - begin)
            piece = source.slice(begin, nbytes)
            target = destination.slice(begin, nbytes)
            if len(moving) == _SLOTS:
                end_oldest()
            slot = slots[number % _SLOTS][:nbytes]
            if out:
                self._engine.to_host(piece, slot, fired.put)
            else:
                copy(piece, slot)
                self._engine.to_device(slot, target, fired.put)
            moving.append((slot, target))
        while moving:
            end_oldest()

    def close(self) -> None:
        self._engine.close()
        self.waiters.close()
