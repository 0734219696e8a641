"""Rounds in which everybody takes turns.

A machine is not the same from one minute to the next. So nobody does all of their work
at once: in each round every contender of every case does a little, one after the other,
and who begins changes from round to round.

A contender that fails is out of that case, with its reason, and is started anew before
its next one. If the case says nothing without it, the benchmark ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvwire.cli.bench.case import Benchmark, Case, Contender, Samples
from kvwire.cli.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Everything measured in one case.

    Attributes:
        case: The case.
        samples: By the contender's name; those that failed are not in it.
        failures: Why the others have none, by name.
    """

    case: Case
    samples: dict[str, Samples]
    failures: dict[str, str] = field(default_factory=dict)


def steps(plan: Benchmark, rounds: int) -> int:
    """How often :func:`take_turns` reports progress, unless somebody fails."""
    return (rounds + 1) * sum(len(case.contenders) for case in plan.cases)


def take_turns(
    plan: Benchmark, rounds: int, progress: Callable[[str], None]
) -> list[CaseResult]:
    """Run a benchmark.

    Args:
        plan: What to run.
        rounds: How often each contender of each case does its work, after one time
            that does not count.
        progress: Called before each step with what it is.

    Raises:
        BenchError: It cannot be run, or bytes were damaged.
        KeyboardInterrupt: Nobody has done anything yet. Later it ends the benchmark
            with what there is.
    """
    findings = [
        CaseResult(case, {contender.name: Samples() for contender in case.contenders})
        for case in plan.cases
    ]
    with _team() as team:
        try:
            for number in range(-1, rounds):
                for finding in findings:
                    for contender in _in_turn(finding, number):
                        progress(f"{finding.case.name}: {contender.name}")
                        team.take_turn(finding, contender, number)
        except KeyboardInterrupt:
            _require_samples(findings)
    return findings


class _Team:
    """Who of them has been started, and who cannot be."""

    def __init__(self) -> None:
        self._running: dict[int, Contender] = {}
        self._unable: dict[int, BenchError] = {}

    def take_turn(self, finding: CaseResult, contender: Contender, number: int) -> None:
        try:
            self._ready(contender)
            if number < 0:
                contender.check(finding.case.work)
                contender.round(finding.case.work)
            else:
                sample = contender.round(finding.case.work)
                finding.samples[contender.name].rounds.append(sample)
        except BenchError as exc:
            self._stop(contender)
            if contender in finding.case.required:
                raise BenchError(f"{finding.case.name}: {exc}") from exc
            del finding.samples[contender.name]
            finding.failures[contender.name] = str(exc)

    def stop(self) -> None:
        """End everybody."""
        for contender in list(self._running.values()):
            self._stop(contender)

    def _ready(self, contender: Contender) -> None:
        """Start it, unless it runs; what could not be started is not tried again."""
        key = id(contender)
        if key in self._unable:
            raise self._unable[key]
        if key not in self._running:
            self._running[key] = contender
            try:
                contender.start()
            except BenchError as exc:
                self._unable[key] = exc
                raise

    def _stop(self, contender: Contender) -> None:
        if self._running.pop(id(contender), None):
            contender.stop()


def _require_samples(findings: Sequence[CaseResult]) -> None:
    """After an interrupt, who has done nothing is a failure like any other."""
    for finding in findings:
        for name in [n for n, s in finding.samples.items() if not s.rounds]:
            del finding.samples[name]
            finding.failures[name] = "it was interrupted before its first round"
        if any(c.name in finding.failures for c in finding.case.required):
            raise KeyboardInterrupt
    if not any(finding.samples for finding in findings):
        raise KeyboardInterrupt


@contextmanager
def _team() -> Iterator[_Team]:
    team = _Team()
    try:
        yield team
    finally:
        team.stop()


def _in_turn(finding: CaseResult, number: int) -> list[Contender]:
    contenders = list(finding.case.contenders)
    first = number % len(contenders)
    in_turn = contenders[first:] + contenders[:first]
    return [c for c in in_turn if c.name not in finding.failures]
