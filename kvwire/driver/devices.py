"""The devices whose memory one communicator moves, opened on first use."""

from __future__ import annotations

import asyncio
import threading

from kvwire.errors import BackendUnavailable
from kvwire.memory.device.copy_engine import CopyEngine, StreamWaiters
from kvwire.memory.device.ops import DeviceOps, Event, device_errors
from kvwire.memory.device.registry import device_ops
from kvwire.types import Device


class Devices:
    """Streams and threads for devices, used by one loop.

    Args:
        chunk_bytes: The most bytes that one copy moves.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, chunk_bytes: int) -> None:
        self._loop = loop
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        # At most the number of devices in this host.
        self._copy_engines: dict[Device, CopyEngine] = {}
        self._waiters: dict[Device, StreamWaiters] = {}
        self._closed = False

    def copy_engine(self, device: Device) -> CopyEngine:
        """Return the copy engine for a device's memory. Call it on the loop.

        Raises:
            BackendUnavailable: The device does not work, or the communicator is closed.
        """
        if self._closed:
            raise BackendUnavailable(f"{device}: the communicator is closed")
        if device not in self._copy_engines:
            with device_errors(device):
                # bounded by the devices of this host
                self._copy_engines[device] = CopyEngine(
                    device_ops(device),
                    self._loop.call_soon_threadsafe,
                    self._chunk_bytes,
                )
        return self._copy_engines[device]

    def queued(self, device: Device) -> Event:
        """Return an event behind the work that the calling thread has queued.

        It is recorded on the current stream of the thread's library. Thread-safe.

        Raises:
            BackendUnavailable: The device does not work.
        """
        with device_errors(device):
            return device_ops(device).record_current()

    def waiters(self, ops: DeviceOps) -> StreamWaiters:
        """Return the threads that wait for a device's events. Thread-safe."""
        with self._lock:
            if ops.device not in self._waiters:
                # bounded by the devices of this host
                self._waiters[ops.device] = StreamWaiters(
                    ops, self._loop.call_soon_threadsafe
                )
            return self._waiters[ops.device]

    def close(self) -> None:
        """Release every stream once its work is done; never blocks."""
        self._closed = True
        with self._lock:
            for waiters in self._waiters.values():
                waiters.close()
            self._waiters.clear()
        for copy_engine in self._copy_engines.values():
            copy_engine.close()
        self._copy_engines.clear()
