"""The state of one direction of a lane, which decides its next step.

::

            begun            up                    closed and idle
    MADE ---------> STARTING ---> UP ------------------------------+
      |                |          |                                v
      +---- failed, ended, or too late at what is awaited -----> ENDING ---> QUIET
                                                                       quiet

It is a pure state machine: its thread calls :meth:`DirectionState.step`, executes the
returned step, and reports the result. The time is an argument. Only a proof that no
memory is touched any more leads from ENDING to QUIET. A communicator that cannot give
this proof stays in quarantine, together with the memory of all its moves.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import ConnectionLost
from kvwire.types import MemoryKind

# The most moves handed to the library at once: enough that the next one is there when
# one is done, and few enough that an abort has little to wait for.
MOVES_MAX: Final = 8


class DirectionStage(enum.Enum):
    """The stages of a direction's life."""

    MADE = "made"
    STARTING = "starting"
    UP = "up"
    ENDING = "ending"
    QUIET = "quiet"


class DirectionStep(enum.Enum):
    """The next step of a direction's thread."""

    BEGIN = "begin"
    WATCH_START = "watch the start"
    MOVE = "hand over the next job"
    WATCH = "watch the running jobs"
    WAIT = "wait for work"
    ABORT = "abort the communicator"
    EXIT = "exit: the direction has ended"


@dataclass(slots=True, eq=False)
class PayloadMove:
    """One payload to move."""

    payload: Payload | None
    nbytes: int
    token: object


@dataclass(slots=True, kw_only=True)
class DirectionState:
    """Decides the next step of one direction."""

    start_timeout_s: float
    # The most time until the next running move is done.
    move_timeout_s: float
    waiting: deque[PayloadMove] = field(default_factory=deque)
    moving: deque[PayloadMove] = field(default_factory=deque)
    stage: DirectionStage = DirectionStage.MADE
    error: Exception | None = None
    _closing: bool = False
    # Whether the library has accepted the last move that was handed over.
    _launched: bool = True
    _since: float = 0.0

    # --- reports of its thread --------------------------------------------------------

    def step(self, now: float) -> DirectionStep:
        """Return the next step; a deadline that has passed ends the direction."""
        if (
            self.stage is DirectionStage.STARTING
            and now - self._since > self.start_timeout_s
        ):
            self.fail(_late(f"did not open within {self.start_timeout_s:g} s"))
        waits = self.stage is DirectionStage.UP and bool(self.moving)
        if waits and now - self._since > self.move_timeout_s:
            self.fail(_late(f"moved nothing for {self.move_timeout_s:g} s"))
        return (
            self._step_up() if self.stage is DirectionStage.UP else _STEPS[self.stage]
        )

    def begun(self, now: float) -> None:
        """Record that the direction is starting."""
        if self.stage is DirectionStage.MADE:
            self.stage = DirectionStage.STARTING
            self._since = now

    def up(self) -> None:
        """Record that the direction is open."""
        if self.stage is DirectionStage.STARTING:
            self.stage = DirectionStage.UP

    def next_job(self, now: float) -> PayloadMove:
        """Return the move to hand over now, and count it as in progress."""
        job = self.waiting.popleft()
        if not self.moving:
            self._since = now
        self.moving.append(job)  # bounded: LANE_PAYLOADS_MAX
        self._launched = False
        return job

    def launched(self) -> None:
        """Record that the library has accepted the last move."""
        self._launched = True

    def done(self, now: float) -> PayloadMove:
        """Record that the oldest move in progress is done; return it."""
        self._since = now
        return self.moving.popleft()

    def quiet(self) -> None:
        """Record that nothing touches memory any more."""
        assert self.stage is DirectionStage.ENDING
        self.stage = DirectionStage.QUIET
        self.waiting.clear()
        self.moving.clear()

    # --- orders from the lane ---------------------------------------------------------

    def submit(self, job: PayloadMove) -> None:
        """Queue a move."""
        if self.stage not in (DirectionStage.ENDING, DirectionStage.QUIET):
            self.waiting.append(job)  # bounded: LANE_PAYLOADS_MAX

    def close(self) -> None:
        """End once all moves are done."""
        self._closing = True

    def fail(self, error: Exception | None) -> None:
        """End now; only the first error counts, and None means an intended end."""
        if self.stage not in (DirectionStage.ENDING, DirectionStage.QUIET):
            self.stage = DirectionStage.ENDING
            self.error = error

    def _step_up(self) -> DirectionStep:
        if self.waiting and self._launched and len(self.moving) < MOVES_MAX:
            return DirectionStep.MOVE
        if self.moving:
            return DirectionStep.WATCH
        if self._closing and not self.waiting:
            self.fail(None)
            return DirectionStep.ABORT
        return DirectionStep.WAIT


_STEPS: Final = {
    DirectionStage.MADE: DirectionStep.BEGIN,
    DirectionStage.STARTING: DirectionStep.WATCH_START,
    DirectionStage.ENDING: DirectionStep.ABORT,
    DirectionStage.QUIET: DirectionStep.EXIT,
}


def refusal(payload: Payload | None, kinds: frozenset[MemoryKind]) -> str:
    """Return why a payload cannot be moved; "" if it can."""
    if payload is None:
        return ""
    device = None if isinstance(payload, memoryview) else payload.device
    kind = MemoryKind.HOST if device is None else device.kind
    if kind in kinds:
        return ""
    return f"it moves {' and '.join(sorted(kinds))} memory only, and this is {kind}"


def _late(what: str) -> ConnectionLost:
    return ConnectionLost(f"the communicator {what}")
