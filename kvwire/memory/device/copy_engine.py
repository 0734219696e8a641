"""What all connections of a communicator share to move the memory of one device.

Two streams of kvwire's own, out of the device and into it, each with a completion
thread; memory on the device for what is gathered. A stream does its work in order, so
one such buffer serves it: the next gather waits for the copy before. That costs a few
microseconds of each chunk's copy over PCIe, which is many times as long as its gather.
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
"""Told on the loop that an event has fired, or how the device failed."""

# To queue one copy takes the host some microseconds, in which PCIe moves 100 KB. More
# copies than this in a chunk cost more than one gather and one copy.
RUNS_MAX: Final = 8

# Events of different producers fire in any order, and a completion thread sleeps on
# one. So many transfers do not hold each other up.
_WAITERS: Final = 4


class CopyEngine:
    """Copies between one device and pinned memory, for one loop.

    Args:
        ops: The device.
        call_soon: Calls something on the loop, from any thread.
        slot_bytes: The most bytes that are moved at once.

    Attributes:
        failed: How the device has failed, which it does for good; "" if it has not.
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
        """Return an event behind which lies all that has landed."""
        return self.inbound.last or self.inbound.stream.record()

    def to_host(self, source: Fragments, slot: memoryview, done: Done) -> None:
        """Copy device memory into a pinned slot of the same length.

        Both stay as they are, and alive, until ``done`` is called on the loop.
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
        """Let go of the streams once their work is done; never blocks."""
        self.outbound.close()
        self.inbound.close()


class StreamWaiters:
    """Waits for the events of a producer's own streams, without its help.

    Its events may have been made so that whoever waits for them spins. So a stream of
    ours waits for each, and a thread sleeps on an event of our own behind it.

    Args:
        ops: The device.
        call_soon: Calls something on the loop, from any thread.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon) -> None:
        self._ops = ops
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._turn = itertools.cycle(range(_WAITERS))
        # Made with the first transfer that needs it.
        self._waiters: dict[int, WatchedStream] = {}

    def assign(self) -> int:
        """Pick a transfer's waiter, for all its events. From any thread."""
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
    """Owns a stream of a device, and the thread that tells of its events.

    Attributes:
        last: The last event that has fired.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon, name: str) -> None:
        self.stream: Stream = ops.stream()
        self.last: Event | None = None
        self._completions = CompletionThread(f"kvwire {name} {ops.device}", call_soon)

    def watch(self, done: Done) -> None:
        """Call ``done`` on the loop when all that is queued by now is over."""
        event = self.stream.record()

        def fired(error: Exception | None) -> None:
            self.last = event
            done(error)

        self._completions.watch(event, fired)

    def close(self) -> None:
        """Let go of the stream once its work is done; never blocks."""
        self.stream.close()
        self._completions.close()


class CompletionThread:
    """Tells the loop that events of one stream have fired, in their order; no polling.

    One thread sleeps on the oldest event. The loop is woken once for all that fire
    before it looks. A callable queued in the stream instead (``cudaLaunchHostFunc``)
    would hold up the device until it got the GIL.

    Args:
        name: Of the thread.
        call_soon: Calls something on the loop, from any thread; raises RuntimeError
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
                # A loop that is closed has nobody left who waits for this.
                with suppress(RuntimeError):
                    self._call_soon(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            fired, self._fired = self._fired, []
        for done, error in fired:
            try:
                done(error)
            except Exception:
                # The others may be of other connections, whose memory would stay held.
                logger.exception("a bug of kvwire")


def _outcome(event: Event) -> Exception | None:
    try:
        event.synchronize()
    except Exception as exc:  # noqa: BLE001 - the library's own errors, passed on
        return exc
    return None
