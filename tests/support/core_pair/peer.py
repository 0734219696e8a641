"""Two protocol cores joined in memory, in virtual time.

For tests that want a whole connection and neither sockets nor an event loop::

    pair = ConnectionPair()
    received = pair.server.recv(7)
    pair.client.send(7, b"hello")
    pair.run()
    assert pair.server.received(received) == b"hello"

Nothing moves by itself. :meth:`ConnectionPair.run` delivers frames until none is left,
:meth:`ConnectionPair.advance` lets time pass. Each end does for its core what a link
and the asyncio front do together: moves payload between buffers and frames, and
answers the events that want an answer. What it is told to do wrong, it does: a wire can
stall, a frame can be made by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from kvwire.errors import KVWireError, ProtocolError
from kvwire.memory.checksum import checksum
from kvwire.proto import events
from kvwire.proto.chunks import Chunk
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.handshake import Handshake, Identity
from kvwire.proto.holds import Holds
from kvwire.proto.records import (
    ChunkArrival,
    ChunkPlace,
    RequestRecord,
    SegmentRecord,
    TransferRecord,
)
from kvwire.proto.regions import RegionRecord, RegionTable
from kvwire.proto.state import RequestKind
from kvwire.types import Access, BufferId, RequestId, Role
from kvwire.wire.control import AccessBody, Body, WindowGet, encode_body
from kvwire.wire.handshake_messages import ConnectionParameters
from kvwire.wire.header import Flag
from tests.support.core_pair.end import CoreEnd
from tests.support.core_pair.handshakes import (
    Frame,
    Inlet,
    Shaking,
    begin,
    identity,
    shake,
)

BOX: Final = (0, 0, 1, 0, 1)
_CHECKED: Final = int(Flag.CHECKED)
E = TypeVar("E", bound=events.Event)


class Peer(CoreEnd):
    """One end of a :class:`ConnectionPair`.

    Attributes:
        now: Its clock; the pair sets it.
        wire: Frames on their way to the other end, oldest first.
        done: The one completion of each request that is over.
        freed: Buffers that have drained, as they were then.
        transfers: What the core kept of each KV transfer that is over.
        broken: The rule that the other end broke, if it did.
        stalled: The wire takes no payload; set it to False to go on.
        slow: Chunks stay with the wire until :meth:`complete` is called.
        place: Gives a marked segment its memory; None leaves it without.
        aside: Sends a chunk on a lane, or returns None for the wire; see
            :class:`~tests.support.core_pair.pair_lanes.PairLanes`.
        span: How many bytes the way of the next chunk takes at once; 0 for a chunk.
        wanted: What waits until :meth:`permit` says that a device has its memory free.
    """

    def __init__(
        self, handshake: Handshake, *, parameters: ConnectionParameters, now: float
    ) -> None:
        """Go on from a handshake that has ended well."""
        assert handshake.agreement is not None
        self.now = now
        self.core = ConnectionCore(
            handshake.agreement,
            handshake.framing,
            Holds(),
            parameters=parameters,
            ping_interval_s=2.0,
            ping_misses=3,
            now=now,
        )
        self.wire: deque[Frame] = deque()
        self.events: list[events.Event] = []
        self.done: dict[RequestRecord, events.RequestDone] = {}
        self.memory: dict[BufferId, bytearray] = {}
        self.freed: dict[BufferId, bytes] = {}
        self.transfers: dict[RequestRecord, TransferRecord] = {}
        self.broken: ProtocolError | None = None
        self.lost = False
        self.wanted: list[events.MemoryWanted] = []
        self.stalled = False
        self.slow = False
        self.place: Callable[[SegmentRecord], None] | None = self._place
        self.aside: Callable[[Peer, Chunk, int], Frame | None] = _on_the_wire
        self.on_lane: Callable[[Peer, events.LaneEvent], None] = _without_lanes
        self.span: Callable[[Peer], int] = _chunk_by_chunk
        self._regions = RegionTable()
        self._leaving: deque[Chunk] = deque()
        self._held: dict[RequestRecord, bytes] = {}
        self._inlet = Inlet(self._begin, self._end)
        self._arrival: ChunkArrival | None = None

    # --- what an application does -----------------------------------------------------

    def send_data(
        self, wire_id: RequestId, data: memoryview, check: int | None
    ) -> None:
        """Answer a small get from a window."""
        header = self.core.windows.data_frame(wire_id, data.nbytes, check)
        self.wire.append((header, bytes(data)))

    def lend(self, data: bytes | int) -> BufferId:
        """A new buffer with these bytes, or with so many zeros."""
        buffer = self.core.holds.new()
        self.memory[buffer] = bytearray(data)
        return buffer

    def content(self, buffer: BufferId) -> bytes:
        """What is in a buffer, or was in it when it drained."""
        return bytes(self.memory.get(buffer, self.freed.get(buffer, b"")))

    def send(
        self, tag: int, data: bytes, *, deadline: float | None = None
    ) -> RequestRecord | None:
        """Send a message; None if it travels at once and so is over."""
        core, size = self.core, len(data)
        header = core.eager_header(tag, size, checksum(memoryview(data)))
        if header is not None:
            self.wire.append((header, data))
            return None
        return self._start(data, lambda lent: core.send(tag, lent, size, deadline))

    def recv(
        self,
        tag: int,
        nbytes: int | None = 4096,
        *,
        deadline: float | None = None,
        limit: int = 2**20,
        stays: bool = False,
    ) -> RequestRecord:
        """Receive a message into a new buffer; without a size, into what it needs."""
        core = self.core
        if nbytes is not None:
            size = nbytes
            return self._start(size, lambda lent: core.recv(tag, lent, size, deadline))
        request = core.recv(tag, None, limit, deadline, stays=stays)
        self.collect()
        return request

    def send_from_device(self, tag: int, data: bytes) -> RequestRecord:
        """Announce a message of any size, whose memory is a device's."""
        core, size = self.core, len(data)
        return self._start(
            data, lambda lent: core.send(tag, lent, size, None, on_device=True)
        )

    def recv_into_device(self, tag: int, nbytes: int) -> RequestRecord:
        """Receive a message into a new buffer of a device."""
        core = self.core
        return self._start(
            nbytes, lambda lent: core.recv(tag, lent, nbytes, None, on_device=True)
        )

    def reserve(self, kind: RequestKind, data: bytes | int) -> RequestRecord:
        """Start a put or get of a device's memory; ``core.ask`` goes on with it."""
        size = data if isinstance(data, int) else len(data)
        return self._start(data, lambda lent: self.core.reserve(kind, lent, size, None))

    def permit(self) -> None:
        """A device has the memory of all that wants some free."""
        wanted = self.wanted
        self.wanted = []
        for event in wanted:
            request = event.request
            assert request.buffer is not None
            if event.held is None:
                self.core.messages.provide(request, request.buffer)
                continue
            if not request.over:
                held = self.content(event.held)
                self.memory[request.buffer][: len(held)] = held
            self.core.filled(request)
        self.collect()

    def expose(
        self, data: bytes | int, access: Access = Access.READWRITE
    ) -> RegionRecord:
        buffer = self.lend(data)
        return self._regions.register(buffer, len(self.memory[buffer]), access)

    def grant(
        self,
        region: RegionRecord,
        offset: int = 0,
        nbytes: int | None = None,
        access: Access | None = None,
    ) -> AccessBody:
        """Let the other end reach a range of a region; what it puts or gets with."""
        size = region.nbytes - offset if nbytes is None else nbytes
        row = self.core.grant(region, offset, size, access or region.access)
        return AccessBody(row.id, row.generation, row.token, 0, size)

    def revoke(self, region: RegionRecord) -> None:
        """End every grant of a region."""
        self._regions.revoke(region)
        self.core.region_revoked(region.id)
        self.collect()

    def close_region(self, region: RegionRecord) -> None:
        """End a region; its memory drains when nothing touches it any more."""
        self._regions.close(region)
        self.core.region_revoked(region.id)
        self.core.holds.retire(region.buffer)
        self.collect()

    def put(
        self, data: bytes, target: AccessBody, *, deadline: float | None = None
    ) -> RequestRecord:
        """Write into the other end's memory."""
        core, size = self.core, len(data)
        return self._start(data, lambda lent: core.put(lent, size, target, deadline))

    def get(
        self, source: AccessBody, *, deadline: float | None = None
    ) -> RequestRecord:
        """Read the other end's memory into a new buffer."""
        core, size = self.core, source.nbytes
        return self._start(size, lambda lent: core.get(lent, size, source, deadline))

    def open(
        self,
        *,
        pull: bool = False,
        name: bytes = b"name",
        description: bytes = b"what I have",
        priority: int = 0,
        deadline: float | None = None,
    ) -> RequestRecord:
        """Ask the other end for a KV transfer."""
        transfer = TransferRecord(id=name, priority=priority)
        request = self.core.open_transfer(
            transfer, description, pull=pull, deadline=deadline
        )
        self.collect()
        return request

    def agree(self, description: bytes = b"what I want") -> RequestRecord:
        """Answer the transfer that was opened last."""
        request = self.heard(events.TransferOpened)[-1].request
        self.core.transfers.agree(request, description)
        self.collect()
        return request

    def mark(
        self, request: RequestRecord, data: bytes, commit: int = 0
    ) -> SegmentRecord:
        """Mark and send a segment of a transfer, out of a new buffer."""
        transfers = self.core.transfers
        segment = transfers.mark(request, BOX, len(data), commit)
        transfers.queue(segment, self.lend(data))
        self.collect()
        return segment

    def commit(self, request: RequestRecord, *, complete: bool = True) -> None:
        """Mark nothing more of a transfer."""
        self.core.transfers.commit(request, complete=complete)
        self.collect()

    def read(self, body: WindowGet) -> RequestRecord:
        """Read blocks of a window of the other end into a new buffer."""
        core, size = self.core, body.nbytes
        return self._start(size, lambda lent: core.read_window(lent, body, None))

    def cancel(self, request: RequestRecord) -> None:
        self.core.cancel(request)
        self.collect()

    def close(self, timeout_s: float = 5.0) -> None:
        self.core.close(self.now, timeout_s)
        self.collect()

    def forge(self, frame_type: int, body: Body, *, request: int = 0) -> None:
        """Send a control frame that this side's core knows nothing of."""
        framing = self.core.outbox.framing
        self.wire.append(
            framing.control(frame_type, encode_body(body), request=request)
        )

    def forge_payload(
        self,
        frame_type: int,
        data: bytes,
        *,
        request: int = 0,
        segment: int = 0,
        offset: int = 0,
    ) -> None:
        """Send payload that this side's core knows nothing of, with a right check."""
        header = self.core.outbox.framing.payload(
            frame_type,
            len(data),
            request=request,
            segment=segment,
            offset=offset,
            check=checksum(memoryview(data)),
        )
        self.wire.append((header, data))

    # --- results ----------------------------------------------------------------------

    def heard(self, kind: type[E]) -> list[E]:
        """The events of a class that there were."""
        return [event for event in self.events if isinstance(event, kind)]

    def error(self, request: RequestRecord) -> KVWireError | None:
        """Why a request failed; None if it did not. KeyError if it is not over."""
        return self.done[request].error

    def received(self, request: RequestRecord) -> bytes:
        """What a receive or a get that ended well has brought."""
        done = self.done[request]
        assert done.error is None, done.error
        if request in self._held:
            return self._held[request]
        assert request.buffer is not None
        return self.content(request.buffer)[: done.nbytes]

    @property
    def ended(self) -> events.Ended | None:
        """The end of the connection, once it has come."""
        return next(iter(self.heard(events.Ended)), None)

    # --- what a link does -------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Bytes have come, in pieces of any size."""
        self.core.liveness.note_received(self.now)
        self._inlet.feed(data)

    def receive(self, frame: Frame) -> None:
        """A whole frame has come."""
        header, body = frame
        arrival = self.header(header)
        if arrival is not None:
            self.body(arrival, body)

    def body(self, arrival: ChunkArrival, body: bytes) -> None:
        """All that follows a header has come."""
        assert len(body) == arrival.length, "a frame that is not whole"
        header, intact = arrival.header, True
        if arrival.place in (ChunkPlace.BUFFER, ChunkPlace.HOLD):
            assert arrival.buffer is not None
            if arrival.place is ChunkPlace.HOLD:
                self.memory[arrival.buffer] = bytearray(len(body))
            memory = self.memory[arrival.buffer]
            assert arrival.offset + len(body) <= len(memory), "beyond the buffer"
            memory[arrival.offset : arrival.offset + len(body)] = body
        if arrival.place is not ChunkPlace.CONTROL and header.flags & _CHECKED:
            intact = checksum(memoryview(body)) == header.payload_check
        self.land(arrival, body, self.now, intact=intact)

    def complete(self) -> None:
        """The wire is through with the oldest chunk it still has."""
        self.core.chunk_sent(self._leaving.popleft())
        self.collect()

    def lose(self) -> None:
        """The wire is gone, and touches no memory any more."""
        self.lost = True
        self.wire.clear()
        self._leaving.clear()
        self.core.link_lost()
        self.collect()

    def tick(self) -> None:
        """The clock has reached a time the core wants to look at."""
        core = self.core
        core.tick(self.now)
        assert core.closed or core.next_tick > self.now, "a timer in the past"
        self.collect()

    # --- what a harness asks for ------------------------------------------------------

    def send_frame(self, header: bytes, body: bytes) -> None:
        self.wire.append((header, body))

    def send_chunk(self) -> bool:
        core = self.core
        chunk = None if self.stalled else core.next_chunk(lambda _: self.span(self))
        if chunk is None:
            return False
        end = chunk.offset + chunk.length
        body = bytes(self.memory[chunk.buffer][chunk.offset : end])
        assert len(body) == chunk.length, "beyond the buffer"
        check = checksum(memoryview(body))
        if frame := self.aside(self, chunk, check):
            self.wire.append(frame)
            return True
        self.wire.append((core.chunk_header(chunk, check), body))
        self._leaving.append(chunk)
        if not self.slow:
            core.chunk_sent(self._leaving.popleft())
        return True

    def deal_with(self, event: events.Event) -> None:
        self.events.append(event)
        if isinstance(event, events.MemoryWanted) and event.request.on_device:
            self.wanted.append(event)
        elif isinstance(event, events.MemoryWanted):
            self.core.messages.provide(event.request, self.lend(event.nbytes))
        elif isinstance(event, events.MessageKept):
            self.memory[event.buffer] = bytearray(event.body)
        elif isinstance(event, events.MessageDropped):
            self.memory.pop(event.buffer, None)  # or it is among the freed
        elif isinstance(event, events.SegmentMarked) and self.place is not None:
            self.place(event.segment)
        elif isinstance(event, events.RequestDone):
            self._note(event)
        elif isinstance(event, events.LaneEvent):
            self.on_lane(self, event)

    def drained(self, buffer: BufferId) -> None:
        self.freed[buffer] = bytes(self.memory.pop(buffer, b""))

    def broke(self, error: ProtocolError) -> None:
        self.broken = error
        super().broke(error)

    # --- inside -----------------------------------------------------------------------

    def _begin(self, raw: bytes) -> int | None:
        self._arrival = self.header(raw)
        return None if self._arrival is None else self._arrival.length

    def _end(self, body: bytes) -> None:
        assert self._arrival is not None
        self.body(self._arrival, body)

    def _start(
        self, data: bytes | int, start: Callable[[BufferId], RequestRecord]
    ) -> RequestRecord:
        """Lend memory to a request; if it cannot start, the memory comes back."""
        lent = self.lend(data)
        try:
            return start(lent)
        except KVWireError:
            self.core.holds.retire(lent)
            raise
        finally:
            self.collect()

    def _note(self, event: events.RequestDone) -> None:
        request = event.request
        assert request not in self.done, "a request with two completions"
        self.done[request] = event
        if event.held is not None:
            self._held[request] = self.content(event.held)
        if request.kind.name in ("OUTGOING", "INCOMING"):
            self.transfers[request] = self.core.transfers.records[request]
            self.core.transfers.forget(request)

    def _place(self, segment: SegmentRecord) -> None:
        self.core.transfers.place(segment, self.lend(segment.nbytes))


def _on_the_wire(peer: Peer, chunk: Chunk, check: int) -> Frame | None:
    """Where there are no lanes."""
    return None


def _without_lanes(peer: Peer, event: events.LaneEvent) -> None:
    """Nobody has brought any: one that the other end asks for is declined."""
    if isinstance(event, events.LaneAsked):
        peer.core.lane_gone(event.lane, "there are no lanes here")


def _chunk_by_chunk(peer: Peer) -> int:
    return 0


# More than any test needs, and few enough to end soon where two cores never agree.
_FRAMES_MAX = 100_000


class ConnectionPair:
    """Both ends of one connection, after a real handshake."""

    def __init__(
        self,
        *,
        client: Identity | None = None,
        server: Identity | None = None,
        shaken: Shaking | None = None,
    ) -> None:
        if shaken is None:
            mine, theirs = client or identity("client"), server or identity("server")
            shaken = shake(begin(mine, theirs))
        self.now = 1000.0
        self.client, self.server = (
            Peer(shaken.of(role), parameters=shaken.parameters(role), now=self.now)
            for role in Role
        )

    def of(self, role: Role) -> Peer:
        """The end with a role."""
        return self.client if role is Role.CLIENT else self.server

    def deliver(self, sender: Peer) -> bool:
        """Deliver the oldest frame of one end; False if there is none."""
        if not sender.wire:
            return False
        self._other(sender).receive(sender.wire.popleft())
        return True

    def collect(self) -> None:
        """Carry out what both cores have to say after calls of theirs."""
        for end in (self.client, self.server):
            end.collect()

    def run(self) -> None:
        """Deliver frames, in turns, until there are none; then end what has ended."""
        self.collect()
        for _ in range(_FRAMES_MAX):
            delivered = self.deliver(self.client) | self.deliver(self.server)
            if self._cut() or delivered:
                continue
            return
        raise AssertionError("the two ends do not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, with all that it brings."""
        until = self.now + seconds
        while (due := self._next_tick()) is not None and due <= until:
            self._set_clock(max(self.now, due))
            for end in (self.client, self.server):
                if not end.core.closed and end.core.next_tick <= self.now:
                    end.tick()
            self.run()
        self._set_clock(until)

    def _next_tick(self) -> float | None:
        open_ends = [e for e in (self.client, self.server) if not e.core.closed]
        return min((end.core.next_tick for end in open_ends), default=None)

    def _set_clock(self, now: float) -> None:
        self.now = self.client.now = self.server.now = now

    def _cut(self) -> bool:
        """Once an end is over, and what it still had to say is said, cut the wire."""
        for end in (self.client, self.server):
            over = end.ended
            if over is None or (over.graceful and end.wire):
                continue
            other = self._other(end)
            if not end.lost:
                end.lose()
                if not other.lost:
                    other.lose()
                return True
        return False

    def _other(self, end: Peer) -> Peer:
        return self.server if end is self.client else self.client
