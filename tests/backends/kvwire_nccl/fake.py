"""A library whose communicators live in this process, and do what a test wants."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from kvwire.backend import Availability, Payload
from kvwire.backend.lane import Lane, LaneContext
from kvwire.memory.copy import copy
from kvwire.types import MemoryKind
from kvwire_nccl.backend import NcclBackend
from kvwire_nccl.lane import NcclLane
from kvwire_nccl.nccl import MoveFailed, MoveProgress, Nccl, NcclMove, NcclPipe

_names = itertools.count()
_lock = threading.Lock()
_wires: dict[bytes, list[FakeOneWay]] = {}


@dataclass
class Faults:
    """What goes wrong, for all communicators of one library."""

    start: threading.Event = field(default_factory=threading.Event)
    moves: threading.Event = field(default_factory=threading.Event)
    abort: threading.Event = field(default_factory=threading.Event)
    failing: str = ""
    aborts: int = 0

    def __post_init__(self) -> None:
        for gate in (self.start, self.moves, self.abort):
            gate.set()


class FakeLibrary(Nccl):
    """Moves host memory within the process."""

    kinds = frozenset({MemoryKind.HOST})

    def __init__(self, faults: Faults | None = None, version: str = "fake 1") -> None:
        self.start_timeout_s, self.move_timeout_s = 20.0, 30.0
        self.version = version
        self.faults = Faults() if faults is None else faults

    def name(self) -> bytes:
        return b"wire %d" % next(_names)

    def open(self, name: bytes, sends: bool) -> NcclPipe:
        return FakeOneWay(self.faults, name, sends=sends)


class FakeBackend(NcclBackend):
    """The backend over communicators of this process."""

    @classmethod
    def availability(cls) -> Availability:
        return Availability(available=True, reason="a fake for tests")

    def open_lane(self, context: LaneContext) -> Lane:
        return NcclLane(context, FakeLibrary())


class FakeOneWay(NcclPipe):
    """One end of a wire."""

    def __init__(self, faults: Faults, name: bytes, *, sends: bool) -> None:
        self.faults = faults
        self.name = name
        self.sends = sends
        self.moves: list[FakeMove] = []
        self.up = False
        self.dead = False

    @property
    def peer(self) -> FakeOneWay | None:
        return next((end for end in _wires.get(self.name, ()) if end is not self), None)

    def begin(self) -> None:
        self._may_fail("begin")
        with _lock:
            _wires.setdefault(self.name, []).append(self)

    def taken(self) -> bool:
        if not self.up:
            self._may_fail("is_up")
            with _lock:
                self.up = self.peer is not None and self.faults.start.is_set()
        else:
            self.check()
        return self.up

    def check(self) -> None:
        self._may_fail("check")
        peer = self.peer
        if peer is None or peer.dead:
            raise MoveFailed("the other end is gone")

    def move(self, payload: Payload | None, nbytes: int) -> NcclMove:
        self._may_fail("move")
        with _lock:
            move = FakeMove(self, len(self.moves), payload, nbytes)
            self.moves.append(move)
            return move

    def abort(self) -> None:
        self.faults.aborts += 1
        self.faults.abort.wait()
        self._may_fail("abort")
        with _lock:
            self.dead = True
            self.moves.clear()
            ends = _wires.get(self.name, [])
            if all(end.dead for end in ends):
                _wires.pop(self.name, None)

    def _may_fail(self, call: str) -> None:
        if call == self.faults.failing:
            raise MoveFailed(f"NCCL: {call}: remote process exited")


class FakeMove(NcclMove):
    """Done once the receiver has copied."""

    def __init__(
        self, pipe: FakeOneWay, index: int, payload: Payload | None, nbytes: int
    ) -> None:
        self.pipe = pipe
        self.index = index
        self.payload = payload
        self.nbytes = nbytes
        self.copied = False

    def progress(self) -> MoveProgress:
        with _lock:
            return self._progress()

    def _progress(self) -> MoveProgress:
        peer = self.pipe.peer
        if self.pipe.dead or peer is None or not self.pipe.faults.moves.is_set():
            return MoveProgress.LAUNCHED
        if self.copied:
            return MoveProgress.DONE
        if self.pipe.sends or peer.dead or self.index >= len(peer.moves):
            return MoveProgress.LAUNCHED
        sent = peer.moves[self.index]
        assert sent.nbytes == self.nbytes, "the two sides have another order"
        if self.payload is not None and sent.payload is not None:
            copy(sent.payload, self.payload)
        self.copied = sent.copied = True
        # From now on the memory is the lane's no more.
        self.payload = sent.payload = None
        return MoveProgress.DONE
