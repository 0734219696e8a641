"""Peers that are libraries: which there are, how to get them, and how they are run.

A peer need not be installed beside kvwire. Each is looked for in the interpreters that
the user names, then in this one; what is found nowhere is named with how to install it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvwire.cli.bench.pair import Contender, Pair
from kvwire.cli.bench.side import BenchError, Sample, Work
from kvwire.cli.bench.turns import Missing

# Loads the programs as a package without kvwire around it; behind what is installed,
# since a module here may be called like one of those.
PROGRAM: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
    "from peers.serving import main; main()"
)
# A cold import of torch is not even tried: the module is only looked for.
_PROBE_TIMEOUT_S: Final = 60.0


class PausedContender(Contender):
    """One that polls as long as it lives: while it is not its turn, it is stopped."""

    def start(self) -> Pair:
        return PausedPair(self)


class PausedPair(Pair):
    """Processes that are stopped between two rounds."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        self._signal(signal.SIGSTOP)

    def round(self, work: Work, *, checks: bool = False) -> Sample:
        with self._going_on():
            return super().round(work, checks=checks)

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        super().stop()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Have them run; those of one that fails are ended by its caller."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for side in self.sides:
            side.process.send_signal(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library that does the same; its program is called as it is."""

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
        return PausedContender(
            f"{self.name} {setting}".rstrip(),
            self.name,
            environment=self.settings[setting],
            command=(interpreter, "-c", PROGRAM),
            options={"pool_bytes": pool_bytes},
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
            settings={
                "tcp": {"UCX_TLS": "tcp"},
                "shm": {"UCX_TLS": "self,sm,tcp"},
            },
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
        Peer(
            name="ucxx",
            module="ucxx",
            install="pip install ucxx-cu12 numpy",
            settings={"tcp": {"UCX_TLS": "tcp"}},
        ),
    )
}


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
