"""The smallest plan that still fails in the same way.

Steps are left out, first half of them at once, then fewer, down to one (delta
debugging, Zeller 1999); then the conditions of the seed are made milder one by one. A
step draws its choices from dice of its own, so what remains goes on as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvwire.types import TrustMode
from tests.sim.plan import Plan, Setup
from tests.sim.run import Result, run_plan


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
    return _Shrinker(failed).shrink()


class _Shrinker:
    def __init__(self, failed: Result) -> None:
        self._whole = failed.plan
        self._best = failed
        self._keep = tuple(range(len(failed.plan.steps)))
        self._runs = 0

    def shrink(self) -> Shrunk:
        self._drop_steps()
        while self._calm_down():
            self._drop_steps()
        return Shrunk(result=self._best, keep=self._keep, runs=self._runs)

    def _drop_steps(self) -> None:
        size = max(1, len(self._keep) // 2)
        while True:
            if not self._drop_any(size):
                if size == 1:
                    return
                size = max(1, size // 2)

    def _drop_any(self, size: int) -> bool:
        """Leave out the first run of ``size`` steps that is not needed."""
        for start in range(0, len(self._keep), size):
            keep = self._keep[:start] + self._keep[start + size :]
            steps = tuple(self._whole.steps[number] for number in keep)
            if self._still_fails(replace(self._best.plan, steps=steps)):
                self._keep = keep
                return True
        return False

    def _calm_down(self) -> bool:
        """Take the first milder condition under which it still fails."""
        plan = self._best.plan
        return any(
            self._still_fails(replace(plan, setup=setup))
            for setup in _milder(plan.setup)
        )

    def _still_fails(self, plan: Plan) -> bool:
        self._runs += 1
        result = run_plan(plan)
        if result.rule != self._best.rule:
            return False
        self._best = result
        return True


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
