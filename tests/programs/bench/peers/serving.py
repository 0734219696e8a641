"""The frame of a peer's program, and the memory that all programs have alike.

It does what :class:`kvwire.cli.bench.side.Bench` does, without kvwire: lines of JSON
between the process that runs the benchmark, the left side, and the right one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from abc import abstractmethod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

HOST: Final = "127.0.0.1"
# As in kvwire.cli.bench.operations, which a program need not have.
LEFT: Final = 1
RIGHT: Final = 2
Offsets = npt.NDArray[np.int64]
_DIGEST_BYTES: Final = 16


class Peer:
    """One side. The right one listens and serves, the left one drives.

    A work is ``verb`` ("push", or "pull" and "get", which are the same) and one
    transfer of ``nbytes`` in ``layers`` and ``blocks``; a block has all layers side by
    side if it is ``cross_layer``.

    Args:
        options: ``pool_bytes`` is how much memory to have.

    Attributes:
        memory: The pool.
        work: What was prepared last.
        offsets: Where its fragments begin in the pool.
        nbytes: Bytes of each fragment.
    """

    def __init__(self, options: dict[str, Any]) -> None:
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

    def use(self, work: dict[str, Any], side: int) -> None:
        """Get ready for a round."""
        if work == self.work:
            return
        self.work, self.offsets = work, offsets(work, side)
        self.nbytes = work["nbytes"] // len(self.offsets)
        if side == LEFT:
            self.ready(offsets(work, RIGHT))

    def ready(self, theirs: Offsets) -> None:
        """Left: get ready for a work that is new; where its fragments are there."""

    def fill(self) -> None:
        """Random bytes into the whole pool."""
        words = self.memory[: self.memory.size // 8 * 8].view(np.uint64)
        words[:] = np.random.default_rng().integers(0, 2**63, words.size, np.uint64)

    def digest(self) -> str:
        travelling = self.fragments()[self.rows].data
        return hashlib.blake2b(travelling, digest_size=_DIGEST_BYTES).hexdigest()

    def drive(self) -> list[float]:
        """Left: move everything ``count`` times; the answer is the seconds of each."""
        seconds = []
        for _ in range(self.work["count"]):
            began = time.perf_counter()
            self.move()
            seconds.append(time.perf_counter() - began)
        return seconds

    @abstractmethod
    def move(self) -> None:
        """Left: move everything once; over when it is where it belongs."""

    def serve(self) -> None:
        """Right: do what :meth:`drive` needs of it, ``count`` times."""

    def fragments(self) -> npt.NDArray[np.uint8]:
        """The pool as an array with a row for each place of a fragment."""
        whole = self.memory[: self.memory.size // self.nbytes * self.nbytes]
        return whole.reshape(-1, self.nbytes)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = self.offsets // self.nbytes
        return rows


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


class Lines:
    """JSON values over a socket, a line each."""

    def __init__(self, descriptor: int) -> None:
        self._file = socket.socket(fileno=descriptor).makefile("rw")

    def send(self, value: object) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """Wait for the next value; exits if there are no more."""
        if not (line := self._file.readline()):
            # Threads of a peer that never end would keep the interpreter from ending.
            os._exit(0)
        found = json.loads(line)
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(f"the other side failed: {found['error']}")
        return found


def main() -> None:
    """Be one side of a peer until its input ends: ``SIDE [DESCRIPTOR]``."""
    # Ctrl-C reaches every process of a terminal; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    side = json.loads(sys.argv[1])
    first = Lines(0)
    try:
        module = importlib.import_module(f".{side['program']}", __package__)
        peer: Peer = module.Program(side["options"])
        if side["left"]:
            _left(peer, first, Lines(int(sys.argv[2])))
        else:
            _right(peer, first)
    except Exception as exc:  # noqa: BLE001 - it is reported by the other process
        first.send({"error": f"{type(exc).__name__}: {exc}"})
        os._exit(0)


def _left(peer: Peer, control: Lines, other: Lines) -> None:
    control.send({"facts": peer.connect(other.receive())})
    while True:
        asked = control.receive()
        other.send(asked)
        peer.use(asked["work"], LEFT)
        if asked["checks"]:
            peer.fill()
        other.receive()  # the other side is ready
        began_s = time.process_time()
        seconds = peer.drive()
        cpu_s = time.process_time() - began_s
        other.send(None)
        here = peer.digest() if asked["checks"] else ""
        its_cpu_s, there = other.receive()
        damage = f"the received bytes differ: {here}, {there}"
        control.send(
            {
                "seconds": seconds,
                "cpu_s": [cpu_s, its_cpu_s],
                "damage": "" if here == there else damage,
            }
        )


def _right(peer: Peer, other: Lines) -> None:
    other.send(peer.listen())
    peer.accept()
    while True:
        asked = other.receive()
        peer.use(asked["work"], RIGHT)
        if asked["checks"]:
            peer.fill()
        began_s = time.process_time()
        other.send(None)
        peer.serve()
        other.receive()  # the left side is done
        cpu_s = time.process_time() - began_s
        other.send([cpu_s, peer.digest() if asked["checks"] else ""])
