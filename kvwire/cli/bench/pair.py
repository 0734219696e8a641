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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from tempfile import TemporaryFile
from typing import Any, Final, Self

from kvwire import KVWireError
from kvwire.cli.bench.side import Work, asked

# Long against every round there is; only something stuck takes as long.
ANSWER_TIMEOUT_S: Final = 120.0
# A side that was told to end, and how long until it is killed.
_END_TIMEOUT_S: Final = 5.0
PROGRAM: Final = (sys.executable, "-m", "kvwire.cli.bench")


class BenchError(KVWireError):
    """Reports a benchmark that could not be run, or whose bytes arrived wrong."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one contender's round: seconds, and the CPU seconds of each side."""

    seconds: Sequence[float]
    cpu_s: Sequence[float]


@dataclass(frozen=True, eq=False)
class Contender:
    """Names one way to do the work: kvwire, or what stands beside it."""

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

    def start(self) -> Pair:
        """Start its processes and connect them."""
        return Pair(self)


class SideProcess:
    """Runs one process; see :mod:`kvwire.cli.bench.side` for what runs in it.

    Its standard error is not shown, since some peers log whatever they do; the last
    line of it is in the error if the process ends.
    """

    def __init__(self, contender: Contender, role: type[Any] | str) -> None:
        self.role: str = (
            role if isinstance(role, str) else f"{role.__module__}:{role.__qualname__}"
        )
        self._said = TemporaryFile()  # noqa: SIM115 - until stop()
        options = (f"{name}={value}" for name, value in contender.options.items())
        self.process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - a program that we know
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
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will tell
            self.process.stdin.write(asked(name, arguments) + b"\n")

    def answer(self) -> Any:
        """Wait for what was asked, or say what went wrong there."""
        found = json.loads(self.line())
        if "error" in found:
            raise BenchError(f"{_name(self.role)}: {found['error']}")
        return found["answer"]

    def line(self) -> bytes:
        """Read one line: one answer is on its way at any time."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise BenchError(
                f"{_name(self.role)} did not answer within {ANSWER_TIMEOUT_S:g} s"
            )
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines()
            reason = f": {said[-1]}" if said else ""
            raise BenchError(f"{_name(self.role)} ended with status {status}{reason}")
        return line

    def stop(self) -> None:
        """End the process: at once if it does not end by itself. Never raises."""
        with self.process as process, self._said:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _name(role: str) -> str:
    return role.rpartition(":")[2]


class Pair:
    """Holds the processes of a contender, connected; the left one keeps the time."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self.sides: list[SideProcess] = []
        try:
            roles = [contender.role, contender.right or contender.role]
            for role in roles[: 2 - contender.alone]:
                self.sides.append(SideProcess(contender, role))
            self.facts: dict[str, Any] = self._connect()
        except BaseException:
            self.stop()
            raise

    def _connect(self) -> dict[str, Any]:
        left, *right = self.sides
        address = right[0].call("listen") if right else None
        for side in right:
            side.ask("accept")
        facts: dict[str, Any] = left.call("connect", address=address)
        for side in right:
            side.answer()
        return {**facts, **self._contender.environment}

    def check(self, work: Work) -> None:
        """Show that random bytes arrive as they were sent; not timed."""
        self._prepare(work)
        for side in self.sides:
            side.call("fill", work=work)
        self.move(work)
        left, *right = (side.call("digest", work=work) for side in self.sides)
        self.sides[0].call("verify", work=work)
        if [left] * len(right) != right:
            raise BenchError(
                f"{self._contender.name}, {work.verb} of {work.nbytes} bytes: what "
                f"arrived is not what was sent: {left} on the left, {right[0]} on the "
                "right"
            )

    def round(self, work: Work) -> Sample:
        """Do the work once."""
        self._prepare(work)
        before = self._cpu_s()
        seconds, *_ = self.move(work)
        cpu_s = [b - a for a, b in zip(before, self._cpu_s(), strict=True)]
        self.sides[0].call("verify", work=work)
        return Sample(seconds, cpu_s)

    def move(self, work: Work) -> list[Any]:
        """Do the work once; what the left and the right side say of it."""
        left, *right = self.sides
        for side in right:
            side.ask("serve", work=work)
        return [left.call("drive", work=work), *(side.answer() for side in right)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End what was started; never raises."""
        for side in self.sides:
            side.stop()
        self.sides.clear()

    def _prepare(self, work: Work) -> None:
        left, *right = self.sides
        given = right[0].call("prepare", work=work) if right else None
        left.call("use", work=work, given=given)

    def _cpu_s(self) -> list[float]:
        return [float(side.call("cpu")) for side in self.sides]
