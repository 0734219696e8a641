"""Which faults a link has: a plan, and the schedule that follows from its seed.

A plan is a value: printed, it can be pasted into a test, and the same plan gives the
same faults again, frame for frame. :func:`injected` hands one to every
:class:`~kvwire_inproc.InprocBackend` that is made inside it, since a communicator makes
its backends without arguments.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Final

from kvwire.errors import UsageError


class Fault(enum.Flag):
    """Lists what befalls one frame; several may."""

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
    """Says how often which fault befalls the frames that one side sends.

    Chances are from 0 to 1, for each frame and independent of one another. Frames are
    counted from 0, for each direction of each link, control frames included.

    Attributes:
        seed: Chooses the schedule.
        drop: The frame vanishes; its sender is told that it was sent.
        delay: The frame, and with it all behind it, comes ``delay_s`` later.
        reorder: The frame comes ``delay_s`` later; those behind it overtake it.
        duplicate: The frame comes twice in a row.
        corrupt: One bit of the header or of the payload is flipped.
        stall: From this frame on nothing moves, the link's end included; it stays open.
        kill: Instead of this frame, both ends get an error.
        delay_s: Seconds, for ``delay`` and ``reorder``.
        stall_after: Frames before the first that ``stall`` can befall.
        kill_after: Frames before the first that ``kill`` can befall.
        spare: Frames before the first that anything else can befall, so that a
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
        for name in _CHANCES:
            chance = getattr(self, name)
            if not 0.0 <= chance <= 1.0:
                raise UsageError(f"fault plan: {name}={chance!r} is no chance, 0 to 1")
        for name in ("delay_s", "stall_after", "kill_after", "spare"):
            if not getattr(self, name) >= 0:
                raise UsageError(
                    f"fault plan: {name}={getattr(self, name)!r} is below 0"
                )

    def __repr__(self) -> str:
        said = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"FaultPlan({', '.join(said)})"


@dataclass(frozen=True, slots=True)
class FaultDecision:
    """Holds what happens to one frame."""

    faults: Fault
    where: float  # from 0 to 1: the bit that a corruption flips


class Schedule:
    """Draws the faults of the frames of one direction of one link, in order."""

    def __init__(self, plan: FaultPlan, direction: str) -> None:
        self._plan = plan
        # Seeded by text: the same in every Python version and process.
        self._random = random.Random(f"{plan.seed}/{direction}")  # noqa: S311 - not a secret
        self._count = 0

    def __next__(self) -> FaultDecision:
        """Return what happens to the next frame."""
        plan, number = self._plan, self._count
        self._count += 1
        first = {"stall": plan.stall_after, "kill": plan.kill_after}
        faults = Fault.NONE
        for name in _CHANCES:
            # Always drawn: what happens to a frame depends on its number only.
            drawn = self._random.random()
            if drawn < getattr(plan, name) and number >= first.get(name, plan.spare):
                faults |= Fault[name.upper()]
        return FaultDecision(faults, self._random.random())


_injected: ContextVar[FaultPlan | None] = ContextVar(
    "kvwire_inproc_faults", default=None
)


@contextmanager
def injected(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Give ``plan`` to each backend made in this context: it governs what they send."""
    before = _injected.set(plan)
    try:
        yield plan
    finally:
        _injected.reset(before)


def injected_plan() -> FaultPlan | None:
    """Return the plan that a backend made here gets."""
    return _injected.get()
