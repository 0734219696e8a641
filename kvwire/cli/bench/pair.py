"""Contenders, and the processes that do their work, told what to do by this one.

They are started from scratch and never forked, so that neither inherits a loop, a lock
or a warm cache of the other's. This process only says what to do, in lines of JSON on
their standard input, and waits: while a round is timed it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any, Final, Self

from kvwire import KVWireError

# Long against every round there is; only something stuck takes as long.
ANSWER_TIMEOUT_S: Final = 120.0
# A side that was told to end, and how long until it is killed.
_END_TIMEOUT_S: Final = 5.0
PROGRAM: Final = (sys.executable, "-m", "kvwire.cli.bench")


class BenchError(KVWireError):
    """A benchmark could not be run, or its bytes did not arrive as they were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every contender of a case does in a round: ``count`` operations.

    So many ``in_flight`` are begun before the first of them has to be over.
    """

    verb: str
    nbytes: int
    count: int
    in_flight: int = 1

    @property
    def moved_bytes(self) -> int:
        """Bytes of a round."""
        return self.nbytes * self.count


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender did in one round, and the CPU seconds of each of its sides.

    The values are seconds, or bytes a second, as the case's unit says.
    """

    values: Sequence[float]
    moved_bytes: int
    cpu_s: Sequence[float]


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to do the work: kvwire, or what stands beside it."""

    name: str
    # What both sides play: a class, or a name that the program knows.
    role: type[Any] | str
    # What the right side plays, if that is another.
    right: type[Any] | None = None
    _: KW_ONLY
    options: Mapping[str, object] = field(default_factory=dict)
    # Variables that both sides get.
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = PROGRAM
    # One process does both sides' work.
    alone: bool = False
    # It polls as long as it lives: while it is not its turn, it is stopped.
    pauses: bool = False
    # It is kvwire, and stands beside others that are.
    ours: bool = False
    # It moves bytes side by side, which have no layout.
    streams: bool = False
    # What a reader of the table needs to know of it.
    note: str = ""
    # Whose processes do its work, if not its own; told by fields of a work.
    beside: Contender | None = None
    asks: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> Pair:
        """Start its processes and connect them."""
        return Pair(self)


class SideProcess:
    """One process; see :mod:`kvwire.cli.bench.side` for what runs in it.

    The standard error of one that pauses is not shown, since some peers log whatever
    they do; the last line of it is in the error if the process ends.
    """

    def __init__(self, contender: Contender, role: type[Any] | str) -> None:
        self.role = (
            role if isinstance(role, str) else f"{role.__module__}:{role.__qualname__}"
        )
        self._said = TemporaryFile() if contender.pauses else None  # noqa: SIM115 - until stop()
        options = (f"{name}={value}" for name, value in contender.options.items())
        self._process = subprocess.Popen(  # noqa: S603 - a program that we know
            [*contender.program, self.role, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env={**os.environ, **contender.environment},
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """Have something done and wait for the answer."""
        self.ask(name, **arguments)
        return self.answer()

    def ask(self, name: str, **arguments: Any) -> None:
        """Have something begun; :meth:`answer` waits for it."""
        line = json.dumps({"call": name, "arguments": arguments}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will tell
            self._process.stdin.write(line.encode())

    def answer(self) -> Any:
        """Wait for what was asked, or say what went wrong there."""
        found = json.loads(self.line())
        if "error" in found:
            raise BenchError(f"the {self.role} side of the benchmark: {found['error']}")
        return found["answer"]

    def line(self) -> bytes:
        """Read one line: one answer is on its way at any time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise BenchError(
                f"the {self.role} side of the benchmark did not answer within "
                f"{ANSWER_TIMEOUT_S:g} s"
            )
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise BenchError(
                f"the {self.role} side of the benchmark ended with status {status}"
                f"{last_line(self._said)}"
            )
        return line

    def signal(self, number: signal.Signals) -> None:
        """Stop all of its threads, or let them go on."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the process: at once if it does not end by itself. Never raises."""
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._said is not None:
            self._said.close()


def last_line(said: IO[bytes] | None) -> str:
    """Return the last line that a process wrote, with a colon before it, or ""."""
    if said is None:
        return ""
    said.seek(0)
    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f": {last}" if last else ""


class Pair:
    """The processes of a contender, connected; the left one keeps the time."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._sides: list[SideProcess] = []
        try:
            self.facts: dict[str, Any] = self._connect()
        except BaseException:
            self.stop()
            raise

    def _connect(self) -> dict[str, Any]:
        one = self._contender
        for role in (one.role, one.right or one.role)[: 2 - one.alone]:
            self._sides.append(SideProcess(one, role))
        left, *right = self._sides
        address = right[0].call("listen") if right else None
        for side in right:
            side.ask("accept")
        facts = left.call("connect", address=address)
        for side in right:
            side.answer()
        self._signal(signal.SIGSTOP)
        return {**facts, **one.environment}

    def check(self, work: Work) -> None:
        """Show that random bytes arrive as they were sent; not timed."""
        self._signal(signal.SIGCONT)
        said = self._prepare(work)
        for side in self._sides:
            side.call("fill", work=said)
        self.move(work)
        left, *right = (side.call("digest", work=said) for side in self._sides)
        self._sides[0].call("verify", work=said)
        self._signal(signal.SIGSTOP)
        if [left] * len(right) != right:
            raise BenchError(
                f"{self._contender.name}, {work.verb} of {work.nbytes} bytes: what "
                f"arrived is not what was sent: {left} on the left, {right[0]} on the "
                "right"
            )

    def round(self, work: Work) -> Sample:
        """Do the work once; a side may say itself how much CPU it took."""
        self._signal(signal.SIGCONT)
        said = self._prepare(work)
        before = self.cpu_s()
        answers = self.move(work)
        spent = [b - a for a, b in zip(before, self.cpu_s(), strict=True)]
        self._sides[0].call("verify", work=said)
        self._signal(signal.SIGSTOP)
        cpu_s = [a.get("cpu_s", s) for a, s in zip(answers, spent, strict=True)]
        moved = answers[0].get("moved_bytes", work.moved_bytes)
        return Sample(answers[0]["values"], moved, cpu_s)

    def move(self, work: Work) -> list[dict[str, Any]]:
        """Do the work once; what the left and the right side say of it."""
        said = asdict(work)
        left, *right = self._sides
        for side in right:
            side.ask("serve", work=said)
        return [left.call("drive", work=said), *(side.answer() for side in right)]

    def cpu_s(self) -> list[float]:
        """Return CPU seconds of each side so far."""
        return [float(side.call("cpu")) for side in self._sides]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End what was started; never raises."""
        self._signal(signal.SIGCONT)
        for side in self._sides:
            side.stop()
        self._sides.clear()

    def _prepare(self, work: Work) -> dict[str, Any]:
        said = asdict(work)
        left, *right = self._sides
        given = right[0].call("prepare", work=said) if right else None
        left.call("use", work=said, given=given)
        return said

    def _signal(self, number: signal.Signals) -> None:
        for side in self._sides if self._contender.pauses else ():
            side.signal(number)
