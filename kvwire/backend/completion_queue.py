"""Reports on the loop what a lane's thread has moved."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvwire.limits import LANE_WAKEUP_BYTES

T = TypeVar("T")


class CompletionQueue(Generic[T]):
    """Takes what is done from a thread, and tells the loop of one wake-up's bytes.

    Args:
        call_soon: Calls something on the loop, from any thread; raises RuntimeError
            once the loop is closed.
        tell: Told on the loop what is done, in its order.
        nbytes: How many bytes one of them has moved.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        tell: Callable[[list[T]], None],
        nbytes: Callable[[T], int],
    ) -> None:
        self._call_soon = call_soon
        self._tell = tell
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._done: deque[T] = deque()

    def put(self, done: Iterable[T]) -> None:
        """Have the loop told of these as well."""
        with self._lock:
            awake = bool(self._done)
            self._done.extend(done)  # bounded: LANE_PAYLOADS_MAX
            due = bool(self._done) and not awake
        if due:
            self.on_loop(self._deliver)

    def leave(self, last_word: Callable[[], None]) -> None:
        """Call this on the loop once everything before it is reported."""
        self.on_loop(lambda: self._leave(last_word))

    def on_loop(self, call: Callable[[], None]) -> None:
        """Call something on the loop; nothing if that is closed.

        Whoever waited for it is gone with the loop.
        """
        try:
            self._call_soon(call)
        except RuntimeError:
            return

    def _deliver(self) -> None:
        """Tell of what is done, and let the loop do something else in between."""
        told: list[T] = []
        budget = LANE_WAKEUP_BYTES
        with self._lock:
            while self._done and budget > 0:
                told.append(self._done.popleft())
                budget -= self._nbytes(told[-1])
            more = bool(self._done)
        if told:
            self._tell(told)
        if more:
            self.on_loop(self._deliver)

    def _leave(self, last_word: Callable[[], None]) -> None:
        if self._done:
            self._deliver()
            self.leave(last_word)
        else:
            last_word()
