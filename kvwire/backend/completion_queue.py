"""A queue through which a lane's thread reports moved payloads to the event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvwire.limits import LANE_WAKEUP_BYTES

T = TypeVar("T")


class CompletionQueue(Generic[T]):
    """Passes completions from a thread to the loop, in batches of limited bytes.

    Args:
        call_soon: Schedules a call on the loop, from any thread; raises RuntimeError
            once the loop is closed.
        report: Called on the loop with completions, in order.
        nbytes: Returns how many bytes a completion has moved.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        report: Callable[[list[T]], None],
        nbytes: Callable[[T], int],
    ) -> None:
        self._call_soon = call_soon
        self._report = report
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._done: deque[T] = deque()

    def put(self, done: Iterable[T]) -> None:
        """Queue completions, and wake the loop unless a wake-up is already due."""
        with self._lock:
            awake = bool(self._done)
            self._done.extend(done)  # bounded: LANE_PAYLOADS_MAX
            due = bool(self._done) and not awake
        if due:
            self.on_loop(self._deliver)

    def leave(self, last_word: Callable[[], None]) -> None:
        """Call ``last_word`` on the loop after all queued completions."""
        self.on_loop(lambda: self._leave(last_word))

    def on_loop(self, call: Callable[[], None]) -> None:
        """Schedule a call on the loop; if the loop is closed, do nothing.

        With a closed loop, no code is left that waits for the call.
        """
        try:
            self._call_soon(call)
        except RuntimeError:
            return

    def _deliver(self) -> None:
        """Report a wake-up's worth of completions, and schedule the rest.

        In between, the loop can run other tasks.
        """
        batch: list[T] = []
        budget = LANE_WAKEUP_BYTES
        with self._lock:
            while self._done and budget > 0:
                batch.append(self._done.popleft())
                budget -= self._nbytes(batch[-1])
            more = bool(self._done)
        if batch:
            self._report(batch)
        if more:
            self.on_loop(self._deliver)

    def _leave(self, last_word: Callable[[], None]) -> None:
        if self._done:
            self._deliver()
            self.leave(last_word)
        else:
            last_word()
