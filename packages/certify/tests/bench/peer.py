"""NIXL beside kvwire, and iperf3: how to get them, and which work they can do.

NIXL need not be installed beside kvwire. It is looked for in the interpreters that the
user names, then in this one; if it is found nowhere, how to install it is said.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvwire import UsageError
from kvwire_certify.bench.command import SAME_HOST, TCP, UCX, VERBS
from kvwire_certify.bench.pair import BenchError, Contender
from kvwire_certify.bench.turns import Benchmark, Case, Missing
from packages.certify.tests.bench import iperf3

# Loads the program as a package without kvwire around it; behind what is installed,
# since a module here may be called like one of those.
PROGRAM: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
    "from peers.serving import main; main()"
)
# A cold import of torch is not even tried: the module is only looked for.
_PROBE_TIMEOUT_S: Final = 60.0
NIXL: Final = "nixl"
INSTALL: Final = "pip install nixl-cu12 numpy (brings torch; --no-deps will do)"
ALL_PEERS: Final = (NIXL, iperf3.NAME)


def interpreters(named: Sequence[Path]) -> list[str]:
    """Those that the user named, then this one."""
    for path in named:
        if not _has(str(path), "json"):
            raise BenchError(f"--peer-python {path}: this is not a Python")
    return [*map(str, named), sys.executable]


def interpreter(candidates: Sequence[str]) -> str | None:
    """The first interpreter that has NIXL."""
    return next((one for one in candidates if _has(one, "nixl_cu12")), None)


def _has(interpreter: str, module: str) -> bool:
    code = (
        "import importlib.util, sys; "
        "sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code, module],
            timeout=_PROBE_TIMEOUT_S,
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def contender(setting: str, interpreter: str, pool_bytes: int) -> Contender:
    """Make the two processes of one setting, stopped while it is not their turn.

    They poll for as long as they live, and would take the CPU from others.
    """
    return Contender(
        f"{NIXL} {setting}",
        f"{NIXL}:left",
        f"{NIXL}:right",
        environment=UCX[setting],
        command=(interpreter, "-c", PROGRAM),
        options={"pool_bytes": pool_bytes},
        is_paused=True,
    )


def joined(
    benchmark: Benchmark, names: Sequence[str], candidates: Sequence[str], wire: str
) -> Benchmark:
    """Let each of these take part that is installed, beside the work that it can do.

    NIXL moves blocks of caches, of cases with its wire; iperf3 stands beside rates over
    TCP. ``wire`` is that of cases without a group.
    """
    blocks = [
        case.work
        for case in benchmark.cases
        if case.work.layers and case.work.verb in VERBS
    ]
    pool_bytes = max((work.memory_bytes for work in blocks), default=0)
    missing = list(benchmark.missing)
    team: list[tuple[str, Contender]] = []
    streams: list[Contender] = []
    for name in names:
        if name not in ALL_PEERS:
            raise UsageError(f"--peers {name}: there are {', '.join(ALL_PEERS)}")
        if name == iperf3.NAME:
            absent = iperf3.missing()
            streams += [] if absent else [iperf3.contender()]
            missing += [absent] if absent else []
        elif blocks:
            found = interpreter(candidates)
            if found is None:
                elsewhere = "in another environment, name its interpreter with"
                remedy = f"{INSTALL}; if that is {elsewhere} --peer-python"
                missing.append(Missing(NIXL, remedy))
                continue
            for setting in UCX:
                one = contender(setting, found, pool_bytes)
                team.append((SAME_HOST if setting == "shm" else TCP, one))

    def beside(case: Case) -> list[Contender]:
        its = case.group or wire
        found = [one for where, one in team if where == its and case.work in blocks]
        return found + (streams if its == TCP and not case.unit.is_time else [])

    cases = [
        replace(case, beside=[*case.beside, *beside(case)]) for case in benchmark.cases
    ]
    return replace(benchmark, cases=cases, missing=missing)
