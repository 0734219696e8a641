"""Contenders, and the two processes that run each one.

The processes are started from scratch and never forked, so that neither inherits the
other's loop, locks or warm caches. This process sends work to the left one and waits:
while a round is timed, it is idle.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from tempfile import TemporaryFile
from typing import Any, Final, Self

from kvwire.cli.bench.side import (
    GONE,
    BenchError,
    Program,
    Sample,
    Work,
    found_in,
    name_of,
)

# Longer than any round; only a stuck process takes this long.
ANSWER_TIMEOUT_S: Final = 120.0
# How long a side with nothing left to do may take to end before it is killed.
END_TIMEOUT_S: Final = 5.0
COMMAND: Final = (sys.executable, "-m", "kvwire.cli.bench")


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to do the work: kvwire, or a program to compare it with."""

    name: str
    # The program that both sides run, or the name by which the command knows it.
    program: Program | str
    _: KW_ONLY
    options: Mapping[str, object] = field(default_factory=dict)
    # Environment variables for both sides.
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = COMMAND
    # Whether there is only a left side.
    alone: bool = False

    def start(self) -> Pair:
        """Start its processes and connect them."""
        return Pair(self)


class SideProcess:
    """One process, with a socket as its standard input.

    Its output is not shown, since some programs log a lot. If the process ends early,
    the
    the error contains the last line of its standard error.
    """

    def __init__(
        self,
        contender: Contender,
        side: Mapping[str, object],
        first: socket.socket,
        *others: socket.socket,
    ) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115 - until stop()
        numbers = [other.fileno() for other in others]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - a program that we know
            [*contender.command, json.dumps(side), *map(str, numbers)],
            stdin=first.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=numbers,
            env={**os.environ, **contender.environment},
        )

    def end(self) -> str:
        """Wait until the process has ended; return the reason if it failed, or "".

        A process that does not end by itself is killed.
        """
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if not (status := self.process.wait()):
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def stop(self) -> None:
        """End the process, like :meth:`end`, but ignore its reason."""
        self.end()
        self._errors.close()


class Pair:
    """A contender's connected processes; the left one measures the time."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self.sides: list[SideProcess] = []
        self._control, first = socket.socketpair()
        self._answers = self._control.makefile("rb")
        try:
            with ExitStack() as given, first:
                between = []
                if not contender.alone:
                    between = [given.enter_context(s) for s in socket.socketpair()]
                self._start(True, first, *between[:1])
                for right in between[1:]:
                    self._start(False, right)
            facts: dict[str, Any] = self._answer()["facts"]
            self.facts: dict[str, Any] = {**facts, **contender.environment}
        except BaseException:
            self.stop()
            raise

    def _start(self, left: bool, *sockets: socket.socket) -> None:
        program = name_of(self._contender.program)
        options = self._contender.options
        side = {"program": program, "left": left, "options": options}
        self.sides.append(SideProcess(self._contender, side, *sockets))

    def round(self, work: Work, *, checks: bool = False) -> Sample:
        """Do the work once; with ``checks``, use random bytes and compare them."""
        with suppress(OSError):  # the answer has the reason
            asked = {"work": asdict(work), "checks": checks}
            self._control.sendall(json.dumps(asked).encode() + b"\n")
        sample = Sample(**self._answer())
        if sample.damage:
            name = self._contender.name
            raise BenchError(
                f"{name}, {work.verb} of {work.nbytes} bytes: {sample.damage}"
            )
        return sample

    def _answer(self) -> dict[str, Any]:
        """Wait for the left side's next line."""
        self._control.settimeout(ANSWER_TIMEOUT_S)
        try:
            line = self._answers.readline()
        except TimeoutError:
            raise BenchError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None
        except OSError:  # killed with unread data
            line = b""
        if line and (found := json.loads(line)).get("error") != GONE:
            return found_in(found)
        # One side has ended without a reason, so both are ended.
        reasons = filter(None, [side.end() for side in reversed(self.sides)])
        raise BenchError(next(reasons, GONE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes; never raises."""
        self._answers.close()
        self._control.close()
        for side in self.sides:
            side.stop()
        self.sides.clear()
