"""Rounds in which everybody takes turns.

A machine is not the same from one minute to the next. So nobody does all of their work
at once: in each round every contender of every case does a little, one after the other,
and who begins changes from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvwire.cli.bench.case import Benchmark, Case, Contender, Samples


@dataclass(frozen=True, slots=True)
class Finding:
    """Everything measured in one case.

    Attributes:
        case: The case.
        samples: By the contender's name.
    """

    case: Case
    samples: dict[str, Samples]


def steps(benchmark: Benchmark, rounds: int) -> int:
    """How often :func:`take_turns` reports progress."""
    return (rounds + 1) * sum(1 + len(case.beside) for case in benchmark.cases)


def take_turns(
    benchmark: Benchmark, rounds: int, progress: Callable[[str], None]
) -> list[Finding]:
    """Run a benchmark.

    Args:
        benchmark: What to run.
        rounds: How often each contender of each case does its work, after one time
            that does not count.
        progress: Called before each step with what it is.

    Raises:
        BenchError: It cannot be run, or bytes were damaged.
    """
    findings = [
        Finding(case, {contender.name: Samples() for contender in _all(case)})
        for case in benchmark.cases
    ]
    with _started(benchmark):
        for number in range(-1, rounds):
            for finding in findings:
                case = finding.case
                for contender in _in_turn(case, number):
                    progress(f"{case.name}: {contender.name}")
                    if number < 0:
                        contender.check(case.work)
                        contender.round(case.work)
                    else:
                        samples = finding.samples[contender.name]
                        samples.rounds.append(contender.round(case.work))
    return findings


@contextmanager
def _started(benchmark: Benchmark) -> Iterator[None]:
    contenders = benchmark.contenders
    try:
        for contender in contenders:
            contender.start()
        yield
    finally:
        for contender in contenders:
            contender.stop()


def _all(case: Case) -> list[Contender]:
    return [case.ours, *case.beside]


def _in_turn(case: Case, number: int) -> list[Contender]:
    contenders = _all(case)
    first = number % len(contenders)
    return contenders[first:] + contenders[:first]
