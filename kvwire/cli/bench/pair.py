"""Two processes that do the work of a contender, told what to do by this one.

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
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import IO, Any, Final

from kvwire.cli.bench.case import Contender, Sample, Work
from kvwire.cli.bench.errors import BenchError

# Long against every round there is; only something stuck takes as long.
ANSWER_TIMEOUT_S: Final = 120.0
# A side that was told to end, and how long until it is killed.
_END_TIMEOUT_S: Final = 5.0
_READ_BYTES: Final = 64 * 1024
# Of a line that is shown in an error.
_LAST_LINE_BYTES: Final = 200
_OUR_SIDES: Final = (sys.executable, "-m", "kvwire.cli.bench.sides")


class SideProcess:
    """One process; see :mod:`kvwire.cli.bench.sides` for what runs in it.

    Args:
        role: Which side it plays, such as ``"kvwire"``.
        options: For that role.
        program: What is run with role and options; None for our own sides.
        environment: Variables that it gets besides those of this process.
        quiet: Its standard error is not shown, since some peers log whatever they do;
            the last line of it is in the error if the process ends.
    """

    def __init__(
        self,
        role: str,
        options: Sequence[str] = (),
        *,
        program: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self.role = role
        self._said = TemporaryFile() if quiet else None  # noqa: SIM115 - until stop()
        self._process = subprocess.Popen(  # noqa: S603 - a program that we know
            [*(program or _OUR_SIDES), role, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env={**os.environ, **(environment or {})},
        )
        self._pending = b""

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Have something done and wait for it.

        Raises:
            BenchError: It failed there, or that process has ended.
        """
        self.ask(name, **arguments)
        return self.answer()

    def ask(self, name: str, **arguments: Any) -> None:
        """Have something begun; :meth:`answer` waits for it."""
        line = json.dumps({"call": name, "arguments": arguments}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will tell
            self._process.stdin.write(line.encode())

    def answer(self) -> dict[str, Any]:
        """Wait for what was asked first and has not been answered.

        Raises:
            BenchError: It failed there, or that process has ended or is stuck.
        """
        found = json.loads(self._line())
        if "error" in found:
            raise BenchError(f"the {self.role} side of the benchmark: {found['error']}")
        assert isinstance(found, dict)
        return found

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
    """The last line that a process wrote to a file, with a colon before it, or ""."""
    if said is None:
        return ""
    end = said.seek(0, os.SEEK_END)
    said.seek(max(0, end - _LAST_LINE_BYTES))
    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f": {last}" if last else ""


class PairContender(Contender):
    """A contender that is a pair of our own processes.

    The left side connects and keeps the time, the right side listens.

    Args:
        name: As it is shown.
        role: What both sides play.
        options: For that role.
        environment: Variables that both sides get.
        program: What is run with role and options; None for our own sides.
    """

    _left: SideProcess
    _right: SideProcess

    def __init__(
        self,
        name: str,
        role: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self._program = program
        self._role = role
        self._options = options
        self._environment = environment
        self._sides: list[SideProcess] = []
        self._facts: dict[str, Any] = {}

    def start(self) -> None:
        """See Contender."""
        for _ in range(2):
            self._sides.append(self._new_side())
        self._left, self._right = self._sides
        address = self._right.call("listen")["address"]
        self._right.ask("accept")
        self._facts = self._left.call("connect", address=address)
        self._right.answer()

    def check(self, work: Work) -> None:
        """See Contender."""
        self.prepare(work)
        said = asdict(work)
        self._right.ask("check_right", work=said)
        left = self._left.call("check_left", work=said)["digest"]
        right = self._right.answer()["digest"]
        if left != right:
            raise BenchError(
                f"{self.name}, {work.verb} of {work.nbytes} bytes: what arrived "
                f"({right}) is not what was sent ({left})"
            )

    def round(self, work: Work) -> Sample:
        """See Contender."""
        said = asdict(work)
        before = self._cpu_s()
        self._right.ask("serve", work=said)
        values = self._left.call("drive", work=said)["values"]
        self._right.answer()
        after = self._cpu_s()
        left_s, right_s = (b - a for a, b in zip(before, after, strict=True))
        return Sample(values, work.moved_bytes, left_s + right_s, (left_s, right_s))

    def prepare(self, work: Work) -> None:
        """Have both sides get ready."""
        said = asdict(work)
        given = self._right.call("prepare", work=said)
        self._left.call("use", work=said, given=given)

    def stop(self) -> None:
        """See Contender."""
        for side in self._sides:
            side.stop()
        self._sides.clear()

    def facts(self) -> dict[str, Any]:
        """See Contender."""
        return self._facts

    def _new_side(self) -> SideProcess:
        return SideProcess(
            self._role,
            self._options,
            program=self._program,
            environment=self._environment,
        )

    def _cpu_s(self) -> list[float]:
        return [float(side.call("cpu")["cpu_s"]) for side in self._sides]


class FragmentPair(PairContender):
    """kvwire with fragments; getting ready for a work is not part of a round."""

    _prepared: Work | None = None

    def start(self) -> None:
        """See Contender."""
        self._prepared = None
        super().start()

    def check(self, work: Work) -> None:
        """See Contender."""
        super().check(work)
        self._prepared = work

    def round(self, work: Work) -> Sample:
        """See Contender."""
        self._prepare_once(work)
        return super().round(work)

    def _prepare_once(self, work: Work) -> None:
        if work != self._prepared:
            self.prepare(work)
            self._prepared = work
