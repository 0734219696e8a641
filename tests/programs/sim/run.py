"""Running one plan: what came of it, how to say so, and the smallest that still fails.

Steps are left out, then the conditions of the seed are made milder one by one. A step
draws its choices from dice of its own, so what remains goes on as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvwire.types import TrustMode
from kvwire_certify.oracle import Wrong
from kvwire_certify.schedule import shrink as fewer_steps
from tests.programs.sim.plan import Plan, Setup, make_plan
from tests.programs.sim.world import World

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
        if isinstance(self.error, Wrong):
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
    text = f"python -m tests.programs.sim --seed {seed} --trace"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What is left of a failing plan.

    Attributes:
        keep: The numbers of the steps that are left.
    """

    result: Result
    keep: tuple[int, ...]
    runs: int


def shrink(failed: Result) -> Shrunk:
    """Make a failing plan as small as it goes."""
    steps, best, runs = failed.plan.steps, failed, 0
    keep = tuple(range(len(steps)))

    def still_fails(plan: Plan) -> bool:
        nonlocal best, runs
        runs += 1
        result = run_plan(plan)
        if result.rule != failed.rule:
            return False
        best = result
        return True

    while True:
        smaller = fewer_steps(keep)
        with suppress(StopIteration):
            fewer = next(smaller)
            while True:
                left = tuple(steps[number] for number in fewer)
                fails = still_fails(replace(best.plan, steps=left))
                keep = fewer if fails else keep
                fewer = smaller.send(fails)
        milder = (replace(best.plan, setup=s) for s in _milder(best.plan.setup))
        if not any(map(still_fails, milder)):
            return Shrunk(result=best, keep=keep, runs=runs)


def _milder(setup: Setup) -> Iterator[Setup]:
    milder = (
        replace(setup, late=0.0),
        replace(setup, stuck=0.0),
        replace(setup, gap=0.0),
        replace(setup, silent=0.0),
        replace(setup, slow=0.0),
        replace(setup, deadlines=0.0),
        replace(setup, small_tables=False),
        replace(setup, trust=TrustMode.LOOPBACK),
    )
    yield from (other for other in milder if other != setup)
