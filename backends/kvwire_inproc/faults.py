"""Plans of faults, and the pipe that injects them.

A plan is a value: printed, it can be pasted into a test, and the same plan gives the
same faults again, frame for frame. A communicator makes its backends without arguments,
so :func:`injected` passes a plan to every :class:`~kvwire_inproc.InprocBackend` made
inside it.

A faulty pipe breaks the first promise of :mod:`kvwire.backend` on purpose: the core has
to notice by sequence numbers, checksums, deadlines and liveness. Memory stays lent
while a frame is held back, and each token is reported once. A frame's faults are drawn
when it reaches the head of the queue. So they depend on the seed and the frame's number
only, not on the order in which the loops run.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from numbers import Real
from threading import RLock
from typing import Final

from kvwire.errors import ConnectionLost, UsageError, wrong_type
from kvwire.memory.copy import copy
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame


class Fault(enum.Flag):
    """The faults that one frame can have; several may be combined."""

    NONE = 0
    DROP = enum.auto()
    DELAY = enum.auto()
    REORDER = enum.auto()
    DUPLICATE = enum.auto()
    CORRUPT = enum.auto()
    STALL = enum.auto()
    KILL = enum.auto()


_CHANCES: Final = ("drop", "delay", "reorder", "duplicate", "corrupt", "stall", "kill")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FaultPlan:
    """The probability of each fault in the frames that one side sends.

    Chances are from 0 to 1, per frame, and independent of each other. Frames are
    counted from 0, for each direction of each link, control frames included.

    Attributes:
        seed: Chooses the schedule.
        drop: The frame is lost, while its sender sees it as sent.
        delay: The frame and all behind it arrive ``delay_s`` later.
        reorder: The frame arrives ``delay_s`` later; those behind it overtake it.
        duplicate: The frame arrives twice in a row.
        corrupt: One bit of the header or of the payload is flipped.
        stall: From this frame on nothing moves, and the end of the link is not reported
            either; it stays open.
        kill: Instead of this frame, both ends get an error.
        delay_s: Seconds, for ``delay`` and ``reorder``.
        stall_after: The number of the first frame that can have ``stall``.
        kill_after: The number of the first frame that can have ``kill``.
        spare: The number of the first frame that can have any other fault, so that a
            handshake gets through.
    """

    seed: int
    drop: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    stall: float = 0.0
    kill: float = 0.0
    delay_s: float = 0.01
    stall_after: int = 0
    kill_after: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        for name in (*_CHANCES, "delay_s", "stall_after", "kill_after", "spare"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise wrong_type(f"fault plan: {name}", value, "a number")
            number = float(value)
            if name in _CHANCES and not 0.0 <= number <= 1.0:
                raise UsageError(
                    f"fault plan: {name}={value!r} must be a probability from 0 to 1"
                )
            if not number >= 0:
                raise UsageError(f"fault plan: {name}={value!r} is below 0")

    def __repr__(self) -> str:
        parts = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"FaultPlan({', '.join(parts)})"


def schedule(plan: FaultPlan, direction: str) -> Iterator[tuple[Fault, float]]:
    """Draw the faults of each frame of one direction of one link, in order.

    Each comes with a number from 0 to 1, which chooses the bit that a corruption flips.
    """
    # Seeding with text gives the same numbers in every Python version and process.
    chance = random.Random(f"{plan.seed}/{direction}")  # noqa: S311 - not a secret
    first = {"stall": plan.stall_after, "kill": plan.kill_after}
    for number in itertools.count():
        faults = Fault.NONE
        for name in _CHANCES:
            # Draw always, so that the faults of a frame depend on its number only.
            drawn = chance.random()
            if drawn < getattr(plan, name) and number >= first.get(name, plan.spare):
                faults |= Fault[name.upper()]
        yield faults, chance.random()


plan_here: ContextVar[FaultPlan | None] = ContextVar(
    "kvwire_inproc_faults", default=None
)
"""The plan for backends that are made in this context; None for no faults."""


@contextmanager
def injected(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Apply ``plan`` to frames sent by backends that are made inside this context."""
    before = plan_here.set(plan)
    try:
        yield plan
    finally:
        plan_here.reset(before)


class FaultyPipe(InprocPipe):
    """A pipe that injects faults on the way from one link to its peer."""

    wake_sender: Callable[[], None]
    wake_receiver: Callable[[], None]

    def __init__(self, lock: RLock, plan: FaultPlan, direction: str) -> None:
        super().__init__(lock)
        self._schedule = schedule(plan, direction)
        self._delay_s = plan.delay_s
        # Frames that are being overtaken by others.
        self._overtaken: list[PipeFrame] = []
        # Whether the first frame, and so everything behind it, is delayed.
        self._delaying = False
        self._stalled = False
        self._timers: set[asyncio.TimerHandle] = set()

    def head(self) -> PipeFrame | None:
        """Return the frame to deliver now, after injecting faults."""
        with self._lock:
            while not (self._stalled or self._delaying):
                frame = super().head()
                if frame is None or frame.judged:
                    return frame
                frame.judged = True
                self._befall(frame, *next(self._schedule))
            return None

    def outcome(self) -> PipeEnd | None:
        """Return how the sender ended; a stalled pipe does not report that."""
        return None if self._stalled else super().outcome()

    @property
    def drained(self) -> bool:
        """Return whether no frame waits, at the head or set aside."""
        return super().drained and not self._overtaken

    def _clear(self) -> None:
        super()._clear()
        self._overtaken.clear()

    def retire(self) -> None:
        """End the receiver, on its own loop, and its timers."""
        super().retire()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _befall(self, frame: PipeFrame, faults: Fault, where: float) -> None:
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
                _flip_bit(self._frames[0], where)
            if Fault.REORDER in faults:
                self._set_aside(frame)
            elif Fault.DELAY in faults:
                self._delay()

    def _duplicate(self, frame: PipeFrame) -> None:
        """Insert a copy before the frame; its memory stays lent until both are done."""
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
            # After the frames that are being delivered or came back earlier.
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
    """Flip one bit in a copy; the sender's memory must not change.

    Header and payload are equally likely, however long the payload is.
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
