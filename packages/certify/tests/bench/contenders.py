"""Contenders that only answer what a test wants, and sides that go wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from kvwire_certify.bench import pair, turns
from kvwire_certify.bench.line import Line
from kvwire_certify.bench.pair import BenchError, Sample
from kvwire_certify.bench.work import Work

WORK = Work(verb="send", nbytes=1024, count=4)
Log = list[tuple[str, str]]


class Scripted(pair.Contender):
    """Answers the values of each round, of which the last is repeated.

    An empty one is Ctrl-C; ``failing`` is the call that fails.
    """

    script: ScriptedPair

    def __init__(
        self,
        name: str,
        rounds: Iterable[Sequence[float]] = ([1.0],),
        *,
        log: Log | None = None,
        failing: str = "",
    ) -> None:
        super().__init__(name, "")
        script = ScriptedPair(name, list(rounds), [] if log is None else log, failing)
        object.__setattr__(self, "script", script)

    def start(self) -> pair.Pair:
        self.script.done("start")
        return self.script


class ScriptedPair(pair.Pair):
    """Answers the samples of its contender, and notes what was asked of it."""

    def __init__(
        self, name: str, rounds: list[Sequence[float]], log: Log, failing: str
    ) -> None:
        self._name = name
        self._rounds = rounds
        self._log = log
        self._failing = failing
        self.facts = {"version": f"{name} 1"}

    def turn(
        self, work: Work, *, checks: bool = False, cpus: Sequence[int] = ()
    ) -> Sample:
        self.done("check" if checks else "round")
        if checks:
            return Sample([], [])
        rounds = self._rounds
        seconds = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        if not seconds:
            raise KeyboardInterrupt
        return Sample(seconds, [0.2, 0.3])

    def stop(self) -> None:
        self._log.append((self._name, "stop"))

    def done(self, call: str) -> None:
        self._log.append((self._name, call))
        if call == self._failing:
            raise BenchError(f"{self._name} failed to {call}")


def rated(name: str, *rates: float, work: Work = WORK) -> Scripted:
    """One whose rounds of a work have these rates."""
    return Scripted(name, [[work.moved_bytes / rate] for rate in rates])


def case(*contenders: pair.Contender, ours: int = 1, **changed: Any) -> turns.Case:
    """Make a case of times, of which the first are ours."""
    given = {"name": "1 KiB send", "work": WORK, "unit": turns.MICROSECONDS}
    both = {"ours": contenders[:ours], "beside": contenders[ours:]}
    return turns.Case(**{**given, **both, **changed})


def benchmark(*cases: turns.Case, **changed: Any) -> turns.Benchmark:
    return turns.Benchmark(name="scripted", cases=cases, **changed)


def measured(*cases: turns.Case, rounds: int = 1) -> turns.Findings:
    return turns.take_turns(benchmark(*cases), rounds, lambda _: None)


def does(running: pair.Pair, work: Work, samples: int = 1) -> Sample:
    """Have a work checked, then timed; what the round reports is plausible."""
    running.turn(work, checks=True)
    found = running.turn(work)
    assert len(found.seconds) == samples
    assert min(found.seconds) > 0
    assert min(found.cpu_s) >= 0 < sum(found.cpu_s)
    return found


# --- sides that go wrong, each as its option says -------------------------------------


async def left(line: Line, options: dict[str, Any]) -> None:
    await line.send({"facts": {}})
    await line.receive()
    await _do(options["left"])
    await line.send({"seconds": [1.0], "cpu_s": 0.1, "digest": "ab"})
    with suppress(EOFError):
        await line.receive()


async def right(line: Line, options: dict[str, Any]) -> None:
    await line.send({"address": 1, "facts": {}})
    await line.receive()
    await line.send({"offer": ""})
    await _do(options["right"])
    await line.receive()
    await line.send({"cpu_s": 0.1, "digest": options.get("digest", "ab")})


async def _do(what: str) -> None:
    match what:
        case "fails":
            raise OSError("no way")
        case "exits":
            raise SystemExit("no luck")
        case "blocks":
            socket.create_server(("127.0.0.1", 0)).accept()
