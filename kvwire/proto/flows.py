"""Payload on its way: which chunk to send next, and where an incoming one belongs.

A request's bytes travel as chunks: pieces at multiples of the agreed chunk size, each
in a frame of its own that says where it belongs. So the order in which they arrive
does not matter, none can overlap another, and a request is complete when its bytes
add up.

Requests that send take turns, one chunk each: a message of 4 MiB beside a prompt of
4 GiB waits for its share of the wire and not for the prompt.
"""

from __future__ import annotations

import enum
from collections import deque

from kvwire.errors import IntegrityError, MalformedFrame, WireCode
from kvwire.proto.holds import Holds
from kvwire.proto.requests import SENDING, Request, Requests
from kvwire.proto.state import Input, Kind, State
from kvwire.types import BufferId
from kvwire.wire.header import Header


class Place(enum.Enum):
    """Where the body of a frame goes."""

    CONTROL = "control"
    """To the core: ``body_received`` wants its bytes."""
    HOLD = "hold"
    """Into new memory, of a buffer the core has just named."""
    BUFFER = "buffer"
    """Into ``buffer`` at ``offset``."""
    NOWHERE = "nowhere"
    """Dropped: the request it belongs to is over."""


class Arrival:
    """One frame whose header has been accepted and whose body is under way."""

    __slots__ = ("buffer", "header", "length", "offset", "place", "raw", "request")

    def __init__(
        self,
        place: Place,
        header: Header,
        *,
        raw: bytes = b"",
        buffer: BufferId | None = None,
        offset: int = 0,
        request: Request | None = None,
    ) -> None:
        self.place = place
        self.header = header
        self.length = header.length
        self.raw = raw
        self.buffer = buffer
        self.offset = offset
        self.request = request


class Chunk:
    """One piece of payload to send: ``length`` bytes of ``buffer`` from ``offset``."""

    __slots__ = ("buffer", "length", "offset", "position", "request")

    def __init__(self, request: Request, position: int, length: int) -> None:
        assert request.buffer is not None
        self.request = request
        self.buffer = request.buffer
        self.position = position
        self.offset = request.base + position
        self.length = length


class Flows:
    """Everything that moves on one connection."""

    def __init__(self, requests: Requests, holds: Holds, chunk_bytes: int) -> None:
        self._requests = requests
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        self._turn: deque[Request] = deque()
        self._leaving: set[Chunk] = set()
        self._landing: set[Arrival] = set()

    # --- sending ----------------------------------------------------------------------

    def begin_send(self, request: Request) -> None:
        """From now on the request takes its turn."""
        assert request.kind in SENDING
        assert request.state is State.MOVING
        self._turn.append(request)  # bounded: REQUESTS_MAX

    @property
    def sending(self) -> bool:
        """Whether some request may have a chunk to send."""
        return bool(self._turn)

    def next_chunk(self) -> Chunk | None:
        """The next piece to send. Its memory is held until :meth:`chunk_sent`."""
        while self._turn:
            request = self._turn.popleft()
            if request.state is not State.MOVING:
                continue
            position = request.moved
            length = min(self._chunk_bytes, request.nbytes - position)
            request.moved += length
            request.in_flight += 1
            if request.moved < request.nbytes:
                self._turn.append(request)  # bounded: REQUESTS_MAX
            chunk = Chunk(request, position, length)
            self._holds.take(chunk.buffer)
            self._leaving.add(chunk)  # bounded: LINK_QUEUE_BYTES
            return chunk
        return None

    def chunk_sent(self, chunk: Chunk) -> None:
        """The link no longer needs the chunk's memory."""
        self._leaving.discard(chunk)
        self._holds.drop(chunk.buffer)
        request = chunk.request
        request.in_flight -= 1
        if (
            request.state is not State.MOVING
            or request.in_flight
            or request.moved < request.nbytes
        ):
            return
        request.advance(Input.MOVED)
        if request.confirmed:
            request.advance(Input.CONFIRMED)
        if request.over:
            self._requests.finish(request)

    # --- receiving --------------------------------------------------------------------

    def begin_receive(self, request: Request) -> None:
        """From now on chunks of the request are accepted."""
        assert request.kind not in SENDING
        assert request.state is State.MOVING
        request.arrived = bytearray(-(-request.nbytes // self._chunk_bytes))

    def data_header(self, header: Header) -> Arrival:
        """Find the place of an incoming chunk.

        Raises:
            ProtocolError: The request never was, does not receive, or the chunk is not
                one of it or was here before.
        """
        request = self._requests.find(header.request)
        if request is None:
            return Arrival(Place.NOWHERE, header)
        arrived = request.arrived
        if arrived is None or request.state is not State.MOVING:
            raise MalformedFrame(
                "KVW-DT-01",
                f"payload for a {request.kind.value} that is {request.state.value}",
            )
        index, beside = divmod(header.offset, self._chunk_bytes)
        left = request.nbytes - header.offset
        if beside or left < 1 or header.length != min(self._chunk_bytes, left):
            raise MalformedFrame(
                "KVW-DT-02",
                f"chunk {header.offset}+{header.length} of a request of "
                f"{request.nbytes} bytes in chunks of {self._chunk_bytes}",
            )
        if header.segment:
            raise MalformedFrame("KVW-DT-02", "a segment of a request that has none")
        if arrived[index]:
            raise MalformedFrame("KVW-DT-03", f"chunk {header.offset} came twice")
        arrived[index] = 1
        assert request.buffer is not None
        return self.into_buffer(header, request, request.base + header.offset)

    def into_buffer(self, header: Header, request: Request, offset: int) -> Arrival:
        """Let a body land in a request's memory, which is held until it has."""
        assert request.buffer is not None
        arrival = Arrival(
            Place.BUFFER, header, buffer=request.buffer, offset=offset, request=request
        )
        self._holds.take(request.buffer)
        self._landing.add(arrival)  # bounded: one a link
        return arrival

    def data_landed(self, arrival: Arrival, *, intact: bool) -> None:
        """A chunk is in place, and its checksum did or did not match."""
        if arrival.place is Place.NOWHERE:
            return
        request = self.release(arrival)
        if request.over:
            return
        if not intact:
            error = IntegrityError(
                f"bytes {arrival.header.offset}+{arrival.length} arrived damaged"
            )
            self._requests.fail(request, error, tell=WireCode.INTEGRITY)
            return
        request.moved += arrival.length
        if request.moved < request.nbytes:
            return
        request.advance(Input.MOVED)
        if request.kind is Kind.SERVE_PUT:
            self._requests.tell_done(request)
        self._requests.finish(request)

    def release(self, arrival: Arrival) -> Request:
        """The link has written all of an arrival and holds its memory no more."""
        assert arrival.request is not None
        assert arrival.buffer is not None
        self._landing.discard(arrival)
        self._holds.drop(arrival.buffer)
        return arrival.request

    # --- the end ----------------------------------------------------------------------

    def link_gone(self) -> None:
        """The link has ended and touches nothing any more: drop every hold of it."""
        for chunk in self._leaving:
            chunk.request.in_flight -= 1
            self._holds.drop(chunk.buffer)
        for arrival in self._landing:
            assert arrival.buffer is not None
            self._holds.drop(arrival.buffer)
        self._leaving.clear()
        self._landing.clear()
        self._turn.clear()
