"""One connection after its handshake: frames, time and calls in; frames and events out.

Its caller, the *front*, works in this order:

1. Call a method when something has happened: one of the *link* methods
   (``header_received``, ``body_received``, ``chunk_sent``, ``link_lost``), ``tick``
   when ``next_tick`` has come, or one of the *application* methods (``send``,
   ``recv``, ``put``, ``get``, ...).
2. Send the frames in ``outbox.frames``, in order, before anything else.
3. While the link has room, take ``next_chunk`` and send it under ``chunk_header``.
4. Act on ``outbox.events``, and on ``holds.drained``.

Times are absolute seconds on one monotonic clock and never go back. The link methods
raise :exc:`~kvwire.errors.ProtocolError` when the peer has broken a rule; the front
then calls ``fail`` and stops receiving. A peer's frames cannot cause any other
exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvwire.errors import (
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    PeerUnresponsive,
    RequestCancelled,
    UnexpectedFrame,
    UsageError,
    WireCode,
)
from kvwire.proto.chunks import Chunk, ChunkMover
from kvwire.proto.dispatch import MET_BY_PEER, Dispatch, check_numbers
from kvwire.proto.events import Ended, Outbox
from kvwire.proto.framing import Framing
from kvwire.proto.handshake import Agreement
from kvwire.proto.holds import Holds
from kvwire.proto.lanes import LaneTable
from kvwire.proto.liveness import Keepalive, Liveness, LivenessVerdict
from kvwire.proto.messages import Messages
from kvwire.proto.onesided import OneSided
from kvwire.proto.records import (
    ChunkArrival,
    ChunkPlace,
    RequestRecord,
    SegmentRecord,
    TransferRecord,
)
from kvwire.proto.regions import GrantRow, Grants, RegionRecord
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import (
    CLOSE_TRANSITIONS,
    FIRST_STATE,
    CloseInput,
    CloseState,
    RequestKind,
    RequestStage,
)
from kvwire.proto.transfers import Transfers
from kvwire.proto.windows import WindowReads
from kvwire.types import Access, BufferId, RegionId
from kvwire.wire.control import (
    AccessBody,
    Close,
    Ping,
    WindowGet,
    decode_body,
)
from kvwire.wire.handshake_messages import ConnectionParameters
from kvwire.wire.header import FIRST_PAYLOAD_TYPE, FrameType, Header

# How long a producer's FIN may wait for a frame that can carry it: a fraction of the
# cost of waking both sides' busy loops.
LAST_FIN_DELAY_S: Final = 0.02

# The frame types that may follow the handshake and have a control body.
_CONTROL = frozenset(
    frame_type
    for frame_type in FrameType
    if FrameType.PING <= frame_type < FIRST_PAYLOAD_TYPE
)
_MESSAGE = int(FrameType.MESSAGE)
_DATA = int(FrameType.DATA)
_MARKED_DATA = int(FrameType.MARKED_DATA)
_WINDOW_DATA = int(FrameType.WINDOW_DATA)
_DELIVERING = (CloseState.FLUSHING, CloseState.CLOSE_RECEIVED)
# CLOSE is sent once; in the other states it was sent already.
_MAY_CLOSE = (CloseState.OPEN, *_DELIVERING)
_OPEN = CloseState.OPEN
_SEND = RequestKind.SEND
_FIRST_OF_SEND = FIRST_STATE[_SEND]
_NOWHERE = ChunkPlace.NOWHERE
_RECV = RequestKind.RECV
_POSTED = FIRST_STATE[_RECV]

EagerHeader = Callable[[int, int, int | None], bytes | None]
"""Takes a tag, a length and a checksum; returns the header of a small message, or None.
"""


class ConnectionCore:
    """Keeps the protocol state of one connection.

    Attributes:
        agreement: The result of the handshake.
        outbox: Frames to send and events to act on.
        holds: The holds on memory, shared by the communicator's connections.
        chunks: The payload in flight.
        eager_header: Sends a small message at once, if there is credit; see Messages.
        next_chunk: Returns the next piece of payload to send, if any; see ChunkMover.
        lanes: Data paths beside the control link.
        liveness: Whether the peer is alive, by what was received.
        windows: The reads of blocks that either side has exposed.
        phase: The connection's state.
        error: The reason for its end; None until then.
        speak_by: The latest time to send the frames that transfers hold back; None if
            no frame is held back.
    """

    def __init__(
        self,
        agreement: Agreement,
        framing: Framing,
        holds: Holds,
        *,
        parameters: ConnectionParameters,
        ping_interval_s: float,
        ping_misses: int,
        now: float,
    ) -> None:
        role = agreement.role
        self.agreement = agreement
        self.outbox: Outbox = Outbox(framing)
        self._framing = framing
        self.holds = holds
        self.phase: CloseState = CloseState.OPEN
        self.error: ConnectionClosed | None = None
        self._requests = RequestTable(role, self.outbox, holds)
        self.chunks: ChunkMover = ChunkMover(
            self._requests, holds, agreement.parameters.chunk_bytes
        )
        shared = self.outbox, self._requests, self.chunks
        self.messages: Messages = Messages(
            *shared, holds, mine=parameters, theirs=agreement.peer_parameters
        )
        # The parts' own methods, because this class would only forward the calls.
        self.eager_header: EagerHeader = self.messages.eager_header
        self.next_chunk: Callable[..., Chunk | None] = self.chunks.next_chunk
        self.transfers: Transfers = Transfers(
            *shared, holds, agreement.parameters.chunk_bytes
        )
        self.lanes: LaneTable = LaneTable(
            role,
            self.outbox,
            self.chunks,
            patience_s=ping_interval_s * ping_misses,
            look_s=ping_interval_s / 2,
            now=now,
            place=self._data_header,
            landed=self._data_landed,
        )
        self._grants = Grants(agreement.keys.grant[role])
        self._onesided = OneSided(*shared, self._grants)
        self.windows: WindowReads = WindowReads(*shared)
        self.liveness: Liveness = Liveness(
            interval_s=ping_interval_s, misses=ping_misses, now=now
        )
        self._keepalive = Keepalive(
            interval_s=ping_interval_s, now=now, frames_sent=framing.sent
        )
        self._close_by: float | None = None
        self.speak_by: float | None = None
        # Which side closed first.
        self._closing: ClosedOK | None = None
        parts = (self.messages, self._onesided, self.transfers, self.lanes)
        self._dispatch = Dispatch(
            self.outbox,
            self._requests,
            (*parts, self.windows, self.liveness),
            check_may_start=self._check_may_start,
            peer_closed=self._peer_closed,
        )

    @property
    def closed(self) -> bool:
        """Whether the connection has ended and sends nothing more."""
        return self.phase is CloseState.CLOSED

    @property
    def open_requests(self) -> int:
        """Return the number of both sides' open requests."""
        return len(self._requests)

    # --- the link ---------------------------------------------------------------------

    def header_received(self, raw: bytes | memoryview) -> ChunkArrival:
        """Accept the next header, and return the place for its body."""
        header = self._framing.accept_header(raw)
        if self.error is not None:
            return ChunkArrival(ChunkPlace.NOWHERE, header)
        frame_type = header.type
        if frame_type == _MESSAGE:
            if self.phase is not _OPEN:
                self._check_may_start(header)
            return self.messages.message_header(header)
        if frame_type == _DATA:
            return self._data_header(header)
        if frame_type == _MARKED_DATA:
            return self.transfers.marked_data(header)
        if frame_type == _WINDOW_DATA:
            return self.windows.data_header(header)
        if frame_type not in _CONTROL:
            raise UnexpectedFrame(
                "KVW-CN-01", f"{FrameType(frame_type).name} after the handshake"
            )
        check_numbers(header)
        return ChunkArrival(ChunkPlace.CONTROL, header, raw=bytes(raw))

    def body_received(
        self,
        arrival: ChunkArrival,
        now: float,
        *,
        body: bytes | memoryview = b"",
        intact: bool = True,
    ) -> None:
        """Act on a complete frame.

        Args:
            arrival: The result of ``header_received``.
            now: The time.
            body: The bytes, for ``ChunkPlace.CONTROL`` and ``ChunkPlace.WHOLE``.
            intact: Whether the payload matched ``payload_check``, if it had one.

        Raises:
            ProtocolError: The frame breaks a rule.
        """
        self.liveness.received_at = now
        header = arrival.header
        if arrival.place is _NOWHERE:
            return
        if header.type == _MESSAGE:
            self.messages.message_landed(arrival, body, intact=intact)
            if self.phase is _OPEN:
                return  # the frame needs no acknowledgement and ends nothing
        elif header.type == _DATA:
            part = self.transfers if header.segment else self.chunks
            part.data_landed(arrival, intact=intact)
        elif header.type == _WINDOW_DATA:
            self.windows.data_landed(arrival, body, intact=intact)
        elif header.type == _MARKED_DATA:
            self.transfers.marked_whole(header, body, intact=intact)
        elif self.error is None:
            assert isinstance(body, bytes)
            plain = self.outbox.framing.open(header, arrival.raw, body)
            body_read = decode_body(header.type, plain)
            self._dispatch.control(header, body_read, now)
        transfers = self.transfers
        if (
            self.speak_by is None
            or self.phase is not _OPEN
            or transfers.unacknowledged
            or self.lanes.unreported
        ):
            self._settle(now)

    def payload_landed(
        self, arrival: ChunkArrival, now: float, *, intact: bool
    ) -> None:
        """Act on a payload that a lane has received."""
        self.liveness.note_received(now)
        self.lanes.payload_landed(arrival, intact=intact)
        self._settle(now)

    def chunk_sent(self, chunk: Chunk) -> bool:
        """Drop a chunk's hold, because the link or lane has finished with it.

        Returns:
            Whether the hold was dropped. A chunk on a lane keeps it until the peer has
            reported the arrival.
        """
        if chunk.lane:
            dropped = self.lanes.payload_sent(chunk)
            self._settle()
            return dropped
        self.chunks.chunk_sent(chunk)
        if self.phase is not _OPEN:  # in the open phase this makes no frame due
            self._settle()
        return True

    def lane_gone(self, number: int, reason: str) -> None:
        """Close a lane whose local endpoint has ended and touches no memory."""
        self.lanes.close(number, reason)
        self._settle()

    def link_lost(self, error: ConnectionClosed | None = None) -> None:
        """End the connection; its link has ended and touches no memory."""
        self.chunks.link_gone()
        self.lanes.link_gone()
        self.messages.link_gone()
        if not self.closed:
            gone = "the peer's side ended without closing the connection"
            self._end(error or ConnectionLost(gone))
        self._turn(CloseInput.LOST)

    @property
    def sending(self) -> bool:
        """Whether ``next_chunk`` may return something."""
        return self.error is None and self.chunks.sending

    @property
    def due_bytes(self) -> int:
        """Return the bytes left of the request or segment that sends next."""
        return 0 if self.error is not None else self.chunks.due_bytes

    def chunk_header(self, chunk: Chunk, check: int | None) -> bytes:
        """Return a chunk's header, with the next frame number."""
        frame_type = _DATA
        offset = chunk.position
        wire_id = chunk.request.wire_id
        mover = chunk.mover
        if isinstance(mover, SegmentRecord) and mover.unsent_mark is not None:
            frame_type = _MARKED_DATA
            offset = self.transfers.take_mark(mover)
        return self.outbox.framing.payload(
            frame_type, chunk.length, wire_id, chunk.number, offset, check
        )

    # --- time -------------------------------------------------------------------------

    @property
    def next_tick(self) -> float:
        """Return the latest time to call ``tick``."""
        due = min(self.liveness.due, self._keepalive.due)
        for other in (self._requests.next_deadline, self._close_by, self.speak_by):
            if other is not None and other < due:
                due = other
        return due

    def tick(self, now: float) -> None:
        """Act on the time: deadlines, pings, silence, and frames held back."""
        if self.phase is CloseState.CLOSED:
            return
        for request in self._requests.expire(now):
            self._abandon(request, RequestTable.expired(request), WireCode.DEADLINE)
        if self._close_by is not None and now >= self._close_by:
            self._end(ConnectionLost("the peer did not finish closing in time"))
            return
        if self.speak_by is not None and now >= self.speak_by:
            self.speak_by = None
            self.transfers.speak()
        verdict = self.liveness.look(now)
        if verdict is LivenessVerdict.DEAD:
            silence_s = self.liveness.silence_s(now)
            if self.phase in _MAY_CLOSE:
                self.transfers.send_last_fins()
                self.outbox.send(FrameType.CLOSE, Close(code=WireCode.UNRESPONSIVE))
            self._end(PeerUnresponsive(f"the peer was silent for {silence_s:.1f} s"))
            return
        self.lanes.look(now)
        frames_sent = self.outbox.framing.sent
        asks = verdict is LivenessVerdict.PING and self._keepalive.is_idle(frames_sent)
        if self._keepalive.is_due(now, frames_sent) or asks:
            self.outbox.send(FrameType.PING, Ping(number=self.liveness.ping(now)))
        self._settle()

    # --- the application --------------------------------------------------------------

    def send(
        self,
        tag: int,
        buffer: BufferId,
        nbytes: int,
        deadline: float | None,
        *,
        on_device: bool = False,
    ) -> RequestRecord:
        """Announce a message; its bytes move when the peer has memory for them.

        With ``on_device`` the front has to permit the move as well: see MemoryWanted.
        """
        if self.phase is not _OPEN:
            self._check_open()
        request = RequestRecord(
            kind=_SEND,
            buffer=buffer,
            nbytes=nbytes,
            tag=tag,
            deadline=deadline,
            state=_FIRST_OF_SEND,
            on_device=on_device,
        )
        self.messages.announce(request)
        return request

    def recv(
        self,
        tag: int,
        buffer: BufferId | None,
        nbytes: int,
        deadline: float | None,
        *,
        on_device: bool = False,
        stays: bool = False,
    ) -> RequestRecord:
        """Receive the next message of a tag, of at most ``nbytes`` bytes.

        With ``on_device`` the front has to permit the landing: see MemoryWanted. With
        ``stays``, and without a buffer, small messages do not end it: see
        MessageArrived.

        Raises:
            ConnectionClosed: No message of this tag has arrived, and none can arrive.
        """
        if self.phase is not _OPEN and not self.messages.waits(tag, whole=self.closed):
            self._check_open()
        request = RequestRecord(
            kind=_RECV,
            buffer=buffer,
            nbytes=nbytes,
            tag=tag,
            deadline=deadline,
            state=_POSTED,
            on_device=on_device,
            stays=stays,
        )
        self.messages.post(request)
        return request

    def put(
        self, buffer: BufferId, nbytes: int, where: AccessBody, deadline: float | None
    ) -> RequestRecord:
        """Write a buffer into memory that the peer has granted."""
        self._check_open()
        request = self._record(RequestKind.PUT, buffer, nbytes, deadline)
        self._onesided.put(request, where)
        return request

    def get(
        self, buffer: BufferId, nbytes: int, where: AccessBody, deadline: float | None
    ) -> RequestRecord:
        """Read memory that the peer has granted into a buffer."""
        self._check_open()
        request = self._record(RequestKind.GET, buffer, nbytes, deadline)
        self._onesided.get(request, where)
        return request

    def reserve(
        self, kind: RequestKind, buffer: BufferId, nbytes: int, deadline: float | None
    ) -> RequestRecord:
        """Start a put or get of device memory; call ``ask`` later to ask the peer."""
        self._check_open()
        request = self._record(kind, buffer, nbytes, deadline)
        request.on_device = True
        self._requests.start(request)
        return request

    def ask(self, request: RequestRecord, where: AccessBody) -> None:
        """Send the frame of a reserved put or get, unless it has ended meanwhile."""
        if request.over:
            return
        try:
            self._onesided.ask(request, where)
        except UsageError as exc:
            self.refuse(request, exc, WireCode.OTHER)

    def filled(self, request: RequestRecord) -> None:
        """End a receive into a device, which now contains the held message."""
        self.messages.filled(request)
        if self.phase is not _OPEN:
            self._settle()

    def open_window(self, name: str, deadline: float | None) -> RequestRecord:
        """Request one of the peer's windows."""
        self._check_open()
        request = self._record(RequestKind.OPEN_WINDOW, None, 0, deadline)
        self.windows.open(request, name)
        return request

    def read_window(
        self, buffer: BufferId | None, body: WindowGet, deadline: float | None
    ) -> RequestRecord:
        """Read blocks of a peer's window, into a buffer or as one frame."""
        self._check_open()
        request = self._record(RequestKind.READ, buffer, body.nbytes, deadline)
        self.windows.get(request, body)
        return request

    def finish_read(self, request: RequestRecord, stale: bytes, *, sent: bool) -> None:
        """Answer a get from this side's window; continue a close that waited for it."""
        self.windows.finish(request, stale, sent=sent)
        if self.phase is not _OPEN:
            self._settle()

    def cancel(self, request: RequestRecord) -> None:
        """Cancel a request of this side; its memory is free once the buffer drains."""
        error = RequestCancelled(f"the {request.kind.value} was cancelled on this side")
        self._abandon(request, error, WireCode.CANCELLED)
        self._settle()

    def withdraw(self, request: RequestRecord) -> bool:
        """End a receive without a message; return False if it already has one."""
        if not self.messages.withdraw(request):
            return False
        error = RequestCancelled("the receive was withdrawn")
        self._requests.fail(request, error, code=None)
        return True

    def grant(
        self, region: RegionRecord, offset: int, nbytes: int | None, access: Access
    ) -> GrantRow:
        """Grant the peer a range of a region; ``nbytes=None`` means up to its end."""
        self._check_open()
        return self._grants.give(region, offset, nbytes, access)

    def region_revoked(self, region: RegionId) -> None:
        """Fail the peer's requests on a revoked region."""
        self._onesided.region_revoked(region)
        self._settle()

    def open_transfer(
        self,
        transfer: TransferRecord,
        description: bytes,
        *,
        pull: bool,
        deadline: float | None,
    ) -> RequestRecord:
        """Request a KV transfer; ``pull`` means that this side is the consumer."""
        kind = RequestKind.INCOMING if pull else RequestKind.OUTGOING
        if self.phase is not _OPEN:
            self._check_open()
        request = self._record(kind, None, 0, deadline)
        self.transfers.open(request, transfer, description)
        return request

    def refuse(
        self, request: RequestRecord, error: KVWireError, code: WireCode
    ) -> None:
        """End a request; its owner gets the error, and the peer gets the code."""
        self._abandon(request, error, code)
        self._settle()

    def close(self, now: float, timeout_s: float) -> None:
        """Close the connection gracefully. May be called again.

        Receives without a message fail at once. CLOSE is sent when all other requests
        have ended; the connection ends with the peer's CLOSE, or after ``timeout_s``.
        """
        if self._close_by is None:
            self._close_by = now + timeout_s
        self._turn(CloseInput.CLOSE_CALLED)
        closed = self._close_error("this side closed the connection")
        for request in self.messages.posted + self.transfers.unanswered:
            self._abandon(request, closed, WireCode.GOING_AWAY)
        self.messages.refuse_announced()
        self._settle()

    def fail(self, error: KVWireError) -> None:
        """End at once, after a failure here or a protocol error of the peer."""
        if isinstance(error, ConnectionClosed):
            self._end(error)
            return
        closed = ConnectionLost(f"closed after an error: {error}")
        closed.__cause__ = error
        self._end(closed)

    # --- inside -----------------------------------------------------------------------

    def _data_header(self, header: Header) -> ChunkArrival:
        if header.segment:
            return self.transfers.data_header(header)
        return self.chunks.data_header(header)

    def _data_landed(self, arrival: ChunkArrival, intact: bool) -> None:
        part = self.transfers if arrival.header.segment else self.chunks
        part.data_landed(arrival, intact=intact)

    def _peer_closed(self, body: Close) -> None:
        if self.phase in (CloseState.CLOSE_RECEIVED, CloseState.CLOSED):
            raise UnexpectedFrame("KVW-CL-01", "a second CLOSE")
        if body.code == WireCode.UNRESPONSIVE:
            self._end(self._unreached())
            return
        self._turn(CloseInput.PEER_CLOSED)
        self.messages.peer_closed()
        code = "" if body.code == WireCode.GOING_AWAY else f" (code {body.code})"
        closed = self._close_error(f"the peer closed the connection{code}")
        for request in self.messages.posted:
            self._abandon(request, closed, None)
        for request in self._requests:
            if request.kind in MET_BY_PEER and request.state is RequestStage.POSTED:
                self._abandon(request, closed, None)
        if self.closed:
            self._end(closed, graceful=True)

    def _unreached(self) -> ConnectionLost:
        """Return the error of a connection whose peer no longer receives from us."""
        lost = ConnectionLost(
            "the peer is alive but has received nothing from this side"
        )
        lost.__cause__ = PeerUnresponsive("nothing came to the peer")
        return lost

    def _settle(self, now: float | None = None) -> None:
        """Send the due reports, and finish a close that has delivered everything."""
        # Runs after each step. Before: parts of the core have recorded which frames are
        # due. After: these frames are in the outbox, or `speak_by` has the time to send
        # them; and a closing side with nothing left to deliver has sent CLOSE.
        transfers = self.transfers
        if transfers.unacknowledged:
            transfers.acknowledge()
        waits = transfers.last_fins or transfers.unhurried
        if waits and self.speak_by is None and now is not None:
            self.speak_by = now + LAST_FIN_DELAY_S
        if self.lanes.unreported:
            self.lanes.acknowledge()
        if self.phase is _OPEN or self.phase not in _DELIVERING:
            return
        if len(self._requests):
            return
        self._turn(CloseInput.IDLE)
        self.transfers.send_last_fins()
        self.outbox.send(FrameType.CLOSE, Close(code=WireCode.GOING_AWAY))
        if self.closed:
            assert self._closing is not None
            self._end(self._closing, graceful=True)

    def _close_error(self, text: str) -> ClosedOK:
        """Return this close's error, with the text of the side that closed first."""
        if self._closing is None:
            self._closing = ClosedOK(text)
        return self._closing

    def _end(self, error: ConnectionClosed, *, graceful: bool = False) -> None:
        # In this order: eager sends stop, the frames that are still allowed are queued,
        # the outbox shuts, and then the requests fail, which can no longer send
        # anything.
        if self.error is not None:
            return
        self.phase = CloseState.CLOSED
        self.messages.end_eager()
        self.error = error
        self.transfers.send_last_fins()
        self.outbox.shut = True
        self.messages.peer_closed()
        for request in self._requests:
            self._abandon(request, error, None)
        self.outbox.report(Ended(error=error, graceful=graceful))

    def _abandon(
        self, request: RequestRecord, error: KVWireError, code: WireCode | None
    ) -> None:
        self.messages.withdraw(request)
        if request in self.transfers.unhurried:
            self.transfers.speak()  # report the landed segments, which stay landed
        self._requests.fail(request, error, code=code)

    def _turn(self, turn: CloseInput) -> None:
        self.phase = CLOSE_TRANSITIONS[self.phase, turn]
        self.messages.end_eager()

    def _record(
        self,
        kind: RequestKind,
        buffer: BufferId | None,
        nbytes: int,
        deadline: float | None,
    ) -> RequestRecord:
        return RequestRecord(
            kind=kind,
            buffer=buffer,
            nbytes=nbytes,
            deadline=deadline,
            state=FIRST_STATE[kind],
        )

    def _check_open(self) -> None:
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error
        if self.phase is not CloseState.OPEN:
            raise ClosedOK("the connection is closing")

    def _check_may_start(self, header: Header) -> None:
        """Raise UnexpectedFrame if the peer starts a request after its CLOSE."""
        if self.phase in (CloseState.CLOSE_RECEIVED, CloseState.CLOSED):
            raise UnexpectedFrame(
                "KVW-CL-02", f"{FrameType(header.type).name} after the peer's CLOSE"
            )
