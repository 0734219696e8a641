"""Running one plan: what came of it, and how to say so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.sim.plan import Plan, make_plan
from tests.sim.violation import Violation
from tests.sim.world import World

_EVENTS_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one plan.

    Attributes:
        error: What it failed with, or None.
        trace: (time, who, what, ...) of everything that was done.
        digest: Names the schedule; equal plans have equal digests.
    """

    plan: Plan
    error: Exception | None
    trace: list[tuple[object, ...]]
    digest: str
    completions: int

    @property
    def rule(self) -> str:
        """Names the kind of failure, "" for none; what a shrinker keeps."""
        if self.error is None:
            return ""
        if isinstance(self.error, Violation):
            return self.error.rule
        return type(self.error).__name__


def run_plan(plan: Plan) -> Result:
    """Play a plan to its end; whatever is raised on the way is its failure."""
    world = World(plan)
    error: Exception | None = None
    try:
        world.run()
    except Exception as exc:  # noqa: BLE001 - the simulator's business is to find them
        error = exc
    return Result(
        plan=plan,
        error=error,
        trace=world.trace,
        digest=world.digest(),
        completions=world.judge.completed_count,
    )


def run_seed(seed: int, keep: Iterable[int] | None = None) -> Result:
    """Play the plan of a seed, or only the steps with these numbers of it."""
    plan = make_plan(seed)
    if keep is not None:
        plan = replace(plan, steps=tuple(plan.steps[number] for number in keep))
    return run_plan(plan)


def command(seed: int, keep: Iterable[int] | None = None) -> str:
    """The command that repeats a seed and shows all of it."""
    text = f"python -m tests.sim --seed {seed} --trace"
    if keep is not None:
        text += f" --keep {','.join(map(str, keep))}"
    return text


def described(result: Result, *, whole: bool = False) -> str:
    """A result for a human: the last events, or all of them, and what went wrong."""
    shown = result.trace if whole else result.trace[-_EVENTS_SHOWN:]
    lines = [
        f"{event[0]:>12.6f}  {event[1]:<6} {' '.join(map(str, event[2:]))}"
        for event in shown
    ]
    if result.error is not None:
        lines.append(f"{type(result.error).__name__}: {result.error}")
    return "\n".join(lines)
