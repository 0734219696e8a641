"""Reading calls and answering them; the memory that all programs have alike."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from abc import abstractmethod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CALLS: Final = frozenset(
    {
        *("listen", "accept", "connect", "prepare", "use", "verify"),
        *("fill", "digest", "drive", "serve", "cpu"),
    }
)
HOST: Final = "127.0.0.1"
# As in kvwire.cli.bench.operations, which a program need not have.
LEFT: Final = 1
RIGHT: Final = 2
Offsets = npt.NDArray[np.int64]
_DIGEST_BYTES: Final = 16


class Peer:
    """One side. The right one listens and serves, the left one drives.

    The order of calls is that of ``kvwire.cli.bench.side``. A work is ``verb`` ("push"
    or "pull") and one transfer of ``nbytes`` in ``layers`` and ``blocks``; a block has
    all layers side by side if it is ``cross_layer``.

    Args:
        options: ``pool_bytes`` is how much memory to have.

    Attributes:
        memory: The pool.
        work: What was prepared last.
        offsets: Where its fragments begin in the pool.
        nbytes: Bytes of each fragment.
    """

    def __init__(self, options: dict[str, str]) -> None:
        # Written to, so that no page is missing when it is timed.
        self.memory = np.full(int(options["pool_bytes"]), 1, np.uint8)
        self.work: dict[str, Any] = {}
        self.offsets = np.zeros(0, np.int64)
        self.nbytes = 0

    @property
    def base(self) -> int:
        """The address of the pool."""
        return int(self.memory.ctypes.data)

    @abstractmethod
    def listen(self) -> Any:
        """Right: what the left side needs."""

    def accept(self) -> None:
        """Right: wait for the left one, where that is needed."""

    @abstractmethod
    def connect(self, address: Any) -> dict[str, Any]:
        """Left: connect; the answer is facts for the JSON document."""

    def prepare(self, work: dict[str, Any]) -> None:
        """Right: get ready."""
        self._take(work, RIGHT)

    def use(self, work: dict[str, Any], given: None) -> None:
        """Left: get ready."""
        if self._take(work, LEFT):
            self.ready(offsets(work, RIGHT))

    def ready(self, theirs: Offsets) -> None:
        """Left: get ready for a work that is new; where its fragments are there."""

    def fill(self, work: dict[str, Any]) -> None:
        """Random bytes into the whole pool."""
        words = self.memory[: self.memory.size // 8 * 8].view(np.uint64)
        words[:] = np.random.default_rng().integers(0, 2**63, words.size, np.uint64)

    def digest(self, work: dict[str, Any]) -> str:
        travelling = self.fragments()[self.rows].data
        return hashlib.blake2b(travelling, digest_size=_DIGEST_BYTES).hexdigest()

    def drive(self, work: dict[str, Any]) -> list[float]:
        """Left: move everything ``count`` times; the answer is the seconds of each."""
        seconds = []
        for _ in range(work["count"]):
            began = time.perf_counter()
            self.move()
            seconds.append(time.perf_counter() - began)
        return seconds

    @abstractmethod
    def move(self) -> None:
        """Left: move everything once; over when it is where it belongs."""

    def serve(self, work: dict[str, Any]) -> None:
        """Right: what :meth:`drive` needs of it."""

    def verify(self, work: dict[str, Any]) -> None:
        """Left: nothing."""

    def cpu(self) -> float:
        return time.process_time()

    def fragments(self) -> npt.NDArray[np.uint8]:
        """The pool as an array with a row for each place of a fragment."""
        whole = self.memory[: self.memory.size // self.nbytes * self.nbytes]
        return whole.reshape(-1, self.nbytes)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = self.offsets // self.nbytes
        return rows

    def _take(self, work: dict[str, Any], side: int) -> bool:
        if work == self.work:
            return False
        self.work, self.offsets = work, offsets(work, side)
        self.nbytes = work["nbytes"] // len(self.offsets)
        return True


def offsets(work: dict[str, Any], side: int) -> Offsets:
    """Where each fragment of a side begins in its pool, as in a pool of kvwire."""
    layers = 1 if work["cross_layer"] else work["layers"]
    count, spread = work["blocks"], work["spread"]
    blocks = np.arange(count) * spread
    np.random.default_rng(side).shuffle(blocks)
    first = np.arange(layers) * spread * count
    nbytes = work["nbytes"] // (layers * count)
    found: Offsets = (first[:, None] + blocks).ravel() * nbytes
    return found


def main() -> None:
    """Be one side of a peer until the input ends: ``PROGRAM [KEY=VALUE ...]``."""
    program, *pairs = sys.argv[1:]
    module = importlib.import_module(f".{program}", __package__)
    serve(module.Program, dict(pair.split("=", 1) for pair in pairs))


def serve(program: type[Peer], options: dict[str, str]) -> None:
    # Ctrl-C reaches every process of a terminal; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print what they like: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            peer = peer or program(options)
            found = {"answer": _call(peer, asked["call"], asked["arguments"])}
        except Exception as exc:  # noqa: BLE001 - it is reported by the other process
            found = {"error": f"{asked['call']}: {type(exc).__name__}: {exc}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    # Threads of a peer that never end would keep the interpreter from ending.
    os._exit(0)


def _call(peer: Peer, name: str, arguments: dict[str, Any]) -> Any:
    if name not in CALLS:
        raise ValueError(f"there is no call {name!r}")
    return getattr(peer, name)(**arguments)
