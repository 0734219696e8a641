"""The requests and flows of one side, with chunks so small that few bytes make many."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvwire.proto.chunks import Chunk, ChunkMover
from kvwire.proto.events import Outbox, RequestDone
from kvwire.proto.framing import Framing
from kvwire.proto.holds import Holds
from kvwire.proto.records import RequestRecord, SegmentRecord
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import FIRST_STATE, RequestInput, RequestKind
from kvwire.types import Role
from kvwire.wire.header import Flag, FrameType, Header, decode_header, encode_header

CHUNK = 10


@dataclass
class Side:
    """The requests and flows of one side, with chunks of ten bytes."""

    role: Role = Role.CLIENT
    outbox: Outbox = field(default_factory=lambda: Outbox(Framing()))
    holds: Holds = field(default_factory=Holds)
    requests: RequestTable = field(init=False)
    chunks: ChunkMover = field(init=False)

    def __post_init__(self) -> None:
        self.requests = RequestTable(self.role, self.outbox, self.holds)
        self.chunks = ChunkMover(self.requests, self.holds, CHUNK)

    def request(
        self,
        kind: RequestKind,
        nbytes: int = 5,
        base: int = 0,
        deadline: float | None = None,
    ) -> RequestRecord:
        request = RequestRecord(
            kind=kind,
            state=FIRST_STATE[kind],
            buffer=self.holds.new(),
            nbytes=nbytes,
            base=base,
            deadline=deadline,
        )
        self.requests.start(request)
        return request

    def served(self, wire_id: int) -> RequestRecord:
        """A request that the peer has started."""
        request = RequestRecord(
            kind=RequestKind.SERVE_GET,
            state=FIRST_STATE[RequestKind.SERVE_GET],
            wire_id=self.requests.admit(wire_id),
            buffer=self.holds.new(),
            nbytes=5,
        )
        self.requests.serve(request)
        return request

    def put(self, nbytes: int, base: int = 0) -> RequestRecord:
        request = self.request(RequestKind.PUT, nbytes, base)
        self.chunks.begin_send(request)
        return request

    def get(
        self, nbytes: int, base: int = 0, kind: RequestKind = RequestKind.GET
    ) -> RequestRecord:
        request = self.request(kind, nbytes, base)
        self.chunks.begin_receive(request)
        return request

    def segment(self, nbytes: int, priority: int, number: int = 1) -> SegmentRecord:
        request = self.request(RequestKind.OUTGOING, 0)
        request.advance(RequestInput.GO)
        return self.segment_of(request, nbytes, number, priority)

    def segment_of(
        self, request: RequestRecord, nbytes: int, number: int, priority: int = 0
    ) -> SegmentRecord:
        segment = SegmentRecord(
            request=request,
            number=number,
            box=(0, 0, 1, 0, 1),
            nbytes=nbytes,
            buffer=self.holds.new(),
        )
        self.chunks.begin_segment(segment, priority)
        return segment

    def chunk(self) -> Chunk:
        chunk = self.chunks.next_chunk()
        assert chunk is not None
        return chunk

    def done(self) -> list[RequestDone]:
        events = self.outbox.events.copy()
        self.outbox.events.clear()
        return [event for event in events if isinstance(event, RequestDone)]


def data(wire_id: int, offset: int, length: int) -> Header:
    raw = encode_header(FrameType.DATA, Flag.CHECKED, 0, length, wire_id, offset=offset)
    return decode_header(raw)


def pieces(nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(CHUNK, nbytes - at)) for at in range(0, nbytes, CHUNK)]
