"""Contenders that do nothing but answer what a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from kvwire.cli.bench.pair import BenchError, Contender, Pair, Sample, Work
from kvwire.cli.bench.report import Findings
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    Benchmark,
    Case,
    Unit,
    take_turns,
)

WORK = Work(verb="send", nbytes=1024, count=4)
Log = list[tuple[str, str]]


class Scripted(Contender):
    """Answers the values of each round, of which the last is repeated.

    An empty one is Ctrl-C; ``failing`` is the call that fails.
    """

    def __init__(
        self,
        name: str,
        rounds: Iterable[Sequence[float]] = ([1.0],),
        *,
        log: Log | None = None,
        failing: str = "",
        ours: bool = False,
    ) -> None:
        super().__init__(name, "", ours=ours)
        self.rounds = list(rounds)
        self.log: Log = [] if log is None else log
        self.failing = failing

    def start(self) -> Pair:
        self.done("start")
        return cast(Pair, ScriptedPair(self))

    def done(self, call: str) -> None:
        self.log.append((self.name, call))
        if call == self.failing:
            raise BenchError(f"{self.name} failed to {call}")


class ScriptedPair:
    """Answers the samples of its contender, and notes what was asked of it."""

    def __init__(self, contender: Scripted) -> None:
        self._contender = contender
        self.facts: dict[str, Any] = {"version": f"{contender.name} 1"}

    def check(self, work: Work) -> None:
        self._contender.done("check")

    def round(self, work: Work) -> Sample:
        self._contender.done("round")
        rounds = self._contender.rounds
        values = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        if not values:
            raise KeyboardInterrupt
        return Sample(values, work.moved_bytes, [0.2, 0.3])

    def stop(self) -> None:
        self._contender.log.append((self._contender.name, "stop"))


def case(
    *contenders: Contender,
    name: str = "1 KiB send",
    work: Work = WORK,
    unit: Unit = GIGABYTES_PER_SECOND,
    target: float | None = 0.9,
    tail: bool = False,
    essential: bool = True,
    group: str = "",
) -> Case:
    return Case(
        name=name,
        work=work,
        unit=unit,
        contenders=contenders,
        target=target,
        tail=tail,
        essential=essential,
        group=group,
    )


def benchmark(*cases: Case) -> Benchmark:
    return Benchmark(name="scripted", cases=cases)


def measured(*cases: Case, rounds: int = 1) -> Findings:
    return take_turns(benchmark(*cases), rounds, lambda _: None)
