"""Peers that are libraries: which there are, how to get them, and their two processes.

A peer need not be installed beside kvwire. Each is looked for in the interpreters that
the user names, then in this one; what is found nowhere is named with how to install it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from kvwire.cli.bench.case import Missing, Sample, Work
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.fragment_work import LEFT, RIGHT, FragmentWork, offsets
from kvwire.cli.bench.pair import FragmentPair, SideProcess

PROGRAMS: Final = Path(__file__).parent / "peers"
# A cold import of torch is not even tried: the module is only looked for.
_PROBE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library that does the same.

    Attributes:
        name: As it is asked for and shown; also of its program.
        module: Its top-level module.
        install: How to install it.
        settings: Environments to run it with, by what is added to its name.
    """

    name: str
    module: str
    install: str
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"": {}})

    def interpreter(self, candidates: Sequence[str]) -> str | None:
        """The first interpreter that has it."""
        return next((c for c in candidates if _has(c, self.module)), None)

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


class PeerContender(FragmentPair):
    """Two processes of a peer, stopped with SIGSTOP while it is not their turn.

    Some peers poll for as long as they live, and would take the CPU from others.

    Args:
        peer: Which.
        setting: A name in its ``settings``.
        interpreter: The Python that has it.
        pool_bytes: The largest pool of all works.
    """

    def __init__(
        self, peer: Peer, setting: str, interpreter: str, pool_bytes: int
    ) -> None:
        super().__init__(
            f"{peer.name} {setting}".rstrip(),
            peer.name,
            [f"pool_bytes={pool_bytes}"],
            peer.settings[setting],
        )
        self._program: Sequence[str] = (interpreter, str(PROGRAMS / "__main__.py"))

    def start(self) -> None:
        """See Contender."""
        super().start()
        self._pause()

    def check(self, work: Work) -> None:
        """See Contender."""
        self._resume()
        self._prepare_once(work)
        push = work.verb == "push"
        source, sink = (self._left, self._right) if push else (self._right, self._left)
        sent = source.call("fill")["digest"]
        self._move()
        arrived = sink.call("digest")["digest"]
        if arrived != sent:
            raise BenchError(
                f"{self.name}, {work.verb} of {work.nbytes} bytes: what arrived "
                f"({arrived}) is not what was sent ({sent})"
            )
        self._pause()

    def round(self, work: Work) -> Sample:
        """See Contender."""
        self._resume()
        self._prepare_once(work)
        before = self._cpu_s()
        found = self._move()
        after = self._cpu_s()
        self._pause()
        left_s, right_s = (b - a for a, b in zip(before, after, strict=True))
        cpu_s = (left_s, right_s)
        return Sample(found["values"], work.moved_bytes, sum(cpu_s), cpu_s)

    def stop(self) -> None:
        """See Contender."""
        self._resume()
        super().stop()

    def _move(self) -> dict[str, Any]:
        self._right.ask("serve")
        found = self._left.call("drive")
        self._right.answer()
        return found

    def prepare(self, work: Work) -> None:
        """See PairContender; both sides get the same files of offsets."""
        assert isinstance(work, FragmentWork)
        with TemporaryDirectory(prefix="kvwire-bench-") as folder:
            said: dict[str, Any] = {
                "verb": work.verb,
                "nbytes": work.nbytes,
                "count": work.count,
            }
            for name, side in (("left", LEFT), ("right", RIGHT)):
                said[name] = str(Path(folder) / f"{name}.npy")
                np.save(said[name], offsets(work, side))
            given = self._right.call("prepare", work=said)
            self._left.call("use", work=said, given=given)

    def _new_side(self) -> SideProcess:
        return SideProcess(
            self._role,
            self._options,
            program=self._program,
            environment=self._environment,
            quiet=True,
        )

    def _pause(self) -> None:
        for side in self._sides:
            side.pause()

    def _resume(self) -> None:
        for side in self._sides:
            side.resume()


def interpreters(named: Sequence[Path]) -> list[str]:
    """Those that the user named, then this one.

    Raises:
        BenchError: One of them is no Python.
    """
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
