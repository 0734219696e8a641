"""Contenders, and the two processes that run each one.

The processes are started from scratch and never forked, so that neither inherits the
other's loop, locks or warm caches. This process tells both what to do and waits: while
a round is timed, it is idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, Self

from kvwire import KVWireError
from kvwire_certify.bench.line import Program, Seconds, Turn, name_of
from kvwire_certify.bench.work import Work

# Longer than any round; only a stuck process takes this long.
ANSWER_TIMEOUT_S: Final = 120.0
# How long a side with nothing left to do may take to end before it is killed.
END_TIMEOUT_S: Final = 5.0
# After the failure of one side, the other's is waited for so long.
_CAUSE_S: Final = 1.0
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
COMMAND: Final = (sys.executable, "-m", "kvwire_certify.bench")


class BenchError(KVWireError):
    """Reports a benchmark that could not run, or bytes that arrived damaged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: the measured times, and the CPU seconds of each side."""

    seconds: Seconds
    cpu_s: Seconds
    # What a side answered beside these, for each side.
    answers: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to do the work: kvwire, or a program to compare it with."""

    name: str
    # Programs, or names by which the command knows them.
    left: Program | str
    # None if there is only a left side.
    right: Program | str | None = None
    _: KW_ONLY
    options: Mapping[str, object] = field(default_factory=dict)
    # Environment variables for both sides.
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = COMMAND
    # Stopped between its rounds: some programs poll for as long as they live.
    is_paused: bool = False

    def start(self) -> Pair:
        """Start its processes and connect them."""
        return Pair(self)


class SideProcess:
    """One process, with its line as standard input.

    Its output is not shown, since some programs log a lot. If the process ends early,
    the error contains the last line of its standard error.
    """

    def __init__(
        self, contender: Contender, program: Program | str, options: Mapping[str, Any]
    ) -> None:
        self.socket, theirs = socket.socketpair()
        self._lines = self.socket.makefile("rb")
        self._errors = TemporaryFile()  # noqa: SIM115 - until stop()
        # Why it has failed; "" if it has not.
        self.failure: str = ""
        name = program if isinstance(program, str) else name_of(program)
        with theirs:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - a program that we know
                [*contender.command, name, json.dumps(options)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, **contender.environment},
            )

    def tell(self, value: object) -> None:
        """Send a value; if the process has ended, ``answer`` raises the reason."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(value).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """Return the next value.

        Raises:
            BenchError: The side has failed; ``failure`` keeps the reason.
        """
        try:
            line = self._lines.readline()
        except OSError:  # killed with unread data
            line = b""
        found: dict[str, Any] = json.loads(line) if line else {"error": self._end()}
        if "error" in found:
            self.failure = found["error"]
            raise BenchError(self.failure)
        return found

    def place(self, cpus: Sequence[int]) -> None:
        """Have all threads of the process run on these CPUs."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task.name), cpus)

    def _end(self) -> str:
        """Wait until the process has ended; return how."""
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def stop(self) -> None:
        """End the process; never raises."""
        self._lines.close()
        self.socket.close()
        self._end()
        self._errors.close()


class Pair:
    """A contender's connected processes; the left one measures the time."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.sides: list[SideProcess] = []
        self.facts: dict[str, Any] = dict(contender.environment)
        self._cpus: Sequence[int] = ()
        options = {**contender.options}
        try:
            # The left side is first in the list, and starts last.
            if contender.right is not None:
                self.sides.append(SideProcess(contender, contender.right, options))
                first = self._answer(-1)
                options["address"] = first["address"]
                self.facts |= first["facts"]
            self.sides.insert(0, SideProcess(contender, contender.left, options))
            self.facts |= self._answer(0)["facts"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.stop()
            raise

    def turn(
        self, work: Work, *, checks: bool = False, cpus: Sequence[int] = ()
    ) -> Sample:
        """Do the work once; with ``checks``, use random bytes and compare them.

        Args:
            work: What to do.
            checks: Whether to compare.
            cpus: The CPU of the left process, and that of the right one; empty for
                any.
        """
        self._signal(signal.SIGCONT)
        if cpus and cpus != self._cpus:
            for side, cpu in zip(self.sides, cpus, strict=False):
                side.place([cpu])
            self._cpus = cpus
        turn = Turn(work, checks)
        both = len(self.sides) > 1
        if both:
            self.sides[-1].tell(asdict(turn))
            turn = replace(turn, offer=self._answer(-1)["offer"])
        self.sides[0].tell(asdict(turn))
        answers = [self._answer(0)]
        if both:
            self.sides[-1].tell("over")
            answers.append(self._answer(-1))
        # A side on another host has answered the left one.
        answers += [answers[0]["other"]] if "other" in answers[0] else []
        self._signal(signal.SIGSTOP)
        digests = [answer["digest"] for answer in answers]
        if len(set(digests)) > 1:
            name = self.contender.name
            raise BenchError(
                f"{name}, {work.verb} of {work.nbytes} bytes: the received bytes "
                f"differ: {digests[0]} on the left, {digests[1]} on the right"
            )
        cpu_s = [answer["cpu_s"] for answer in answers]
        return Sample(answers[0]["seconds"], cpu_s, answers)

    def _answer(self, at: int) -> dict[str, Any]:
        """Return a side's answer; if any side fails, raise the reasons of all."""
        asked = self.sides[at]
        sockets = [side.socket for side in self.sides]
        ready, _, _ = select.select(sockets, [], [], ANSWER_TIMEOUT_S)
        if not ready:
            raise BenchError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
        if ready == [asked.socket]:
            with contextlib.suppress(BenchError):
                return asked.answer()
        # A side speaks only when it is asked, unless it has failed. The failure of one
        # is often the reason of the other's, so both are shown.
        for side in reversed(self.sides):
            waits = not side.failure and select.select([side.socket], [], [], _CAUSE_S)
            if waits and waits[0]:
                with contextlib.suppress(BenchError):
                    side.answer()
        reasons = (side.failure for side in reversed(self.sides) if side.failure)
        raise BenchError("; ".join(dict.fromkeys(reasons)))

    def _signal(self, number: signal.Signals) -> None:
        for side in self.sides if self.contender.is_paused else ():
            side.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes; never raises."""
        self._signal(signal.SIGCONT)
        for side in self.sides:
            side.stop()
        self.sides.clear()


def placements(
    allowed: Collection[int] = (), topology: Path = _TOPOLOGY
) -> dict[str, tuple[int, int] | tuple[()]]:
    """Return where two processes can be, with the CPU of each; any CPU has none.

    One CPU for both, and one for each, of different cores where there are some.

    Args:
        allowed: The CPUs to choose from; by default those of this process.
        topology: Where the system says which CPUs are of one core.
    """
    if not hasattr(os, "sched_setaffinity"):
        return {"wherever the system puts them": ()}
    first, *others = sorted(allowed or os.sched_getaffinity(0))
    found: dict[str, tuple[int, int] | tuple[()]] = {
        f"both on CPU {first}": (first,) * 2
    }
    siblings = _siblings(topology / f"cpu{first}" / "topology")
    others = [cpu for cpu in others if cpu not in siblings] or others
    if others:
        core = "" if others[0] not in siblings else ", one core"
        found[f"on CPUs {first} and {others[0]}{core}"] = (first, others[0])
    return found


def _siblings(folder: Path) -> set[int]:
    """Return the CPUs of one core."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for part in (folder / "thread_siblings_list").read_text().strip().split(","):
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return found
