"""The frame of a peer's program, and the memory that all programs have alike.

It does what :mod:`kvwire_certify.bench.line` does, without kvwire: lines of JSON
between one side and the process that runs the benchmark.
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
# As in kvwire_certify.bench.work, which a program need not have.
LEFT: Final = 1
RIGHT: Final = 2
Offsets = npt.NDArray[np.int64]
_DIGEST_BYTES: Final = 16


class Peer:
    """One side. The right one listens and is passive, the left one moves everything.

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

    @abstractmethod
    def connect(self, address: Any) -> dict[str, Any]:
        """Left: connect; the answer is facts for the JSON document."""

    @abstractmethod
    def ready(self, theirs: Offsets) -> None:
        """Left: get ready for a work that is new; where its fragments are there."""

    @abstractmethod
    def move(self) -> None:
        """Left: move everything once; over when it is where it belongs."""

    def use(self, turn: dict[str, Any], side: int) -> None:
        """Get ready for a round; with ``checks``, random bytes in the whole pool."""
        work = turn["work"]
        if work != self.work:
            self.work, self.offsets = work, offsets(work, side)
            self.nbytes = work["nbytes"] // len(self.offsets)
            if side == LEFT:
                self.ready(offsets(work, RIGHT))
        if turn["checks"]:
            self.memory[:] = np.frombuffer(
                np.random.default_rng().bytes(self.memory.size), np.uint8
            )

    def digest(self, turn: dict[str, Any]) -> str:
        """Of the fragments that travel; "" unless the round checks them."""
        if not turn["checks"]:
            return ""
        whole = self.memory[: self.memory.size // self.nbytes * self.nbytes]
        travelling = whole.reshape(-1, self.nbytes)[self.offsets // self.nbytes]
        return hashlib.blake2b(travelling.data, digest_size=_DIGEST_BYTES).hexdigest()


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


class Line:
    """JSON values over the standard input, which is a socket."""

    def __init__(self) -> None:
        self._file = socket.socket(fileno=0).makefile("rw")

    def send(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """Wait for the next value; exits if there are no more."""
        if not (line := self._file.readline()):
            # Threads of a peer that never end would keep the interpreter from ending.
            os._exit(0)
        return json.loads(line)


def main() -> None:
    """Be one side of a peer until its input ends: ``PROGRAM:SIDE OPTIONS``."""
    # Ctrl-C reaches every process of a terminal; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, _, side = sys.argv[1].partition(":")
    options = json.loads(sys.argv[2])
    line = Line()
    try:
        module = importlib.import_module(f".{name}", __package__)
        peer: Peer = module.Program(options)
        if side == "left":
            _left(peer, line, options["address"])
        else:
            _right(peer, line)
    except Exception as exc:  # noqa: BLE001 - it is reported by the other process
        line.send(error=f"{type(exc).__name__}: {exc}")
        os._exit(0)


def _left(peer: Peer, line: Line, address: Any) -> None:
    line.send(facts=peer.connect(address))
    while True:
        turn = line.receive()
        peer.use(turn, LEFT)
        seconds = []
        began_s = time.process_time()
        for _ in range(turn["work"]["count"]):
            began = time.perf_counter()
            peer.move()
            seconds.append(time.perf_counter() - began)
        cpu_s = time.process_time() - began_s
        line.send(seconds=seconds, cpu_s=cpu_s, digest=peer.digest(turn))


def _right(peer: Peer, line: Line) -> None:
    line.send(address=peer.listen(), facts={})
    while True:
        turn = line.receive()
        peer.use(turn, RIGHT)
        began_s = time.process_time()
        line.send(offer="")
        line.receive()  # the left side is done
        cpu_s = time.process_time() - began_s
        line.send(cpu_s=cpu_s, digest=peer.digest(turn))
