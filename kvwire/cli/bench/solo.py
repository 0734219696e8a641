"""Contenders that are one process, and those that are two runs of a program."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

from kvwire.cli.bench.case import Contender, Missing, Sample, Work
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.iperf3 import HOST, free_port
from kvwire.cli.bench.pair import Side, last_line
from kvwire.limits import MIB

_TIMEOUT_S: Final = 60.0
_WARM_UP: Final = 100
# Between two looks whether the server listens, and how many there are: 10 s.
_LISTEN_POLL_S: Final = 0.01
_LISTEN_LOOKS: Final = 1000


class SoloContender(Contender):
    """One process of our own that does both sides' work.

    Args:
        name: As it is shown.
        role: What it plays.
        options: For that role.

    Attributes:
        options: For that role.
        environment: Variables that its process gets besides those of this one.
    """

    _side: Side

    def __init__(self, name: str, role: str, options: Sequence[str] = ()) -> None:
        self.name = name
        self.options = options
        self.environment: Mapping[str, str] = {}
        self._role = role
        self._facts: dict[str, Any] = {}

    def start(self) -> None:
        """See Contender."""
        self._side = Side(self._role, self.options, environment=self.environment)
        self._facts = self._side.call("start")

    def check(self, work: Work) -> None:
        """See Contender."""
        found = self._side.call("check", work=asdict(work))
        if found["sent"] != found["arrived"]:
            raise BenchError(
                f"{self.name}, {work.nbytes} bytes: what arrived "
                f"({found['arrived']}) is not what was sent ({found['sent']})"
            )

    def round(self, work: Work) -> Sample:
        """See Contender."""
        self.prepare(work)
        before_s = self.cpu_s()
        values = self._side.call("drive", work=asdict(work))["values"]
        after_s = self.cpu_s()
        self._side.call("verify", work=asdict(work))
        return Sample(values, work.nbytes * work.count, after_s - before_s)

    def prepare(self, work: Work) -> None:
        """Have it get ready; neither its time nor its CPU counts."""
        self._side.call("prepare", work=asdict(work))

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return float(self._side.call("cpu")["cpu_s"])

    def stop(self) -> None:
        """See Contender."""
        if hasattr(self, "_side"):
            self._side.stop()

    def facts(self) -> dict[str, Any]:
        """See Contender."""
        return self._facts


class UcxPerftest(Contender):
    """``ucx_perftest``: the same buffer again and again, which is not scattered.

    Where it stays in the cache, that is faster than any memory.

    Args:
        setting: What is added to its name.
        environment: Variables that it gets besides those of this process.
        program: Where it is.
    """

    def __init__(
        self, setting: str, environment: Mapping[str, str], program: str
    ) -> None:
        self.name = f"ucx_perftest {setting}"
        self._environment = {**os.environ, **_library_path(program), **environment}
        self._program = program

    def start(self) -> None:
        """Each round is a server and a client of its own."""

    def check(self, work: Work) -> None:
        """It does not say what has arrived."""

    def round(self, work: Work) -> Sample:
        """See Contender."""
        before_s = _children_cpu_s()
        with TemporaryFile() as said:
            text = self._serve_and_ask(work, said)
        cpu_s = _children_cpu_s() - before_s
        return Sample([read_rate(text)], work.nbytes * work.count, cpu_s)

    def stop(self) -> None:
        """Nothing runs between rounds."""

    def _serve_and_ask(self, work: Work, said: IO[bytes]) -> str:
        """Run a server, which writes to ``said``, and return what its client prints."""
        port = free_port()
        server = subprocess.Popen(  # noqa: S603 - arguments of ours
            [self._program, "-p", str(port)],
            env=self._environment,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(port, server, said)
            text = self._client(work, port)
            server.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{self.name}: stuck for {_TIMEOUT_S:g} s") from None
        finally:
            server.kill()
            server.wait()
        return text

    def _client(self, work: Work, port: int) -> str:
        test = "ucp_put_bw" if work.verb == "push" else "ucp_get"
        done = subprocess.run(  # noqa: S603 - arguments of ours
            [
                *(self._program, HOST, "-p", str(port), "-t", test),
                *("-s", str(work.nbytes), "-n", str(work.count)),
                *("-w", str(_WARM_UP), "-f", "-v"),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
            raise BenchError(
                f"{self.name} ended with status {done.returncode}: {last[:200]}"
            )
        return done.stdout


def ucx_perftest(interpreters: Sequence[str]) -> str | None:
    """Where it is: on the path, or in the libucx wheel of an interpreter."""
    found = shutil.which("ucx_perftest")
    if found:
        return found
    for interpreter in interpreters:
        roots = Path(interpreter).absolute().parent.parent.glob("lib/python3*")
        for root in roots:
            program = root / "site-packages" / "libucx" / "bin" / "ucx_perftest"
            if program.exists():
                return str(program)
    return None


NO_UCX_PERFTEST: Final = Missing(
    "ucx_perftest", "apt-get install ucx-utils, or pip install libucx-cu12"
)


def _library_path(program: str) -> Mapping[str, str]:
    """Where the program of a wheel finds its libraries; nothing for another one's.

    The linker knows those of a package of the system. A wheel's are beside its program,
    which does not say so itself.
    """
    folder = Path(program).resolve().parent.parent / "lib"
    if not (folder / "libucp.so.0").exists():
        return {}
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": ":".join(filter(None, [str(folder), inherited]))}


def read_rate(text: str) -> float:
    """The average rate in bytes a second, of what ``ucx_perftest -f -v`` prints.

    Raises:
        BenchError: It is no such report.
    """
    lines = text.strip().splitlines()
    try:
        row = dict(zip(lines[-2].split(","), lines[-1].split(","), strict=True))
        return float(row["avg_bw"]) * MIB
    except (IndexError, KeyError, ValueError) as exc:
        raise BenchError(
            f"ucx_perftest printed no report: {exc!r} in {text[:75]!r}"
        ) from exc


def _children_cpu_s() -> float:
    """Of those that have ended: nobody else's end between two looks."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for(port: int, server: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """Until the server listens, without connecting: it takes one client only."""
    # Its own end, with no other one, and listening: not a connection of anybody's.
    wanted = f":{port:04X} 00000000:0000 0A "
    for _ in range(_LISTEN_LOOKS):
        if wanted in Path("/proc/net/tcp").read_text():
            return
        if server.poll() is not None:
            raise BenchError(
                f"ucx_perftest ended with status {server.returncode}{last_line(said)}"
            )
        time.sleep(_LISTEN_POLL_S)
    raise BenchError("ucx_perftest does not listen")
