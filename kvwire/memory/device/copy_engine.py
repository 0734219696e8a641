"""Moves one device's memory, for all connections of a communicator.

There is one stream out of the device and one into it, each with a completion thread and
with device memory for gathered fragments. A stream works in order, so one such buffer
is enough: the next gather waits for the copy before it. The wait costs a few
microseconds per chunk, while the chunk's copy over PCIe takes many times as long.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from typing import Final, TypeAlias

from kvwire.errors import begin_thread
from kvwire.kv.fragments import Fragments
from kvwire.memory.device.ops import DeviceOps, Event, Stream

logger: logging.Logger = logging.getLogger("kvwire.devices")

CallSoon = Callable[[Callable[[], None]], object]
Done: TypeAlias = Callable[[Exception | None], None]
"""Called on the loop when an event has fired, with None, or with the device's error."""

# Queueing one copy takes the host some microseconds, in which PCIe moves 100 KB. If a
# chunk needs more copies than this, one gather and one copy are cheaper.
RUNS_MAX: Final = 8

# The most threads that sleep until callers' events fire, each for one stream at a time.
# An engine has a few such streams; with more than this, some share a thread.
WAITERS_MAX: Final = 16


class CopyEngine:
    """Copies between one device and pinned memory, for one loop.

    Args:
        ops: The device.
        call_soon: Schedules a call on the loop, from any thread.
        slot_bytes: The most bytes that are moved at once.

    Raises:
        BackendUnavailable: A thread cannot be started; nothing is left of the engine.

    Attributes:
        failed: The reason if the device has failed, which is permanent; else "".
        kept: What failed copies may still touch; it is never freed.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon, slot_bytes: int) -> None:
        self.ops = ops
        self.slot_bytes = slot_bytes
        self.failed = ""
        self.kept: list[object] = []
        # The threads start here, where a lack of them is no failure of the device yet.
        with ExitStack() as undo:
            self.outbound: WatchedStream = WatchedStream(ops, call_soon, "out of")
            undo.callback(self.outbound.close)
            self.inbound: WatchedStream = WatchedStream(ops, call_soon, "into")
            undo.callback(self.inbound.close)
            self._gathered: Fragments = self.outbound.stream.buffer(slot_bytes)
            self._packed: Fragments = self.inbound.stream.buffer(slot_bytes)
            undo.pop_all()

    @property
    def landed(self) -> Event:
        """Return an event that fires after all copies into the device queued so far."""
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
        if self.kept:
            # bounded: the copies that were in progress when a device failed
            _kept.append((self.kept, self._gathered, self._packed))


_kept: Final[list[object]] = []
"""The memory of failed copies of engines that are closed.

A device that has failed proves nothing. Pinned memory would be reused for another copy,
and device memory freed, while the failed copy may still touch both.
"""


class StreamWaiters:
    """Waits for events that callers recorded on their own streams.

    Events of one stream fire in order, so one thread sleeps on them, one after the
    other. Events of different streams get different threads, so a kernel that never
    ends holds up only its own stream. A thread serves one stream for as long as that
    stream has events to wait for, and then another stream; streams share a thread only
    when all `WAITERS_MAX` threads are in use.

    A caller's event may have been created so that waiting for it spins; so a stream of
    ours waits for it, and a thread sleeps on our own event behind it.

    Args:
        ops: The device.
        call_soon: Schedules a call on the loop, from any thread.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon) -> None:
        self._ops = ops
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        # bounded: the streams with events that have not fired
        self._serving: dict[Hashable, _Waiter] = {}

    def wait(self, event: object, done: Done, source: Hashable = None) -> None:
        """Call ``done`` on the loop when the event has fired; from any thread.

        Args:
            event: An event of kvwire or of a library.
            done: Gets None or the device's error.
            source: For an event of a library, which does not name its stream: an object
                that records its events in order, such as a transfer.
        """
        stream = event.recorded_on if isinstance(event, Event) else source
        with self._lock:
            waiter = self._serving.get(stream) or self._least_busy()
            waiter.watched.stream.wait(event)

            def fired(error: Exception | None) -> None:
                with self._lock:
                    waiter.unfired[stream] -= 1
                    if not waiter.unfired[stream]:
                        del waiter.unfired[stream]
                        del self._serving[stream]
                done(error)

            waiter.watched.watch(fired)
            # Only now, since an event that is not watched never fires.
            waiter.unfired[stream] += 1
            self._serving[stream] = waiter

    def close(self) -> None:
        """End the threads once every event has fired; never blocks."""
        with self._lock:
            for waiter in self._waiters:
                waiter.watched.close()

    def _least_busy(self) -> _Waiter:
        """Return a waiter for a stream that has none."""
        least = min(self._waiters, key=lambda one: one.unfired.total(), default=None)
        if least is not None and (
            not least.unfired or len(self._waiters) == WAITERS_MAX
        ):
            return least
        made = _Waiter(WatchedStream(self._ops, self._call_soon, "waiter of"))
        self._waiters.append(made)  # bounded: WAITERS_MAX
        return made


class _Waiter:
    """A stream of ours, and the number of events it waits for, by their own streams."""

    def __init__(self, watched: WatchedStream) -> None:
        self.watched = watched
        self.unfired: Counter[Hashable] = Counter()


class WatchedStream:
    """A device stream, and the thread that reports its events.

    Call ``watch`` after queueing work on the stream.

    Raises:
        BackendUnavailable: The thread cannot be started.

    Attributes:
        last: The last event that has fired.
    """

    def __init__(self, ops: DeviceOps, call_soon: CallSoon, name: str) -> None:
        self.last: Event | None = None
        self._completions = CompletionThread(f"kvwire {name} {ops.device}", call_soon)
        try:
            self.stream: Stream = ops.stream()
        except BaseException:
            self._completions.close()
            raise

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
    """Reports a stream's fired events to the loop, in order and without polling.

    One thread sleeps on the oldest event. Events that fire before the loop wakes are
    reported together. A callable queued in the stream (``cudaLaunchHostFunc``) would
    instead hold up the device until it got the GIL.

    Args:
        name: The thread's name.
        call_soon: Schedules a call on the loop, from any thread; raises RuntimeError
            once the loop is closed.

    Raises:
        BackendUnavailable: No thread can be started.
    """

    def __init__(self, name: str, call_soon: CallSoon) -> None:
        self._call_soon = call_soon
        self._queue: queue.SimpleQueue[tuple[Event, Done] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._fired: list[tuple[Done, Exception | None]] = []
        self._closed = False
        begin_thread(threading.Thread(target=self._run, name=name, daemon=True))

    def watch(self, event: Event, done: Done) -> None:
        """Call ``done`` on the loop when the event has fired. Thread-safe."""
        with self._lock:
            assert not self._closed, "an event was given to a closed CompletionThread"
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
                # No waiter is left on a closed loop.
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
                # The other events may belong to other connections, whose memory would
                # be held for ever.
                logger.exception("a bug of kvwire")


def _outcome(event: Event) -> Exception | None:
    try:
        event.synchronize()
    except Exception as exc:  # noqa: BLE001 - the library's own errors, passed on
        return exc
    return None
