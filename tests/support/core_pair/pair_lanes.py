"""Lanes between the ends of a pair: payload that moves, and breaks, when it is told to.

A lane here is like one of the same host: the receiver reads the sender's memory at the
moment when the payload moves, so memory that was given back too early shows. Frames
about lanes travel on the pair's wire as all others do::

    pair = ConnectionPair()
    lanes = PairLanes(pair)
    number = lanes.raise_one()
    lanes.via[Role.CLIENT] = number
    pair.client.put(data, grant)
    lanes.rest()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kvwire.memory.checksum import checksum
from kvwire.proto import events
from kvwire.proto.chunks import Chunk
from kvwire.proto.records import ChunkArrival
from kvwire.types import Role
from kvwire.wire.header import Flag
from tests.support.core_pair.handshakes import Frame
from tests.support.core_pair.peer import ConnectionPair, Peer

BACKEND: Final = "beside"
WINDOW_BYTES: Final = 4 * 2**20
_CHECKED: Final = int(Flag.CHECKED)


@dataclass(slots=True, eq=False)
class Half:
    """One end's half of a lane.

    Attributes:
        sending: Chunks whose memory it may touch, by descriptor.
        unread: Those of them that the other half has not read.
        arriving: Payloads that it was told to receive, by descriptor.
        ending: The other half is gone, and this one has to go.
    """

    role: Role
    number: int
    sending: dict[int, Chunk] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    arriving: dict[int, ChunkArrival] = field(default_factory=dict)
    ending: bool = False
    gone: bool = False


class PairLanes:
    """The lanes of one pair.

    Attributes:
        via: The lane that chunks of each end take while it has room; 0 for the wire.
        refuses: Whether the server declines the lanes that it is asked for.
        span_bytes: What a lane takes at once; 0 for a chunk.
    """

    def __init__(self, pair: ConnectionPair) -> None:
        self.via = dict.fromkeys(Role, 0)
        self.halves: dict[tuple[Role, int], Half] = {}
        self.refuses = False
        self.span_bytes = 0
        self._pair = pair
        self._descriptors = count()
        for role in Role:
            pair.of(role).aside = self._aside
            pair.of(role).span = self._span
            pair.of(role).on_lane = self._on_event

    # --- what a front does ------------------------------------------------------------

    def ask(self) -> int:
        """The client asks for the next lane; it comes up as frames are delivered."""
        core = self._pair.client.core
        number = core.lanes.next_number()
        assert number is not None
        self._add(Role.CLIENT, number)
        core.lanes.open(number, BACKEND, b"the client's half")
        self._pair.client.collect()
        return number

    def raise_one(self) -> int:
        """Bring the next lane up, on both sides."""
        number = self.ask()
        self._pair.run()
        return number

    def move(self, half: Half, descriptor: int, *, flip: bool = False) -> None:
        """A half reads what it was told to receive; ``flip`` damages one bit."""
        sender, receiver = self._pair.of(half.role.other), self._pair.of(half.role)
        other = self.halves[half.role.other, half.number]
        assert not half.gone
        assert not other.gone
        chunk, arrival = other.sending[descriptor], half.arriving.pop(descriptor)
        other.unread.remove(descriptor)
        memory = sender.memory[chunk.buffer]
        body = bytearray(memory[chunk.offset : chunk.offset + chunk.length])
        assert len(body) == arrival.length, "not as long as it was announced"
        body[0] ^= flip
        if arrival.buffer is not None:
            end = arrival.offset + arrival.length
            receiver.memory[arrival.buffer][arrival.offset : end] = body
        checked = arrival.header.flags & _CHECKED
        intact = not checked or checksum(memoryview(body)) == (
            arrival.header.payload_check
        )
        receiver.core.payload_landed(arrival, receiver.now, intact=intact)
        receiver.collect()

    def sent(self, half: Half, descriptor: int) -> None:
        """A half is through with the memory of a chunk that was read."""
        assert descriptor not in half.unread
        peer = self._pair.of(half.role)
        peer.core.chunk_sent(half.sending.pop(descriptor))
        peer.collect()

    def end(self, half: Half, reason: str = "cut") -> None:
        """A half breaks, or follows the other one: it touches nothing any more."""
        assert not half.gone
        half.gone = True
        half.arriving.clear()
        half.sending.clear()
        if self.via[half.role] == half.number:
            self.via[half.role] = 0
        peer = self._pair.of(half.role)
        peer.core.lane_gone(half.number, reason)
        peer.collect()

    def movable(self, half: Half) -> list[int]:
        """The descriptors that this half could read now."""
        other = self.halves.get((half.role.other, half.number))
        if half.gone or other is None or other.gone:
            return []
        return list(half.arriving)

    def rest(self) -> None:
        """Deliver and move everything until nothing is left to do."""
        while True:
            self._pair.run()
            if not any(map(self._rest_of, list(self.halves.values()))):
                return

    # --- inside -----------------------------------------------------------------------

    def _rest_of(self, half: Half) -> bool:
        for descriptor in self.movable(half):
            self.move(half, descriptor)
            return True
        for descriptor in half.sending.keys() - half.unread:
            if not half.gone:
                self.sent(half, descriptor)
                return True
        lost = self._pair.of(half.role).lost
        if (half.ending or lost) and not half.gone:
            self.end(half)
            return True
        return False

    def _add(self, role: Role, number: int) -> None:
        self.halves[role, number] = Half(role, number)

    def _room(self, peer: Peer) -> int:
        """The lane that the next chunk takes; 0 for the wire."""
        number = self.via[peer.core.agreement.role]
        return number if number and peer.core.lanes.room(number, WINDOW_BYTES) else 0

    def _span(self, peer: Peer) -> int:
        return self.span_bytes if self._room(peer) else 0

    def _aside(self, peer: Peer, chunk: Chunk, check: int) -> Frame | None:
        """Send a chunk on a lane; None if the wire has to take it."""
        role, number = peer.core.agreement.role, self._room(peer)
        if not number or chunk.carries_mark:
            return None
        half, descriptor = self.halves[role, number], next(self._descriptors)
        half.sending[descriptor] = chunk
        half.unread.add(descriptor)
        return peer.core.lanes.announce(
            chunk, number, descriptor.to_bytes(8, "little"), check
        )

    def _on_event(self, peer: Peer, event: events.LaneEvent) -> None:
        role, lanes = peer.core.agreement.role, peer.core.lanes
        match event:
            case events.LaneAsked(lane=number):
                if self.refuses:
                    peer.core.lane_gone(number, "not today")
                else:
                    self._add(role, number)
                    lanes.answer(number, b"the server's half")
            case events.LaneBootstrapped(lane=number):
                lanes.ready(number)
            case events.LaneClosed(lane=number) | events.LaneStalled(lane=number):
                self.halves[role, number].ending = True
            case events.LaneDataReceived(arrival=arrival, descriptor=descriptor):
                if lanes.expects(arrival):
                    half = self.halves[role, arrival.lane]
                    half.arriving[int.from_bytes(descriptor, "little")] = arrival
