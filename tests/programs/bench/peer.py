"""Peers that are libraries: which there are, how to get them, and where they stand.

A peer need not be installed beside kvwire. Each is looked for in the interpreters that
the user names, then in this one; what is found nowhere is named with how to install it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvwire import UsageError
from kvwire.cli.bench.command import SAME_HOST, TCP, UCX, VERBS
from kvwire.cli.bench.pair import BenchError, Contender
from kvwire.cli.bench.turns import Benchmark, Case, Missing
from tests.programs.bench import iperf3

# Loads the programs as a package without kvwire around it; behind what is installed,
# since a module here may be called like one of those.
PROGRAM: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
    "from peers.serving import main; main()"
)
# A cold import of torch is not even tried: the module is only looked for.
_PROBE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library that moves fragments; its program has its name."""

    name: str
    # Its top-level one.
    module: str
    install: str
    # Environments to run it with, by what is added to its name.
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"": {}})

    def interpreter(self, candidates: Sequence[str]) -> str | None:
        """The first interpreter that has it."""
        return next((c for c in candidates if _has(c, self.module)), None)

    def contender(self, setting: str, interpreter: str, pool_bytes: int) -> Contender:
        """Make the two processes of one setting, stopped while it is not their turn.

        Some peers poll for as long as they live, and would take the CPU from others.
        """
        return Contender(
            f"{self.name} {setting}".rstrip(),
            f"{self.name}:left",
            f"{self.name}:right",
            environment=self.settings[setting],
            command=(interpreter, "-c", PROGRAM),
            options={"pool_bytes": pool_bytes},
            is_paused=True,
        )

    @property
    def missing(self) -> Missing:
        """What to say where no interpreter has it."""
        return Missing(
            self.name,
            f"{self.install}; if that is in another environment, name its interpreter "
            "with --peer-python",
        )


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer(
            name="nixl",
            module="nixl_cu12",
            install="pip install nixl-cu12 numpy (brings torch; --no-deps will do)",
            settings=UCX,
        ),
        Peer(
            name="mooncake",
            module="mooncake",
            install=(
                "pip install mooncake-transfer-engine-non-cuda numpy, and "
                "apt-get install libibverbs1 libnuma1 libcurl4"
            ),
            # One batch of everything, as everybody else gets; it refuses that at some
            # thousand fragments, so a second one goes in batches that it takes.
            settings={"": {}, "by 1024": {"BENCH_BATCH": "1024"}},
        ),
    )
}
ALL_PEERS: Final = (*PEERS, iperf3.NAME)


def interpreters(named: Sequence[Path]) -> list[str]:
    """Those that the user named, then this one."""
    for path in named:
        if not _has(str(path), "json"):
            raise BenchError(f"--peer-python {path}: this is not a Python")
    return [*map(str, named), sys.executable]


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


def joined(
    benchmark: Benchmark, names: Sequence[str], candidates: Sequence[str], wire: str
) -> Benchmark:
    """Let each of these take part that is installed, beside the work that it can do.

    Libraries move blocks of caches, of cases with their wire; iperf3 stands beside
    rates over TCP. ``wire`` is that of cases without a group.
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
            peer = PEERS[name]
            found = peer.interpreter(candidates)
            missing += [] if found else [peer.missing]
            for setting in peer.settings if found else ():
                one = peer.contender(setting, str(found), pool_bytes)
                team.append((SAME_HOST if setting == "shm" else TCP, one))

    def beside(case: Case) -> list[Contender]:
        its = case.group or wire
        found = [one for where, one in team if where == its and case.work in blocks]
        return found + (streams if its == TCP and not case.unit.is_time else [])

    cases = [
        replace(case, beside=[*case.beside, *beside(case)]) for case in benchmark.cases
    ]
    return replace(benchmark, cases=cases, missing=missing)
