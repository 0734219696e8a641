"""Moves one device's memory, for all connections of a communicator.

It has two streams of its own, out of the device and into it, each with a completion
thread and with device memory for gathered fragments. A stream does its work in order,
so one such buffer is enough: the next gather waits for the copy before it. That costs a
few microseconds per chunk, while its copy over PCIe takes many times as long.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from kvwire.kv.fragments import Fragments
from kvwire.memory.device.ops import DeviceOps, Event, Stream

logger: logging.Logger = logging.getLogger("kvwire.devices")

CallSoon = Callable[[Callable[[], None]], object]
Done: TypeAlias = Callable[[Exception | None], None]
"""Called on the loop with None when an event has fired, or with a device's error."""

# Queueing one copy costs the host some microseconds, in which PCIe moves 100 KB. With
# more copies than this in a chunk, one gather and one copy are cheaper.
RUNS_MAX: Final = 8

# The number of completion threads for producers' events. Events fire in any order, and
# a thread sleeps on one of them, so transfers on other threads are not held up.
_WAITERS: Final = 4


class CopyEngine:
    """Copies between one device and pinned memory, for one loop.

    Args:
        ops: The device.
        call_soon: Schedules a call on the loop, from any thread.
        slot_bytes: The most bytes that are moved at once.

    Attributes:
        failed: The reason if the device has failed, which is permanent; else "".
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon, slot_bytes: int) -> None:
        self.ops = ops
        self.slot_bytes = slot_bytes
        self.failed = ""
        self.outbound: WatchedStream = WatchedStream(ops, call_soon, "out of")
        self.inbound: WatchedStream = WatchedStream(ops, call_soon, "into")
        self._gathered: Fragments = self.outbound.stream.buffer(slot_bytes)
        self._packed: Fragments = self.inbound.stream.buffer(slot_bytes)

    @property
    def landed(self) -> Event:
        """Return an event that fires after everything landed so far."""
        return self.inbound.last or self.inbound.stream.record()

    def to_host(self, source: Fragments, slot: memoryview, done: Done) -> None:
        """Copy device memory into a pinned slot of the same length.

        Keep both alive and unchanged until ``done`` is called on the loop.
        """
        stream = self.outbound.stream
        if len(source) > RUNS_MAX:
            gathered = self._gathered.slice(0, source.nbytes)
            stream.gather(source, gathered)
            source = gathered
        stream.to_host(source, slot)
        self.outbound.watch(done)

    def to_device(self, slot: memoryview, into: Fragments, done: Done) -> None:
        """Copy a pinned slot into device memory of the same length; as ``to_host``."""
        stream = self.inbound.stream
        if len(into) > RUNS_MAX:
            packed = self._packed.slice(0, into.nbytes)
            stream.to_device(slot, packed)
            stream.scatter(packed, into)
        else:
            stream.to_device(slot, into)
        self.inbound.watch(done)

    def close(self) -> None:
        """Release the streams once their work is done; never blocks."""
        self.outbound.close()
        self.inbound.close()


class StreamWaiters:
    """Waits for events that a producer recorded on its own streams.

    A producer's event may have been created so that waiting for it spins. So a stream
    of ours waits for it, and a thread sleeps on our own event behind it.

    Args:
        ops: The device.
        call_soon: Schedules a call on the loop, from any thread.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon) -> None:
        self._ops = ops
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._turn = itertools.cycle(range(_WAITERS))
        # Created with the first transfer that needs them.
        self._waiters: dict[int, WatchedStream] = {}

    def assign(self) -> int:
        """Return the number of a waiter, for all events of one transfer.

        From any thread.
        """
        return next(self._turn)

    def wait(self, waiter: int, event: object, done: Done) -> None:
        """Call ``done`` on the loop when the event has fired. From any thread."""
        with self._lock:
            if waiter not in self._waiters:
                self._waiters[waiter] = WatchedStream(
                    self._ops, self._call_soon, "waiter of"
                )
            self._waiters[waiter].stream.wait(event)
            self._waiters[waiter].watch(done)

    def close(self) -> None:
        """End the threads once every event has fired; never blocks."""
        with self._lock:
            for waiter in self._waiters.values():
                waiter.close()


class WatchedStream:
    """A device stream, and the thread that reports its events.

    Attributes:
        last: The last event that has fired.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon, name: str) -> None:
        self.stream: Stream = ops.stream()
        self.last: Event | None = None
        self._completions = CompletionThread(f"kvwire {name} {ops.device}", call_soon)

    def watch(self, done: Done) -> None:
        """Call ``done`` on the loop when all work queued so far has ended."""
        event = self.stream.record()

        def fired(error: Exception | None) -> None:
            self.last = event
            done(error)

        self._completions.watch(event, fired)

    def close(self) -> None:
        """Release the stream once its work is done; never blocks."""
        self.stream.close()
        self._completions.close()


class CompletionThread:
    """Reports to the loop, without polling, the fired events of a stream, in order.

    One thread sleeps on the oldest event. Events that fire before the loop wakes are
    reported together. A callable queued in the stream instead (``cudaLaunchHostFunc``)
    would hold up the device until it got the GIL.

    Args:
        name: The thread's name.
        call_soon: Schedules a call on the loop, from any thread; raises RuntimeError
            once the loop is closed.
    """

    def __init__(self, name: str, call_soon: CallSoon) -> None:
        self._name = name
        self._call_soon = call_soon
        self._queue: queue.SimpleQueue[tuple[Event, Done] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._fired: list[tuple[Done, Exception | None]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, event: Event, done: Done) -> None:
        """Call ``done`` on the loop when the event has fired. From any thread."""
        with self._lock:
            assert not self._closed, "a closed completions was given an event"
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                thread.start()
                self._thread = thread
            self._queue.put((event, done))

    def close(self) -> None:
        """End the thread once every event has fired; never blocks."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        while (watched := self._queue.get()) is not None:
            event, done = watched
            error = _outcome(event)
            with self._lock:
                is_woken = bool(self._fired)
                self._fired.append((done, error))
            if not is_woken:
                # Nobody waits on a closed loop.
                with suppress(RuntimeError):
                    self._call_soon(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            fired = self._fired
            self._fired = []
        for done, error in fired:
            try:
                done(error)
            except Exception:
                # The others may belong to other connections, and would hold their
                # memory for ever.
                logger.exception("a bug of kvwire")


def _outcome(event: Event) -> Exception | None:
    try:
        event.synchronize()
    except Exception as exc:  # noqa: BLE001 - the library's own errors, passed on
        return exc
    return None
