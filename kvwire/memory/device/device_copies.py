"""Blocks of a device's cache, copied to and from a store's memory by pinned pieces.

A thread of the store queues one piece while the device moves the other::

    put: cache --gather--> slot 0 or 1 --memcpy--> images in memory
    get: images --memcpy--> slot 0 or 1 --scatter--> cache

The device may touch a cache until the event behind its last piece has fired; a copy
returns after that and never before. A device that fails proves nothing any more: what
was on its way into a cache has to count as touched for good.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Final

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import STORE_PIECE_BYTES
from kvwire.memory.copy import copy
from kvwire.memory.device.copy_engine import CopyEngine
from kvwire.memory.device.ops import DeviceOps, device_ops, working
from kvwire.types import Device

_SLOTS: Final = 2


class DeviceFailed(BackendUnavailable):
    """Says that a device has failed, which it does for good."""


class DeviceCopies:
    """Copies between caches of devices and host memory; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # As many as there are devices in this host.
        self._copiers: dict[Device, _DeviceCopier] = {}

    def prepare(self, device: Device | None, after: object) -> object:
        """Have streams and memory for a device; return the event that a copy waits for.

        Args:
            device: Where a cache lies; None for host memory, which waits for nothing.
            after: An event behind which its blocks may be touched; None for all that
                this thread has queued on its current stream.

        Raises:
            UsageError: It is no event of this device.
            BackendUnavailable: The device does not work, or gives no pinned memory.
        """
        if device is None:
            raise UsageError("after=: nothing is queued for a cache in host memory")
        ops = device_ops(device)
        if after is not None and not ops.owns(after):
            raise UsageError(
                f"after={type(after).__name__}: pass an event of {device} that was "
                f"recorded behind what uses the blocks, or None"
            )
        with self._lock:
            if device not in self._copiers:
                with working(device):
                    self._copiers[device] = _DeviceCopier(ops)
        return ops.record_current() if after is None else after

    def copy(self, source: Fragments, destination: Fragments, after: object) -> None:
        """Copy between two lists of one length, of which one is a device's. Blocks."""
        device = source.device or destination.device
        assert device is not None
        self._copiers[device].copy(source, destination, after)

    def close(self) -> None:
        """Let go of the devices, of which none copies any more."""
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()


class _DeviceCopier:
    """Owns two streams of one device, and two pinned slots for each."""

    def __init__(self, ops: DeviceOps) -> None:
        memory = ops.pinned(2 * _SLOTS * STORE_PIECE_BYTES)
        views = [
            memory[begin : begin + STORE_PIECE_BYTES]
            for begin in range(0, len(memory), STORE_PIECE_BYTES)
        ]
        # Each call of a stream is queued by one thread at a time.
        self._outbound = threading.Lock(), views[:_SLOTS]
        self._inbound = threading.Lock(), views[_SLOTS:]
        # Its events are reported on its own threads, which only pass them on.
        self._engine = CopyEngine(ops, lambda report: report(), STORE_PIECE_BYTES)

    def copy(self, source: Fragments, destination: Fragments, after: object) -> None:
        out = source.device is not None
        lock, slots = self._outbound if out else self._inbound
        move = self._out if out else self._into
        with lock:
            try:
                if self._engine.failed:
                    raise RuntimeError(self._engine.failed)
                move(source, destination, after, slots)
            except Exception as exc:
                self._engine.failed = str(exc)
                device = self._engine.ops.device
                raise DeviceFailed(f"{device} failed: {exc}") from exc

    def _out(
        self,
        cache: Fragments,
        images: Fragments,
        after: object,
        slots: list[memoryview],
    ) -> None:
        done: SimpleQueue[Exception | None] = SimpleQueue()
        self._engine.outbound.stream.wait(after)
        filling: deque[tuple[memoryview, Fragments]] = deque()  # bounded: _SLOTS

        def empty_oldest() -> None:
            _fired(done)
            copy(*filling.popleft())

        for begin, nbytes, slot in _pieces(cache.nbytes, slots):
            if len(filling) == _SLOTS:
                empty_oldest()
            self._engine.to_host(cache.slice(begin, nbytes), slot, done.put)
            filling.append((slot, images.slice(begin, nbytes)))
        while filling:
            empty_oldest()

    def _into(
        self,
        images: Fragments,
        cache: Fragments,
        after: object,
        slots: list[memoryview],
    ) -> None:
        done: SimpleQueue[Exception | None] = SimpleQueue()
        self._engine.inbound.stream.wait(after)
        under_way = 0
        for begin, nbytes, slot in _pieces(images.nbytes, slots):
            if under_way == _SLOTS:
                _fired(done)
                under_way -= 1
            copy(images.slice(begin, nbytes), slot)
            self._engine.to_device(slot, cache.slice(begin, nbytes), done.put)
            under_way += 1
        for _ in range(under_way):
            _fired(done)

    def close(self) -> None:
        self._engine.close()


def _pieces(
    nbytes: int, slots: list[memoryview]
) -> Iterator[tuple[int, int, memoryview]]:
    """Where each piece begins, its bytes, and the slot that it goes through."""
    for number, begin in enumerate(range(0, nbytes, STORE_PIECE_BYTES)):
        length = min(STORE_PIECE_BYTES, nbytes - begin)
        yield begin, length, slots[number % _SLOTS][:length]


def _fired(done: SimpleQueue[Exception | None]) -> None:
    """Wait for the oldest piece, asleep."""
    if (error := done.get()) is not None:
        raise error
