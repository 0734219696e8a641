"""iperf3 with one stream: what C gets out of a socket on this machine.

Each round is a new connection, which iperf3 cannot avoid, and moves at least
``ROUND_BYTES_MIN``, so that the slow start of TCP does not count against it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from kvwire import KVWireError
from kvwire.limits import GIB, MIB
from kvwire_certify.bench.line import HOST, Line, turns
from kvwire_certify.bench.pair import Contender
from kvwire_certify.bench.turns import Missing
from kvwire_certify.bench.work import GET, PULL
from tests.support.servers import Server

NAME: Final = "iperf3"
INSTALL: Final = "apt-get install iperf3, or brew install iperf3"
ROUND_BYTES_MIN: Final = 1 * GIB
# The largest block that iperf3 takes.
_BLOCK_BYTES_MAX: Final = 1 * MIB
_TIMEOUT_S: Final = 60.0


def missing() -> Missing | None:
    """What to do if iperf3 is not installed; None if it is."""
    return None if shutil.which("iperf3") else Missing(NAME, INSTALL)


def contender() -> Contender:
    return Contender(NAME, run)


async def run(line: Line, options: dict[str, Any]) -> None:
    """Run a server that stays, and a client for each round.

    It moves more than it is asked to; its time and CPU are those of what it was asked.
    """
    command = ["iperf3", "-s", "-B", HOST, "-p", "{port}", "--forceflush"]
    server = Server(command, "listening")
    try:
        server.start()
        version = _output(["iperf3", "--version"]).partition("\n")[0]
        await line.send({"facts": {"version": version}})
        async for turn in turns(line):
            work = turn.work
            total = max(work.moved_bytes, ROUND_BYTES_MIN)
            block = min(work.nbytes // max(1, work.fragments), _BLOCK_BYTES_MAX)
            client = ["iperf3", "-J", "-c", HOST, "-p", str(server.port)]
            client += ["-n", str(total), "-l", str(block)]
            client += ["-R"] * (work.verb in {GET, PULL})
            seconds, cpu_s = read_report(_output(client))
            await line.send(
                {
                    "seconds": [seconds * work.moved_bytes],
                    "cpu_s": cpu_s * work.moved_bytes,
                    "digest": "",
                }
            )
    finally:
        server.kill()


def _output(command: Sequence[str]) -> str:
    """What a program prints; nothing else is to be done meanwhile."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return done.stdout


def read_report(text: str) -> tuple[float, float]:
    """Read what ``iperf3 -J`` prints: seconds and CPU of both sides for a byte."""
    report = json.loads(text)
    if "error" in report:
        raise KVWireError(f"iperf3: {report['error']}")
    received = report["end"]["sum_received"]
    cpu = report["end"]["cpu_utilization_percent"]
    seconds = received["seconds"] / received["bytes"]
    return seconds, (cpu["host_total"] + cpu["remote_total"]) / 100 * seconds
