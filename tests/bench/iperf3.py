"""iperf3 with one stream: what C gets out of a socket on this machine.

Each round is a new connection, which iperf3 cannot avoid, and moves at least
``ROUND_BYTES_MIN``, so that the slow start of TCP does not count against it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
from typing import Any, Final

from kvwire.cli.bench.case import Contender, Missing, Others, Sample, Work
from kvwire.cli.bench.errors import BenchError
from kvwire.limits import GIB, MIB

HOST: Final = "127.0.0.1"
INSTALL: Final = "apt-get install iperf3, or brew install iperf3"
ROUND_BYTES_MIN: Final = 1 * GIB
# The largest block that iperf3 takes.
_BLOCK_BYTES_MAX: Final = 1 * MIB
_TIMEOUT_S: Final = 60.0
# Below what Linux and macOS give to connections.
_PORTS: Final = range(20_000, 32_768)
_TRIES: Final = 100


def missing() -> Missing | None:
    """What to do if iperf3 is not installed; None if it is."""
    if _found():
        return None
    return Missing("iperf3", INSTALL)


def installed() -> Others:
    """Return it as one who stands beside messages, or as one who is missing."""
    absent = missing()
    if absent:
        return Others(missing=[absent])
    return Others(movers={"messages": [Iperf3()]})


class Iperf3(Contender):
    """A server that stays, and a client for each round."""

    name = "iperf3"
    streams = True
    note = "iperf3 moves a stream of bytes, not fragments."

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._port = 0

    def start(self) -> None:
        """See Contender."""
        self._port = free_port()
        self._server = subprocess.Popen(
            _command("-s", "-B", HOST, "-p", str(self._port), "--forceflush"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._server.stdout is not None
        said = ""
        for line in self._server.stdout:
            said += line
            if "listening" in line:
                return
        raise BenchError(f"iperf3 -s ended: {said.strip()}")

    def check(self, work: Work) -> None:
        """It has its own idea of what it sends; nothing to compare."""

    def round(self, work: Work) -> Sample:
        """See Contender."""
        total = max(work.nbytes * work.count, ROUND_BYTES_MIN)
        block = min(work.nbytes, _BLOCK_BYTES_MAX)
        done = subprocess.run(
            _command(
                *("-J", "-c", HOST, "-p", str(self._port)),
                *("-n", str(total), "-l", str(block)),
                *(["-R"] if work.verb in {"get", "pull"} else []),
            ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return read_report(done.stdout)

    def stop(self) -> None:
        """See Contender."""
        if self._server is None:
            return
        self._server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(_TIMEOUT_S)
        assert self._server.stdout is not None
        self._server.stdout.close()
        self._server = None

    def facts(self) -> dict[str, Any]:
        """See Contender."""
        done = subprocess.run(
            _command("--version"), capture_output=True, text=True, check=False
        )
        return {"version": done.stdout.partition("\n")[0]}


def read_report(text: str) -> Sample:
    """Read what ``iperf3 -J`` prints: the receiver's rate, and both sides' CPU.

    Raises:
        BenchError: It reports an error, or is no such report.
    """
    try:
        report = json.loads(text)
        if "error" in report:
            raise BenchError(f"iperf3: {report['error']}")
        received = report["end"]["sum_received"]
        cpu = report["end"]["cpu_utilization_percent"]
        elapsed_s = received["seconds"]
        percent = cpu["host_total"] + cpu["remote_total"]
        moved_bytes = received["bytes"]
        rate = moved_bytes / elapsed_s
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as exc:
        raise BenchError(f"iperf3 printed no report: {exc!r} in {text[:75]!r}") from exc
    if not moved_bytes:
        raise BenchError("iperf3 reports that nothing was received")
    return Sample([rate], moved_bytes, percent / 100 * elapsed_s)


def _found() -> str | None:
    return shutil.which("iperf3")


def _command(*arguments: str) -> list[str]:
    return [_found() or "iperf3", *arguments]


def free_port() -> int:
    """A port that nobody listens on, just now.

    None of those that the kernel gives to connections: one of them would have it before
    the program that is told to listen there.

    Raises:
        BenchError: All that were tried are taken.
    """
    for _ in range(_TRIES):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise BenchError(f"no free port was found in {_PORTS.start} to {_PORTS.stop - 1}")
