"""Lanes beside a wire: payload in any order, halves that come late, and break.

A payload is read from the sender's memory when it moves, as by a NIC or by a process of
the same host. A half that breaks may go on touching memory until it says that it is
gone, and the other half hears of it over the wire alone. A half may also lose its path:
from then on nothing that it says or sends reaches the other half, and nobody hears of
it, while the wire works. Whether a seed has lanes at all is drawn from dice of their
own, so that plans without them are as they were.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from kvwire.limits import LANES_MAX
from kvwire.proto import events
from kvwire.proto.chunks import Chunk
from kvwire.proto.records import ChunkArrival
from kvwire.types import BufferId, Role
from tests.programs.sim.memory import Lease, demand
from tests.programs.sim.net import Frame

if TYPE_CHECKING:
    from tests.programs.sim.endpoint import Endpoint
    from tests.programs.sim.plan import Plan
    from tests.programs.sim.world import World

_BACKEND: Final = "beside"
_SALT: Final = 0x1A9E
_RESTLESS_SALT: Final = 0x2E57
_LOSS_SALT: Final = 0x105E


class Fate:
    """What happens to the lanes of one seed, drawn from dice of its own.

    Attributes:
        window_bytes: Payload of unknown fate that a lane takes.
        span_bytes: Payload that it takes at once; 0 for a chunk.
        loses: Share of halves that lose their path.
    """

    def __init__(self, plan: Plan) -> None:
        self._rng = random.Random(plan.seed ^ _SALT)
        self.lanes = self._rng.choice((0, 1, 1, 2, 4))
        self._declines = self._rng.choice((0.0, 0.0, 0.3))
        self._breaks = self._rng.choice((0.0, 0.3))
        self._strikes = self._rng.choice((0.0, 0.3, 0.8))
        self._share = self._rng.choice((0.5, 0.9, 1.0))
        self._end = plan.end
        # A window of a chunk or two is soon full.
        chunk_bytes = max(
            parameters.chunk_bytes for parameters in plan.setup.parameters
        )
        self.window_bytes = chunk_bytes * self._rng.choice((1, 2, 16))
        self.span_bytes = chunk_bytes * self._rng.choice((0, 0, 2, 5))
        # Where no half lives long, a connection has more lanes than at once.
        restless = random.Random(plan.seed ^ _RESTLESS_SALT)
        self._restless = restless.random() < 0.1
        self._losses = random.Random(plan.seed ^ _LOSS_SALT)
        self.loses = self._losses.choice((0.0, 0.0, 0.0, 0.3, 1.0))

    def declines(self) -> bool:
        """Whether a half cannot be made."""
        return self._rng.random() < self._declines

    def breaks_in(self) -> float | None:
        """Seconds that a half lives; None if nothing happens to it."""
        if self._restless:
            return 0.04 * self._end * self._rng.random()
        if self._rng.random() >= self._breaks:
            return None
        return self._end * self._rng.random() ** 2

    def mute_in(self) -> float | None:
        """Seconds after which a half loses its path; None if it keeps it."""
        if self._losses.random() >= self.loses:
            return None
        return self._end * self._losses.random() ** 2

    def strikes(self) -> bool:
        """Whether a half breaks while a payload is under way: the worst moment."""
        return self._rng.random() < self._strikes

    def trips_to_end(self) -> int:
        """How long a half takes to end; in the longest its payloads still move."""
        return self._rng.choice((0, 1, 8))

    def takes_lane(self) -> bool:
        """Whether a chunk goes on a lane, where there is one with room."""
        return self._rng.random() < self._share

    def choose(self, halves: list[Half]) -> Half:
        return self._rng.choice(halves)


@dataclass(slots=True)
class _Load:
    """A payload whose memory the sender's half may touch."""

    chunk: Chunk
    lease: Lease
    since: float


@dataclass(slots=True)
class _Bay:
    """A payload that a half was told to receive, and where."""

    arrival: ChunkArrival
    lease: Lease | None
    since: float
    begun: bool = False


@dataclass(slots=True, eq=False)
class Half:
    """One end's half of a lane.

    Attributes:
        breaking: It will say that it is gone; until then it may touch memory.
        mute_from: From then on nothing of it reaches the other half.
        moved_at: When a payload last moved here, or was said to be sent.
    """

    number: int
    up: bool = False
    breaking: bool = False
    gone: bool = False
    mute_from: float = math.inf
    moved_at: float = 0.0
    sending: dict[int, _Load] = field(default_factory=dict)
    arriving: dict[int, _Bay] = field(default_factory=dict)


class Beside:
    """The lanes of one endpoint."""

    def __init__(self, world: World, endpoint: Endpoint) -> None:
        self.halves: dict[int, Half] = {}
        self._world = world
        self._endpoint = endpoint
        self._descriptors = count()

    def ask(self) -> None:
        """Client: ask for the lanes of this seed."""
        if self._endpoint.core.agreement.role is Role.CLIENT:
            for _ in range(self._world.fate.lanes):
                self._ask_one()

    def event(self, event: events.LaneEvent) -> None:
        """Do what the core says about lanes, at once or a little later."""
        node, world = self._endpoint.node, self._world
        match event:
            case events.LaneAsked(lane=number):
                self._make(number)
                node.after(world.latency(), self._answer, self.halves[number])
            case events.LaneBootstrapped(lane=number):
                node.after(world.latency(), self._join, self.halves[number])
            case events.LaneOpened(lane=number):
                if number:
                    self.halves[number].up = True
            case events.LaneClosed(lane=number):
                self.break_half(self.halves[number], "the other half is gone")
            case events.LaneStalled(lane=number):
                self.break_half(self.halves[number], "its path is lost")
            case events.LaneDataReceived(arrival=arrival, descriptor=descriptor):
                self._receive(arrival, int.from_bytes(descriptor, "little"))

    # --- sending ----------------------------------------------------------------------

    def pick(self) -> Half | None:
        """The lane for the next chunk; None for the wire."""
        fate, lanes = self._world.fate, self._endpoint.core.lanes
        open_ones = [
            half
            for half in self.halves.values()
            if half.up
            and not half.breaking
            and lanes.room(half.number, fate.window_bytes)
        ]
        return fate.choose(open_ones) if open_ones and fate.takes_lane() else None

    def span(self, buffer: BufferId) -> int:
        """How much of a buffer a lane takes at once."""
        del buffer
        return self._world.fate.span_bytes

    def send(self, half: Half, chunk: Chunk, check: int | None) -> Frame:
        """Put a chunk on a lane; returns the frame that announces it."""
        lease = self._endpoint.node.lease(chunk.buffer)
        descriptor = next(self._descriptors)
        half.sending[descriptor] = _Load(chunk, lease, self._world.now)
        lanes = self._endpoint.core.lanes
        return Frame(
            *lanes.announce(chunk, half.number, descriptor.to_bytes(8, "little"), check)
        )

    # --- what does not move -----------------------------------------------------------

    def still_s(self) -> float:
        """For how long payload has waited on a half that should have failed."""
        now = self._world.now
        longest_s = 0.0
        for half in self.halves.values():
            if half.breaking or half.gone or not half.up:
                continue
            for waiting, patience in ((half.arriving, 1), (half.sending, 2)):
                since = [load.since for load in waiting.values()]
                if since:
                    still_s = now - max(half.moved_at, min(since))
                    longest_s = max(longest_s, still_s / patience)
        return longest_s

    # --- breaking ---------------------------------------------------------------------

    def break_half(self, half: Half, reason: str) -> None:
        """A half begins to end: it may touch memory for a little longer."""
        if not half.breaking:
            half.breaking = True
            delay_s = self._world.fate.trips_to_end() * self._world.latency()
            self._endpoint.node.after(delay_s, self._gone, half, reason)

    def break_all(self) -> None:
        for half in self.halves.values():
            self.break_half(half, "the connection is over")

    def vanish(self) -> None:
        """The process has crashed: its halves are gone, and the others may hear it."""
        for half in self.halves.values():
            half.gone = half.breaking = True
            across, peer = self._across(half), self._endpoint.peer
            if across is not None and peer is not None and not self._world.is_silent():
                reason = "the other process is gone"
                delay_s = 2 * self._world.latency()
                peer.node.after(delay_s, peer.beside.break_half, across, reason)

    # --- inside -----------------------------------------------------------------------

    def _ask_one(self) -> None:
        lanes = self._endpoint.core.lanes
        number = lanes.next_number()
        if number is not None:
            self._make(number)
            lanes.open(number, _BACKEND, b"")

    def _make(self, number: int) -> None:
        half = self.halves[number] = Half(number)
        life_s = self._world.fate.breaks_in()
        if life_s is not None:
            self._endpoint.node.after(life_s, self.break_half, half, "it broke")
        mute_s = self._world.fate.mute_in()
        if mute_s is not None:
            half.mute_from = self._world.now + mute_s

    def _answer(self, half: Half) -> None:
        if self._world.fate.declines():
            self.break_half(half, "declined")
        if not half.breaking:
            self._endpoint.core.lanes.answer(half.number, b"")
            self._collect()

    def _join(self, half: Half) -> None:
        if self._world.fate.declines():
            self.break_half(half, "declined")
        if not half.breaking:
            half.up = True
            self._endpoint.core.lanes.ready(half.number)
            self._world.note(self._endpoint.name, "lane", "up")
            self._collect()

    def _receive(self, arrival: ChunkArrival, descriptor: int) -> None:
        endpoint = self._endpoint
        if not endpoint.core.lanes.expects(arrival):
            return
        lease = None
        if arrival.buffer is not None:
            lease = endpoint.node.lease(arrival.buffer)
            self._world.judge.lands(endpoint, _frame(arrival), arrival)
        half = self.halves[arrival.lane]
        demand(not half.gone, "lane", "a payload for a half that is gone")
        half.arriving[descriptor] = _Bay(arrival, lease, self._world.now)
        # Slower than the wire: what follows on the wire overtakes it.
        delay_s = 3 * self._world.latency()
        endpoint.node.after(delay_s, self._move, half, descriptor)
        if self._world.fate.strikes():
            self._strike(half)

    def _strike(self, half: Half) -> None:
        """Break this half or the other one, before or after the payload has moved."""
        endpoint, across = self._endpoint, self._across(half)
        assert across is not None
        assert endpoint.peer is not None
        struck = self._world.fate.choose([half, across])
        owner = endpoint if struck is half else endpoint.peer
        delay_s = self._world.latency()
        owner.node.after(delay_s, owner.beside.break_half, struck, "it broke")

    def _move(self, half: Half, descriptor: int) -> None:
        """Read from the sender's memory, and write to ours; in two parts perhaps."""
        world, endpoint, across = self._world, self._endpoint, self._across(half)
        if half.gone or across is None or across.gone:
            return
        if across.mute_from <= world.now:
            world.note(endpoint.name, "lane", "payload lost")
            return
        half.moved_at = world.now
        assert endpoint.peer is not None
        load, bay = across.sending[descriptor], half.arriving[descriptor]
        chunk, arrival = load.chunk, bay.arrival
        data = load.lease.read(chunk.offset, chunk.length)
        pause_s = 0.0 if bay.begun else world.pause_s()
        if pause_s:
            data = data[: len(data) // 2]
        if bay.lease is not None:
            bay.lease.write(arrival.offset, data)
        endpoint.end.heard_at = world.now
        if pause_s:
            bay.begun = True
            endpoint.core.liveness.note_received(endpoint.node.clock)
            endpoint.node.after(pause_s, self._move, half, descriptor)
            return
        del half.arriving[descriptor]
        delay_s = world.completion_delay_s()
        if delay_s is not None and half.mute_from > world.now:
            peer = endpoint.peer
            peer.node.after(delay_s, peer.beside.sent, across, descriptor)
        if bay.lease is not None:
            frame = _frame(arrival)
            world.judge.landed(endpoint, frame, arrival, data, intact=True)
        endpoint.core.payload_landed(arrival, endpoint.node.clock, intact=True)
        later = half.number > LANES_MAX
        world.note(endpoint.name, "lane", "payload" + later * " of a later lane")
        self._collect()

    def sent(self, half: Half, descriptor: int) -> None:
        """A half is through with the memory of a chunk."""
        if not half.gone:
            half.moved_at = self._world.now
            self._endpoint.core.chunk_sent(half.sending.pop(descriptor).chunk)
            self._collect()

    def _gone(self, half: Half, reason: str) -> None:
        half.gone = True
        self._world.note(self._endpoint.name, "lane", reason)
        if half.arriving:
            self._world.note(self._endpoint.name, "lane", "payload missed")
        half.sending.clear()
        half.arriving.clear()
        core = self._endpoint.core
        core.lane_gone(half.number, reason)
        if core.agreement.role is Role.CLIENT and not self._world.calm:
            self._ask_one()  # after the end of the connection nobody hears it
        self._collect()

    def _across(self, half: Half) -> Half | None:
        peer = self._endpoint.peer
        return None if peer is None else peer.beside.halves.get(half.number)

    def _collect(self) -> None:
        self._endpoint.collect()
        self._endpoint.set_timer()


def _frame(arrival: ChunkArrival) -> Frame:
    """What the judge wants to see: a payload, and not a whole message."""
    return Frame(b"", None, length=arrival.length)
