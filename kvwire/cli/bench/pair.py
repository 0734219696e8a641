"""Processes that do the work of a contender, told what to do by this one.

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
from dataclasses import asdict, dataclass
from tempfile import TemporaryFile
from typing import IO, Any, Final, Self

from kvwire import KVWireError

# Long against every round there is; only something stuck takes as long.
ANSWER_TIMEOUT_S: Final = 120.0
# A side that was told to end, and how long until it is killed.
_END_TIMEOUT_S: Final = 5.0
_READ_BYTES: Final = 64 * 1024
# Of a line that is shown in an error.
_LAST_LINE_BYTES: Final = 200
PROGRAM: Final = (sys.executable, "-m", "kvwire.cli.bench")


class BenchError(KVWireError):
    """A benchmark could not be run, or its bytes did not arrive as they were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every contender of a case does in a round.

    Attributes:
        verb: Such as ``"round trip"``, ``"send"``, ``"put"`` or ``"get"``.
        nbytes: Bytes in one operation.
        count: Operations in a round.
        in_flight: Operations begun before the first has to be over.
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


class SideProcess:
    """One process; see :mod:`kvwire.cli.bench.side` for what runs in it.

    Args:
        role: Which side it plays, as ``module:class``.
        options: For that role.
        program: What is run with role and options.
        environment: Variables that it gets besides those of this process.
        quiet: Its standard error is not shown, since some peers log whatever they do;
            the last line of it is in the error if the process ends.
    """

    def __init__(
        self,
        role: str,
        options: Mapping[str, str],
        *,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self.role = role
        self._said = TemporaryFile() if quiet else None  # noqa: SIM115 - until stop()
        self._process = subprocess.Popen(  # noqa: S603 - a program that we know
            [*program, role, *(f"{name}={value}" for name, value in options.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env={**os.environ, **(environment or {})},
        )
        self._pending = b""

    def call(self, name: str, **arguments: Any) -> Any:
        """Have something done and wait for the answer.

        Raises:
            BenchError: It failed there, or that process has ended or is stuck.
        """
        self.ask(name, **arguments)
        return self.answer()

    def ask(self, name: str, **arguments: Any) -> None:
        """Have something begun; :meth:`answer` waits for it."""
        line = json.dumps({"call": name, "arguments": arguments}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will tell
            self._process.stdin.write(line.encode())

    def answer(self) -> Any:
        """Wait for what was asked first and has not been answered.

        Raises:
            BenchError: It failed there, or that process has ended or is stuck.
        """
        found = json.loads(self._line())
        if "error" in found:
            raise BenchError(f"the {self.role} side of the benchmark: {found['error']}")
        return found["answer"]

    def pause(self) -> None:
        """Stop all of its threads until :meth:`resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process: at once if it does not end by itself. Never raises."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if self._said is not None:
            self._said.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([descriptor], [], [], ANSWER_TIMEOUT_S)[0]:
                raise BenchError(
                    f"the {self.role} side of the benchmark did not answer within "
                    f"{ANSWER_TIMEOUT_S:g} s"
                )
            read = os.read(descriptor, _READ_BYTES)
            if not read:
                status = self._process.wait()
                raise BenchError(
                    f"the {self.role} side of the benchmark ended with status {status}"
                    f"{last_line(self._said)}"
                )
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def last_line(said: IO[bytes] | None) -> str:
    """Return the last line that a process wrote, with a colon before it, or ""."""
    if said is None:
        return ""
    end = said.seek(0, os.SEEK_END)
    said.seek(max(0, end - _LAST_LINE_BYTES))
    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f": {last}" if last else ""


class Contender:
    """One way to do the work: kvwire, or what stands beside it.

    Args:
        name: As it is shown.
        role: What both sides play: a class, or a name that its program knows.
        right: What the right side plays, if that is another.
        environment: Variables that both sides get.
        program: What is run with role and options.
        alone: One process does both sides' work.
        pauses: It polls as long as it lives: while it is not its turn, it is stopped.
        ours: It is kvwire, where there are several.
        streams: It moves bytes side by side, which have no layout.
        note: A line that a reader of the table needs; "" for none.
        beside: Whose processes do its work, if not its own; they are told by ``asks``.
        asks: Fields of a work that are its own.
        options: For its sides.
    """

    def __init__(
        self,
        name: str,
        role: type[Any] | str,
        right: type[Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        alone: bool = False,
        pauses: bool = False,
        ours: bool = False,
        streams: bool = False,
        note: str = "",
        beside: Contender | None = None,
        asks: Mapping[str, Any] | None = None,
        **options: object,
    ) -> None:
        self.name = name
        self.roles: list[str] = [
            _path(one) for one in (role, right or role)[: 2 - alone]
        ]
        self.environment: Mapping[str, str] = environment or {}
        self.program = program
        self.pauses = pauses
        self.ours = ours
        self.streams = streams
        self.note = note
        self.owner: Contender = beside or self
        self.asks: Mapping[str, Any] = asks or {}
        self.options: dict[str, str] = {key: str(options[key]) for key in options}

    def start(self) -> Pair:
        """Start its processes and connect them.

        Raises:
            BenchError: It cannot run here.
        """
        return Pair(self)


def _path(role: type[Any] | str) -> str:
    return role if isinstance(role, str) else f"{role.__module__}:{role.__qualname__}"


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
        for role in one.roles:
            side = SideProcess(
                role,
                one.options,
                program=one.program,
                environment=one.environment,
                quiet=one.pauses,
            )
            self._sides.append(side)
        left, *right = self._sides
        address = right[0].call("listen") if right else None
        for side in right:
            side.ask("accept")
        facts = left.call("connect", address=address)
        for side in right:
            side.answer()
        self._pause()
        return {**facts, **one.environment}

    def check(self, work: Work) -> None:
        """Show that random bytes arrive as they were sent; not timed.

        Raises:
            BenchError: They do not.
        """
        self._resume()
        said = self._prepare(work)
        for side in self._sides:
            side.call("fill", work=said)
        self.move(work)
        left, *right = (side.call("digest", work=said) for side in self._sides)
        self._sides[0].call("verify", work=said)
        self._pause()
        if [left] * len(right) != right:
            raise BenchError(
                f"{self._contender.name}, {work.verb} of {work.nbytes} bytes: what "
                f"arrived is not what was sent: {left} on the left, {right[0]} on the "
                "right"
            )

    def round(self, work: Work) -> Sample:
        """Do the work once; a side may say itself how much CPU it took.

        Raises:
            BenchError: It broke.
        """
        self._resume()
        said = self._prepare(work)
        before = self.cpu_s()
        answers = self.move(work)
        spent = [b - a for a, b in zip(before, self.cpu_s(), strict=True)]
        self._sides[0].call("verify", work=said)
        self._pause()
        cpu_s = [a.get("cpu_s", s) for a, s in zip(answers, spent, strict=True)]
        moved = answers[0].get("moved_bytes", work.moved_bytes)
        return Sample(answers[0]["values"], moved, cpu_s)

    def move(self, work: Work) -> list[dict[str, Any]]:
        """Do the work once; what the left and the right side say of it.

        Raises:
            BenchError: It broke.
        """
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
        self._resume()
        for side in self._sides:
            side.stop()
        self._sides.clear()

    def _prepare(self, work: Work) -> dict[str, Any]:
        said = asdict(work)
        left, *right = self._sides
        given = right[0].call("prepare", work=said) if right else None
        left.call("use", work=said, given=given)
        return said

    def _pause(self) -> None:
        for side in self._sides if self._contender.pauses else ():
            side.pause()

    def _resume(self) -> None:
        for side in self._sides if self._contender.pauses else ():
            side.resume()
