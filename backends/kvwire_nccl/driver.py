"""The thread of one direction: it executes the steps, and reports to the loop.

While moves are in progress the thread polls them at a bounded rate: NCCL has no call
that waits for an operation, an error and a deadline at once. Otherwise it sleeps. If a
library call hangs, it blocks only this thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from kvwire.backend.completion_queue import CompletionQueue
from kvwire.errors import begin_thread
from kvwire_nccl.direction_state import DirectionState, DirectionStep, PayloadMove
from kvwire_nccl.nccl import MoveProgress, NcclMove, NcclPipe

_log = logging.getLogger("kvwire.nccl")

# The time between two polls of running moves. A chunk of 1 MiB takes about as long on
# PCIe 4; polling more often would only take the GIL from the loop.
LOOK_S: Final = 0.0002
# The time between two polls of a communicator that is connecting, which takes from 10
# ms to seconds.
START_LOOK_S: Final = 0.002


class Driver:
    """Runs one direction on a thread.

    Args:
        pipe: The direction, which belongs to the thread from now on.
        state: Its state.
        name: The thread's name.
        call_soon: Schedules a call on the loop, from any thread; raises RuntimeError
            once the loop is closed.
        moved: Called on the loop with the moves that are done.
        gone: Called on the loop as the last callback, when no memory is touched any
            more, with the error that ended the direction, or None.
    """

    def __init__(
        self,
        pipe: NcclPipe,
        state: DirectionState,
        name: str,
        *,
        call_soon: Callable[[Callable[[], None]], object],
        moved: Callable[[list[PayloadMove]], None],
        gone: Callable[[Exception | None], None],
    ) -> None:
        self._pipe = pipe
        self._state = state
        self._completions = CompletionQueue(call_soon, moved, lambda job: job.nbytes)
        self._on_gone = gone
        # Guards the state; notified when another thread has changed it.
        self._changed = threading.Condition()
        self._moves: list[NcclMove] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        begin_thread(self._thread)

    def submit(self, jobs: Iterable[PayloadMove]) -> None:
        """Queue these moves, in this order."""
        with self._changed:
            for job in jobs:
                self._state.submit(job)
            self._changed.notify()

    def close(self) -> None:
        """End once all moves are done; ``gone`` reports it."""
        with self._changed:
            self._state.close()
            self._changed.notify()

    def abort(self, error: Exception | None = None) -> None:
        """End now; ``gone`` reports when that is complete."""
        with self._changed:
            self._state.fail(error)
            self._changed.notify()

    # --- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        while (step := self._next()) is not DirectionStep.EXIT:
            try:
                self._do(step)
            except Exception as exc:  # noqa: BLE001 - whatever the library raises
                if step is DirectionStep.ABORT:
                    # Its memory is kept alive, because it may still be in use.
                    _log.error(
                        "%s: the abort failed; its memory stays in quarantine",
                        self._thread.name,
                        exc_info=exc,
                    )
                    return
                self.abort(exc)
        self._completions.leave(lambda: self._on_gone(self._state.error))

    def _next(self) -> DirectionStep:
        with self._changed:
            step = self._state.step(time.monotonic())
            while step is DirectionStep.WAIT:
                self._changed.wait()
                step = self._state.step(time.monotonic())
            return step

    def _do(self, step: DirectionStep) -> None:
        match step:
            case DirectionStep.BEGIN:
                self._pipe.begin()
                with self._changed:
                    self._state.begun(time.monotonic())
            case DirectionStep.WATCH_START:
                self._watch_start()
            case DirectionStep.MOVE:
                with self._changed:
                    job = self._state.next_job(time.monotonic())
                # Without the lock, so that the lane can continue while the library
                # works.
                self._moves.append(self._pipe.move(job.payload, job.nbytes))
            case DirectionStep.WATCH:
                self._watch()
            case _:
                self._pipe.abort()
                self._moves.clear()
                with self._changed:
                    self._state.quiet()

    def _watch_start(self) -> None:
        if self._pipe.taken():
            with self._changed:
                self._state.up()
        else:
            self._pause(START_LOOK_S)

    def _watch(self) -> None:
        """Poll the moves in progress, which complete in stream order."""
        newest = self._moves[-1].progress()
        if newest is not MoveProgress.QUEUED:
            with self._changed:
                self._state.launched()
        done: list[PayloadMove] = []
        while self._moves and self._moves[0].progress() is MoveProgress.DONE:
            del self._moves[0]
            with self._changed:
                done.append(self._state.done(time.monotonic()))
        if done:
            self._completions.put(done)
            return
        self._pipe.taken()
        self._pause(LOOK_S)

    def _pause(self, seconds: float) -> None:
        """Wait a short time, or until the state is changed from outside."""
        with self._changed:
            self._changed.wait(seconds)
