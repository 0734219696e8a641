"""Contenders that do nothing but answer what a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    Benchmark,
    Case,
    Contender,
    Sample,
    Unit,
    Work,
)
from kvwire.cli.bench.errors import BenchError

WORK = Work(verb="send", nbytes=1024, count=4)


class Scripted(Contender):
    """Answers the given samples, round by round, and notes what was asked of it.

    Args:
        name: Its name.
        rounds: The values of each round; the last is repeated.
        log: Gets (name, call) for each call.
        failing: The call that fails.
    """

    def __init__(
        self,
        name: str,
        rounds: Iterable[Sequence[float]] = ([1.0],),
        *,
        log: list[tuple[str, str]] | None = None,
        failing: str = "",
    ) -> None:
        self.name = name
        self._rounds = list(rounds)
        self._log = [] if log is None else log
        self._failing = failing

    def start(self) -> None:
        self._note("start")

    def check(self, work: Work) -> None:
        self._note("check")

    def round(self, work: Work) -> Sample:
        self._note("round")
        values = self._rounds.pop(0) if len(self._rounds) > 1 else self._rounds[0]
        return Sample(values, work.nbytes * work.count, cpu_s=0.5)

    def stop(self) -> None:
        self._log.append((self.name, "stop"))

    def facts(self) -> dict[str, Any]:
        return {"version": f"{self.name} 1"}

    def _note(self, call: str) -> None:
        self._log.append((self.name, call))
        if call == self._failing:
            raise BenchError(f"{self.name} failed to {call}")


def case(
    ours: Contender,
    *beside: Contender,
    unit: Unit = GIGABYTES_PER_SECOND,
    target: float = 0.9,
    tail: bool = False,
) -> Case:
    return Case(
        name="1 KiB send",
        work=WORK,
        unit=unit,
        ours=ours,
        beside=beside,
        target=target,
        tail=tail,
    )


def benchmark(*cases: Case) -> Benchmark:
    return Benchmark(name="scripted", cases=cases)
