"""iperf3 with one stream: what C gets out of a socket on this machine.

Each round is a new connection, which iperf3 cannot avoid, and moves at least
``ROUND_BYTES_MIN``, so that the slow start of TCP does not count against it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvwire import KVWireError
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.side import HOST, Side
from kvwire.cli.bench.turns import Benchmark, Missing
from kvwire.limits import GIB, MIB
from tests.support.servers import Server

INSTALL: Final = "apt-get install iperf3, or brew install iperf3"
ROUND_BYTES_MIN: Final = 1 * GIB
# The largest block that iperf3 takes.
_BLOCK_BYTES_MAX: Final = 1 * MIB
_TIMEOUT_S: Final = 60.0


def missing() -> Missing | None:
    """What to do if iperf3 is not installed; None if it is."""
    return None if shutil.which("iperf3") else Missing("iperf3", INSTALL)


def contender() -> Contender:
    """One stream of bytes."""
    note = "iperf3 moves a stream of bytes, not fragments."
    return Contender("iperf3", Iperf3Side, alone=True, streams=True, note=note)


def beside(benchmark: Benchmark) -> Benchmark:
    """Have it stand beside every rate of ``kvwire bench messages``, or name it."""
    if absent := missing():
        return replace(benchmark, missing=[*benchmark.missing, absent])
    one = contender()
    cases = [
        case
        if case.unit.less_is_better
        else replace(case, contenders=[*case.contenders, one])
        for case in benchmark.cases
    ]
    return replace(benchmark, cases=cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyWork(Work):
    """A work of messages or of fragments, whose layout does not matter here."""

    layers: int = 0
    cross_layer: bool = False
    blocks: int = 1
    fresh: int = 0


class Iperf3Side(Side[AnyWork]):
    """A server that stays, and a client for each round."""

    work_type = AnyWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        command = ["iperf3", "-s", "-B", HOST, "-p", "{port}", "--forceflush"]
        self._server = Server(command, "listening")

    async def connect(self, address: Any) -> dict[str, Any]:
        self._server.start()
        return {"version": _output(["iperf3", "--version"]).partition("\n")[0]}

    async def drive(self, work: AnyWork) -> dict[str, Any]:
        total = max(work.moved_bytes, ROUND_BYTES_MIN)
        block = min(work.nbytes, _BLOCK_BYTES_MAX)
        command = ["iperf3", "-J", "-c", HOST, "-p", str(self._server.port)]
        command += ["-n", str(total), "-l", str(block)]
        command += ["-R"] * (work.verb in {"get", "pull"})
        return read_report(_output(command))

    async def close(self) -> None:
        self._server.kill()


def _output(command: Sequence[str]) -> str:
    """What a program prints; nothing else is to be done meanwhile."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return done.stdout


def read_report(text: str) -> dict[str, Any]:
    """Read what ``iperf3 -J`` prints: the receiver's rate, and both sides' CPU."""
    try:
        report = json.loads(text)
        if "error" in report:
            raise KVWireError(f"iperf3: {report['error']}")
        received = report["end"]["sum_received"]
        cpu = report["end"]["cpu_utilization_percent"]
        elapsed_s = received["seconds"]
        percent = cpu["host_total"] + cpu["remote_total"]
        moved_bytes = received["bytes"]
        rate = moved_bytes / elapsed_s
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as exc:
        raise KVWireError(f"iperf3 printed no report: {exc!r}, {text[:75]!r}") from exc
    if not moved_bytes:
        raise KVWireError("iperf3 reports that nothing was received")
    cpu_s = percent / 100 * elapsed_s
    return {"values": [rate], "moved_bytes": moved_bytes, "cpu_s": cpu_s}
