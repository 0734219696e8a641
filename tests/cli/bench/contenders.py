"""Contenders that do nothing but answer what a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from kvwire.cli.bench.pair import BenchError, Contender, Pair, Sample, Work
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    Benchmark,
    Case,
    Findings,
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
        script = ScriptedPair(name, list(rounds), [] if log is None else log, failing)
        object.__setattr__(self, "script", script)

    def start(self) -> Pair:
        script: ScriptedPair = vars(self)["script"]
        script.done("start")
        return cast(Pair, script)


class ScriptedPair:
    """Answers the samples of its contender, and notes what was asked of it."""

    def __init__(
        self, name: str, rounds: list[Sequence[float]], log: Log, failing: str
    ) -> None:
        self._name = name
        self._rounds = rounds
        self._log = log
        self._failing = failing
        self.facts: dict[str, Any] = {"version": f"{name} 1"}

    def check(self, work: Work) -> None:
        self.done("check")

    def round(self, work: Work) -> Sample:
        self.done("round")
        rounds = self._rounds
        values = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        if not values:
            raise KeyboardInterrupt
        return Sample(values, work.moved_bytes, [0.2, 0.3])

    def stop(self) -> None:
        self._log.append((self._name, "stop"))

    def done(self, call: str) -> None:
        self._log.append((self._name, call))
        if call == self._failing:
            raise BenchError(f"{self._name} failed to {call}")


def case(*contenders: Contender, **changed: Any) -> Case:
    given = {"name": "1 KiB send", "work": WORK, "unit": GIGABYTES_PER_SECOND}
    return Case(contenders=contenders, **{**given, **changed})


def benchmark(*cases: Case, **changed: Any) -> Benchmark:
    return Benchmark(name="scripted", cases=cases, **changed)


def measured(*cases: Case, rounds: int = 1) -> Findings:
    return take_turns(benchmark(*cases), rounds, lambda _: None)
