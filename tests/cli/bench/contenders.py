"""Contenders that only answer what a test wants, and sides that are threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import uvloop

from kvwire.cli.bench import pair, turns
from kvwire.cli.bench.side import Work, answer, asked, make

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

    def check(self, work: Work) -> None:
        self.done("check")

    def round(self, work: Work) -> pair.Sample:
        self.done("round")
        rounds = self._rounds
        seconds = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        if not seconds:
            raise KeyboardInterrupt
        return pair.Sample(seconds, [0.2, 0.3])

    def stop(self) -> None:
        self._log.append((self._name, "stop"))

    def done(self, call: str) -> None:
        self._log.append((self._name, call))
        if call == self._failing:
            raise pair.BenchError(f"{self._name} failed to {call}")


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


def does(running: pair.Pair, work: Work, samples: int = 1) -> pair.Sample:
    """Have a work checked, then timed; what the round reports is plausible."""
    running.check(work)
    found = running.round(work)
    assert len(found.seconds) == samples
    assert min(found.seconds) > 0
    assert min(found.cpu_s) >= 0 < sum(found.cpu_s)
    return found


def measured(*cases: turns.Case, rounds: int = 1) -> turns.Findings:
    return turns.take_turns(benchmark(*cases), rounds, lambda _: None)


# --- threads in place of processes ----------------------------------------------------

_LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class ThreadSide(pair.SideProcess):
    """A side on a loop of its own: what it does, in a second.

    What a process adds, tests of :mod:`kvwire.cli.bench.pair` show, and those marked
    slow.
    """

    def __init__(self, contender: pair.Contender, role: type[Any] | str) -> None:
        assert isinstance(role, type), "a peer is a program of its own"
        # Undone by the fixture; all sides of one test get the same.
        os.environ.update(contender.environment)
        self.role = f"{role.__module__}:{role.__qualname__}"
        options = {name: str(v) for name, v in contender.options.items()}
        self._loop = _LOOPS[options.get("loop", "asyncio")]()
        self._thread = threading.Thread(target=self._run, name=f"side {self.role}")
        self._thread.start()
        self._side = make(self.role, options)
        self._answer: Future[bytes] = Future()

    def ask(self, name: str, **arguments: Any) -> None:
        answering = answer(self._side, asked(name, arguments))
        self._answer = asyncio.run_coroutine_threadsafe(answering, self._loop)

    def line(self) -> bytes:
        return self._answer.result(pair.ANSWER_TIMEOUT_S)

    def stop(self) -> None:
        # It may wait for somebody who will never come; a process is killed then.
        self._answer.cancel()
        asyncio.run_coroutine_threadsafe(self._side.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
