"""Learning on the loop that a device has done its work, without polling.

One thread sleeps on the oldest event. When that fires, every event behind it that has
fired as well is taken along, and the loop is woken once for all of them. A callable
queued in the stream instead (``cudaLaunchHostFunc``) would hold up the device until it
got the GIL.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from kvwire.memory.device.ops import Event

logger: logging.Logger = logging.getLogger("kvwire.devices")

Done: TypeAlias = Callable[[Exception | None], None]
"""Told on the loop that an event has fired, or how the device failed."""


class CompletionThread:
    """Waits for the events of one stream, in their order.

    Args:
        name: Of the thread.
        call_soon: Calls something on the loop, from any thread; raises RuntimeError
            once the loop is closed.
    """

    def __init__(
        self, name: str, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self.watched: int = 0
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
            self.watched += 1
            self._queue.put((event, done))

    def close(self) -> None:
        """End the thread once every event has fired; never blocks."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        fired: list[tuple[Done, Exception | None]] = []
        while (watched := self._queue.get()) is not None:
            event, done = watched
            if not _has_fired(event):
                self._report(fired)  # before going to sleep
            fired.append((done, _outcome(event)))
            if self._queue.empty():
                self._report(fired)
        self._report(fired)

    def _report(self, fired: list[tuple[Done, Exception | None]]) -> None:
        """Hand over what has fired, and wake the loop unless that is under way."""
        if not fired:
            return
        with self._lock:
            awake = bool(self._fired)
            self._fired += fired
        fired.clear()
        if awake:
            return
        try:
            self._call_soon(self._deliver)
        except RuntimeError:
            # The loop is closed: whoever waited for this is gone with it.
            return

    def _deliver(self) -> None:
        with self._lock:
            fired, self._fired = self._fired, []
            self.watched -= len(fired)
        for done, error in fired:
            try:
                done(error)
            except Exception:
                # The others may be of other connections, whose memory would stay held.
                logger.exception("a bug of kvwire")


def _has_fired(event: Event) -> bool:
    """Tell whether it is over; a failed device raises when waited for."""
    try:
        return event.query()
    except Exception:  # noqa: BLE001 - whatever the library raises, it is over
        return True


def _outcome(event: Event) -> Exception | None:
    try:
        event.synchronize()
    except Exception as exc:  # noqa: BLE001 - the library's own errors, passed on
        return exc
    return None
