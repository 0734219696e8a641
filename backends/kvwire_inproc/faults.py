"""A pipe that does to its frames what a :class:`~kvwire_inproc.plan.FaultPlan` says.

All of this breaks the first promise of :mod:`kvwire.backend` on purpose: the core has
to notice by sequence numbers, checksums, deadlines and liveness. The other promises
hold. Memory is lent for as long as a frame is held back, and each token is reported
once.

What happens to a frame is decided when it comes to the head of the queue, so that it
depends on the seed and the frame's number, and not on how the loops take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import RLock

from kvwire.errors import ConnectionLost
from kvwire.memory.copy import copy
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame
from kvwire_inproc.plan import Fault, FaultDecision, FaultPlan, Schedule


class FaultyPipe(InprocPipe):
    """Carries most frames from one link to its peer."""

    wake_sender: Callable[[], None]
    wake_receiver: Callable[[], None]

    def __init__(self, lock: RLock, plan: FaultPlan, direction: str) -> None:
        super().__init__(lock)
        self._schedule = Schedule(plan, direction)
        self._delay_s = plan.delay_s
        # Frames that others overtake at this moment.
        self._overtaken: list[PipeFrame] = []
        # The head waits for its time, and everything with it.
        self._delaying = False
        self._stalled = False
        self._timers: set[asyncio.TimerHandle] = set()

    def head(self) -> PipeFrame | None:
        """Return the frame to deliver now, after whatever befell those before it."""
        with self._lock:
            while not (self._stalled or self._delaying):
                frame = super().head()
                if frame is None or frame.judged:
                    return frame
                frame.judged = True
                self._befall(frame, next(self._schedule))
            return None

    def outcome(self) -> PipeEnd | None:
        """Return how the sender ended; a stalled pipe does not say."""
        return None if self._stalled else super().outcome()

    @property
    def drained(self) -> bool:
        """Tell whether no frame waits, at the head or held back."""
        return super().drained and not self._overtaken

    def _clear(self) -> None:
        super()._clear()
        self._overtaken.clear()

    def retire(self) -> None:
        """End the receiver on its own loop, where the timers are."""
        super().retire()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _befall(self, frame: PipeFrame, decision: FaultDecision) -> None:
        faults = decision.faults
        if Fault.KILL in faults:
            self.end(ConnectionLost("the link was killed by its fault plan"))
        elif Fault.STALL in faults:
            self._stalled = True
        elif Fault.DROP in faults:
            self._remove(frame)
            self.wake_sender()
        else:
            if Fault.DUPLICATE in faults:
                self._duplicate(frame)
            if Fault.CORRUPT in faults:
                _flip_bit(self._frames[0], decision.where)
            if Fault.REORDER in faults:
                self._set_aside(frame)
            elif Fault.DELAY in faults:
                self._delay()

    def _duplicate(self, frame: PipeFrame) -> None:
        """Put a copy before the frame: its memory is lent until both are done."""
        twin = PipeFrame(frame.header, frame.payload, None)
        twin.judged = True
        self._frames.appendleft(twin)
        self.queued_bytes += twin.nbytes

    def _delay(self) -> None:
        self._delaying = True
        self._later(self._resume)

    def _resume(self) -> None:
        self._delaying = False

    def _set_aside(self, frame: PipeFrame) -> None:
        self._frames.remove(frame)
        self._overtaken.append(frame)
        self._later(lambda: self._put_back(frame))

    def _put_back(self, frame: PipeFrame) -> None:
        if frame in self._overtaken:
            self._overtaken.remove(frame)
            # Behind what is being delivered or has come back before.
            judged = sum(1 for waiting in self._frames if waiting.judged)
            self._frames.insert(judged, frame)

    def _later(self, change: Callable[[], None]) -> None:
        def due() -> None:
            self._timers.discard(timer)
            with self._lock:
                change()
            self.wake_receiver()

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._delay_s, due)
        self._timers.add(timer)


def _flip_bit(frame: PipeFrame, where: float) -> None:
    """Flip one bit of a copy: the sender's memory is not ours to change.

    Header and payload are hit equally often, however long the payload.
    """
    in_header = where < 0.5 or frame.payload is None
    if in_header:
        data = bytearray(frame.header)
    else:
        data = bytearray(frame.payload_bytes)
        assert frame.payload is not None
        copy(frame.payload, memoryview(data))
    bit = int(where * 2 % 1 * len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    if in_header:
        frame.header = bytes(data)
    else:
        frame.payload = memoryview(data)
