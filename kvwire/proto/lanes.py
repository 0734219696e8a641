"""Lanes: payload beside the control link; counts ensure that each arrives once.

Each side has an endpoint of a lane. Lanes open one after the other, in one exchange::

    client                                server
      LANE_OPEN   lane 1, backend, its       its endpoint joins
                  bootstrap          ->
              <- LANE_OPEN    lane 1, backend, its bootstrap
      LANE_READY  lane 1             ->      open on both sides
      LANE_READY  lane 0             ->      the initial set is done

Each side may announce payloads for a lane that is open. They are numbered from 0 in the
order of their LANE_DATA frames, separately in each direction::

    sender                                receiver
      LANE_DATA   lane 1, chunk, descriptor ->      names the destination
      (payload on the lane)
              <- LANE_ACK    lane 1, the first 7

A chunk's memory is held until two things are known: that the local endpoint has
finished with the chunk, and whether it has arrived. LANE_ACK reports arrivals. A side
whose endpoint has ended sends LANE_CLOSE, with the number of LANE_DATA frames that it
has received and the numbers of the missing payloads. If a LANE_DATA arrives later, its
payload is missing too, and another LANE_CLOSE names it. So as long as the control link
lives, each side knows exactly which chunks have arrived, and sends the missing ones
again on another path.

A lane is *over* when both sides have sent LANE_CLOSE and every missing payload has been
named: no later frame names the lane, and it is forgotten. The client may ask for lanes
as long as the connection lives, so that a broken lane can be replaced. Lane numbers are
never reused, because a lane's secret depends on its number and must be used only once.

A lane may lose its path while the control link works, and no transport notices that
soon. So :meth:`LaneTable.look` fails a lane whose payload does not move. The receiver
knows best: bytes that were announced do not come. The sender fails a lane that still
has the memory of payload which has arrived. Beyond that it waits twice as long, since
the receiver may be slow.

After the end of the control link it no longer matters which chunks have arrived: chunks
and arrivals are then held until their own lane has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvwire.errors import (
    FlowControlViolation,
    MalformedFrame,
    UnexpectedFrame,
    printable,
    sayable,
)
from kvwire.limits import (
    LANE_NUMBER_MAX,
    LANE_PAYLOADS_MAX,
    LANES_MAX,
    STALL_TOLERANCE_S,
)
from kvwire.proto.chunks import Chunk, ChunkMover
from kvwire.proto.events import (
    LaneAsked,
    LaneBootstrapped,
    LaneClosed,
    LaneDataReceived,
    LaneOpened,
    LaneStalled,
    Outbox,
)
from kvwire.proto.liveness import PayloadWatch
from kvwire.proto.records import ChunkArrival
from kvwire.types import Role
from kvwire.wire.control import (
    LaneAck,
    LaneClose,
    LaneData,
    LaneOpen,
    LaneReady,
    encode_body,
)
from kvwire.wire.header import Flag, FrameType, Header

_CHECKED: Final = int(Flag.CHECKED)


class LaneStage(enum.Enum):
    """The stages of a lane, which determine the allowed frames."""

    ASKED = "asked"
    """The client has sent LANE_OPEN; one side is creating its endpoint."""
    ANSWERED = "answered"
    """The server has sent LANE_OPEN: its endpoint receives, the client's does not yet.
    """
    OPEN = "open"
    CLOSING = "closing"
    """The peer's endpoint has ended; this side's ends next."""
    CLOSED = "closed"
    """This side's endpoint has ended, or never existed."""


@dataclass(slots=True, eq=False, kw_only=True)
class LaneRecord:
    """Counts the payloads of one lane, in both directions.

    Attributes:
        number: 1 and up, in the order of LANE_OPEN.
        backend: The name of the transport that carries it.
        sent: The number of payloads announced to the peer.
        waiting: Announced payloads whose memory is still held, by index.
        waiting_bytes: The bytes of the payloads in ``waiting``.
        seen: The number of payloads that the peer has announced.
        arriving: Payloads that this side's endpoint has yet to receive, by index.
        received: The number of payloads that arrived without a gap; ``beyond`` has the
            others.
        acknowledged: The count in the last LANE_ACK.
        missed: Indices that the next LANE_CLOSE will name.
        peer_closed: Whether the peer has sent LANE_CLOSE.
        staged: The payloads of ``arriving`` that the endpoint has received, and that
            are being copied to their places.
        reads: The reads of the peer's windows over this lane that are not over.
        moved_in: The number of payloads and reads that are complete.
        moved_out: The number of payloads that have arrived, or were sent, or are lost.
        received_bytes: The endpoint's count.
        queued_bytes: The endpoint's count.
        comes: Watches payload that arrives.
        goes: Watches payload that leaves.
        stalled: Whether LaneStalled was reported.
    """

    number: int
    backend: str
    stage: LaneStage = LaneStage.ASKED
    sent: int = 0
    waiting: dict[int, Chunk] = field(default_factory=dict)
    waiting_bytes: int = 0
    seen: int = 0
    arriving: dict[int, ChunkArrival] = field(default_factory=dict)
    received: int = 0
    beyond: set[int] = field(default_factory=set)
    acknowledged: int = 0
    missed: list[int] = field(default_factory=list)
    peer_closed: bool = False
    staged: set[int] = field(default_factory=set)
    reads: int = 0
    moved_in: int = 0
    moved_out: int = 0
    received_bytes: int = 0
    queued_bytes: int = 0
    comes: PayloadWatch = field(default_factory=PayloadWatch)
    goes: PayloadWatch = field(default_factory=PayloadWatch)
    stalled: bool = False

    @property
    def over(self) -> bool:
        """Whether no later frame may name this lane."""
        # Missing payloads are named at the end of the step that found them.
        return self.stage is LaneStage.CLOSED and self.peer_closed and not self.waiting


class LaneTable:
    """Holds the lanes of one connection.

    Args:
        patience_s: How long announced payload may wait without moving.
        look_s: The longest time between two calls of :meth:`look`.

    Attributes:
        initial_set_done: Whether the client has opened its initial lanes; more may open
            later.
        unreported: Lanes for which :meth:`acknowledge` has to send a frame.
    """

    def __init__(
        self,
        role: Role,
        outbox: Outbox,
        flows: ChunkMover,
        *,
        patience_s: float,
        look_s: float,
        now: float,
        place: Callable[[Header], ChunkArrival],
        landed: Callable[[ChunkArrival, bool], None],
    ) -> None:
        # `place` returns a chunk's destination and holds it; `landed` handles a chunk
        # that has arrived there, intact or not.
        self.initial_set_done: bool = False
        self._role = role
        self._outbox = outbox
        self._flows = flows
        self._place = place
        self._landed = landed
        self._patience_s = patience_s
        self._look_s = look_s
        self._looked_at = now
        # All lanes that are not over, and some that are.
        self._lanes: dict[int, LaneRecord] = {}
        self._last = 0
        # Lanes with frames to send at the next `acknowledge`; ordered.
        self.unreported: dict[LaneRecord, None] = {}
        self._ended = False

    # --- opening ----------------------------------------------------------------------

    def next_number(self) -> int | None:
        """Return the number of the next lane; None if there are too many."""
        open_ones = sum(not lane.over for lane in self._lanes.values())
        if open_ones >= LANES_MAX or self._last >= LANE_NUMBER_MAX:
            return None
        return self._last + 1

    def backend(self, number: int) -> str:
        """Return the name of the transport that carries a lane."""
        return self._lanes[number].backend

    def open(self, number: int, backend: str, bootstrap: bytes) -> None:
        """Client: send LANE_OPEN with our endpoint's bootstrap."""
        assert self._role is Role.CLIENT
        assert number == self.next_number()
        self._add(number, backend)
        self._send_open(number, backend, bootstrap)

    def answer(self, number: int, bootstrap: bytes) -> None:
        """Server: answer LANE_OPEN; our endpoint has joined and can receive."""
        lane = self._lanes[number]
        if lane.stage is LaneStage.ASKED:
            lane.stage = LaneStage.ANSWERED
            self._send_open(number, lane.backend, bootstrap)

    def ready(self, number: int) -> None:
        """Client: send LANE_READY; our endpoint has joined, so both sides may send."""
        lane = self._lanes[number]
        if lane.stage is LaneStage.ANSWERED:
            lane.stage = LaneStage.OPEN
            self._outbox.send(FrameType.LANE_READY, LaneReady(lane=number))

    def end_initial_set(self) -> None:
        """Client: send LANE_READY for lane 0; data uses the open lanes from now on."""
        self.initial_set_done = True
        self._outbox.send(FrameType.LANE_READY, LaneReady(lane=0))

    def open_received(self, body: LaneOpen) -> None:
        """Handle LANE_OPEN with the bootstrap of the peer's endpoint."""
        if self._role is Role.SERVER:
            number = self.next_number()
            if body.lane != number:
                wanted = f"{LANES_MAX} are not over" if number is None else number
                raise UnexpectedFrame(
                    "KVW-LN-01",
                    f"LANE_OPEN of lane {body.lane}; the next one: {wanted}",
                )
            self._add(body.lane, body.backend)
            self._outbox.report(
                LaneAsked(
                    lane=body.lane, backend=body.backend, bootstrap=body.bootstrap
                )
            )
            return
        lane = self._find(body.lane, "KVW-LN-01")
        if lane.stage is LaneStage.CLOSED:
            return  # our LANE_CLOSE is under way
        if lane.stage is not LaneStage.ASKED or lane.backend != body.backend:
            raise UnexpectedFrame(
                "KVW-LN-01",
                f"LANE_OPEN of lane {body.lane}, which is {lane.stage.value}",
            )
        lane.stage = LaneStage.ANSWERED
        self._outbox.report(LaneBootstrapped(lane=body.lane, bootstrap=body.bootstrap))

    def ready_received(self, body: LaneReady) -> None:
        """Handle LANE_READY: a lane is open; lane 0 means the whole initial set."""
        if self._role is Role.CLIENT or (self.initial_set_done and not body.lane):
            raise UnexpectedFrame("KVW-LN-02", f"LANE_READY of lane {body.lane}")
        if not body.lane:
            self.initial_set_done = True
        else:
            lane = self._find(body.lane, "KVW-LN-02")
            if lane.stage is LaneStage.CLOSED:
                return  # our LANE_CLOSE is under way
            if lane.stage is not LaneStage.ANSWERED:
                raise UnexpectedFrame(
                    "KVW-LN-02", f"LANE_READY of a lane that is {lane.stage.value}"
                )
            lane.stage = LaneStage.OPEN
        self._outbox.report(LaneOpened(lane=body.lane))

    # --- sending ----------------------------------------------------------------------

    def room(self, number: int, window_bytes: int) -> bool:
        """Return whether a lane is open and its window is not full."""
        lane = self._lanes[number]
        return (
            lane.stage is LaneStage.OPEN
            and lane.waiting_bytes < window_bytes
            and lane.sent - next(iter(lane.waiting), lane.sent) < LANE_PAYLOADS_MAX
        )

    def announce(
        self, chunk: Chunk, number: int, descriptor: bytes, check: int | None
    ) -> tuple[bytes, bytes]:
        """Return the LANE_DATA frame of a chunk; send it before any other frame.

        The chunk is held until ``payload_sent`` has been called and its arrival or loss
        is known.
        """
        lane = self._lanes[number]
        assert lane.stage is LaneStage.OPEN
        chunk.lane = number
        chunk.index = lane.sent
        chunk.quiet = False
        chunk.taken = None
        lane.sent += 1
        lane.waiting[chunk.index] = chunk  # bounded: LANE_PAYLOADS_MAX
        lane.waiting_bytes += chunk.length
        request = chunk.request
        segment = chunk.number
        body = LaneData(
            lane=number,
            segment=segment,
            offset=chunk.position,
            nbytes=chunk.length,
            check=check,
            descriptor=descriptor,
        )
        return self._outbox.framing.control(
            FrameType.LANE_DATA, encode_body(body), request=request.wire_id
        )

    def payload_sent(self, chunk: Chunk) -> bool:
        """Record that our endpoint has sent a chunk; return whether its hold ends."""
        lane = self._lanes[chunk.lane]
        chunk.quiet = True
        lane.moved_out += 1
        return self._release(lane, chunk)

    def ack_received(self, body: LaneAck) -> None:
        """Handle LANE_ACK: the first ``count`` payloads of a lane have arrived."""
        lane = self._find(body.lane, "KVW-LN-05")
        arrived = [index for index in lane.waiting if index < body.count]
        if body.count > lane.sent or any(
            lane.waiting[index].taken is False for index in arrived
        ):
            raise UnexpectedFrame(
                "KVW-LN-05", f"LANE_ACK {body.count} of {lane.sent} payloads"
            )
        for index in arrived:
            self._fate_known(lane, index, taken=True)

    # --- receiving --------------------------------------------------------------------

    def data_received(self, header: Header, body: LaneData) -> None:
        """Handle LANE_DATA: find the place of a chunk, and expect it on its lane."""
        lane = self._find(body.lane, "KVW-LN-03")
        # Count every LANE_DATA, even for a lane that was closed here: LANE_CLOSE
        # reports `seen`, so each payload is acknowledged or reported missing exactly
        # once.
        index = lane.seen
        lane.seen += 1
        if lane.stage is LaneStage.CLOSED:
            lane.missed.append(index)  # bounded: LANE_PAYLOADS_MAX
            self.unreported[lane] = None  # bounded: LANES_MAX
        elif lane.stage is not LaneStage.OPEN:
            raise UnexpectedFrame(
                "KVW-LN-03", f"payload for a lane that is {lane.stage.value}"
            )
        if lane.seen - lane.received > LANE_PAYLOADS_MAX:
            raise FlowControlViolation(
                "KVW-LN-04", f"more than {LANE_PAYLOADS_MAX} payloads on a lane at once"
            )
        if lane.stage is LaneStage.CLOSED:
            return
        arrival = self._place(_as_data(header, body))
        arrival.lane = body.lane
        arrival.index = index
        lane.arriving[index] = arrival  # bounded: LANE_PAYLOADS_MAX
        self._outbox.report(
            LaneDataReceived(arrival=arrival, descriptor=body.descriptor)
        )

    def expects(self, arrival: ChunkArrival) -> bool:
        """Return whether an arrival is still expected; if not, it counts as missing."""
        lane = self._lanes.get(arrival.lane)
        return lane is not None and arrival.index in lane.arriving

    def payload_landed(self, arrival: ChunkArrival, *, intact: bool) -> None:
        """Handle a payload that our endpoint has received or dropped."""
        lane = self._lanes[arrival.lane]
        del lane.arriving[arrival.index]
        lane.staged.discard(arrival.index)
        lane.moved_in += 1
        lane.beyond.add(arrival.index)  # bounded: LANE_PAYLOADS_MAX
        while lane.received in lane.beyond:
            lane.beyond.remove(lane.received)
            lane.received += 1
        self.unreported[lane] = None  # bounded: LANES_MAX
        if arrival.buffer is not None:
            self._landed(arrival, intact)

    def payload_staged(self, arrival: ChunkArrival) -> None:
        """Record that our endpoint has received a payload that is not in its place."""
        lane = self._lanes.get(arrival.lane)
        if lane is not None and arrival.index in lane.arriving:
            lane.staged.add(arrival.index)  # bounded: LANE_PAYLOADS_MAX
            lane.moved_in += 1

    def acknowledge(self) -> None:
        """Send LANE_ACK or LANE_CLOSE for each lane with unreported events."""
        for lane in self.unreported:
            if lane.stage is LaneStage.CLOSED:
                self._send_close(lane, "the lane is closed")
            elif lane.received > lane.acknowledged:
                lane.acknowledged = lane.received
                body = LaneAck(lane=lane.number, count=lane.received)
                self._outbox.send(FrameType.LANE_ACK, body)
        self.unreported.clear()

    # --- whether payload moves --------------------------------------------------------

    def note_bytes(self, number: int, received: int, queued: int) -> None:
        """Record the byte counts of our endpoint; call it before :meth:`look`."""
        lane = self._lanes[number]
        lane.received_bytes = received
        lane.queued_bytes = queued

    def read_begun(self, number: int) -> None:
        """Record a read of a window over a lane, which may have ended meanwhile."""
        lane = self._lanes.get(number)
        if lane is not None:
            lane.reads += 1

    def read_over(self, number: int) -> None:
        """Record the end of such a read."""
        lane = self._lanes.get(number)
        if lane is not None:
            lane.reads -= 1
            lane.moved_in += 1

    def look(self, now: float) -> None:
        """Report the lanes whose payload has not moved for too long."""
        late_s = now - self._looked_at - self._look_s
        self._looked_at = now
        for lane in self._lanes.values():
            if late_s > STALL_TOLERANCE_S:
                # This side moved nothing, and may not have noticed an arrival yet.
                lane.comes.forgive(late_s)
                lane.goes.forgive(late_s)
            if lane.stage is LaneStage.OPEN and not lane.stalled:
                self._look_at(lane, now)

    def _look_at(self, lane: LaneRecord, now: float) -> None:
        moved = lane.moved_in, lane.received_bytes
        waits = lane.reads > 0 or len(lane.arriving) > len(lane.staged)
        still_s = lane.comes.still_s(now, moved, waits=waits)
        what = "arrived"
        patience_s = self._patience_s
        if still_s < patience_s:
            moved = lane.moved_out, lane.queued_bytes
            still_s = lane.goes.still_s(now, moved, waits=bool(lane.waiting))
            what = "left"
            if any(chunk.taken is None for chunk in lane.waiting.values()):
                patience_s *= 2
        if still_s >= patience_s:
            lane.stalled = True
            reason = (
                f"its path is lost: nothing has {what} for {still_s:.1f} s, although "
                "the peer answers on the control link"
            )
            self._outbox.report(LaneStalled(lane=lane.number, reason=reason))

    # --- closing ----------------------------------------------------------------------

    def close(self, number: int, reason: str) -> None:
        """Send LANE_CLOSE, because our endpoint has ended and touches no memory."""
        lane = self._lanes[number]
        if lane.stage is LaneStage.CLOSED:
            return
        lane.stage = LaneStage.CLOSED
        for index, arrival in lane.arriving.items():
            lane.missed.append(index)  # bounded: LANE_PAYLOADS_MAX
            if arrival.buffer is not None:
                self._flows.missed(arrival)
        lane.arriving.clear()
        lane.staged.clear()
        self._send_close(lane, reason)
        for chunk in list(lane.waiting.values()):
            chunk.quiet = True
            self._release(lane, chunk)

    def close_received(self, body: LaneClose) -> None:
        """Handle LANE_CLOSE: the peer's endpoint has ended, with payloads missing."""
        lane = self._find(body.lane, "KVW-LN-06")
        # Before: it is unknown whether some payloads in `waiting` arrived. After: it is
        # known for all payloads that the peer has seen, and the missing ones are sent
        # again on another path. The peer's next LANE_CLOSE names those that it has not
        # seen yet.
        missed = frozenset(body.missed)
        open_fates = {i for i, c in lane.waiting.items() if c.taken is None}
        if body.seen > lane.sent or not all(
            index < body.seen and index in open_fates for index in missed
        ):
            raise MalformedFrame(
                "KVW-LN-06",
                f"LANE_CLOSE of lane {body.lane}: {body.seen} seen of {lane.sent}, "
                f"missed {sorted(missed)[:5]} of those under way",
            )
        lane.peer_closed = True
        for index in sorted(i for i in open_fates if i < body.seen):
            self._fate_known(lane, index, taken=index not in missed)
        if lane.stage not in (LaneStage.CLOSING, LaneStage.CLOSED):
            lane.stage = LaneStage.CLOSING
            reason = printable(body.reason)
            self._outbox.report(LaneClosed(lane=body.lane, reason=reason))

    def link_gone(self) -> None:
        """Drop closed lanes' holds, because the control link has ended."""
        self._ended = True
        for lane in self._lanes.values():
            for chunk in list(lane.waiting.values()):
                self._release(lane, chunk)

    # --- inside -----------------------------------------------------------------------

    def _add(self, number: int, backend: str) -> None:
        self._lanes = {n: lane for n, lane in self._lanes.items() if not lane.over}
        # bounded: LANES_MAX
        self._lanes[number] = LaneRecord(number=number, backend=backend)
        self._last = number

    def _find(self, number: int, rule: str) -> LaneRecord:
        """Return the lane that a peer's frame names."""
        if number > self._last:
            raise UnexpectedFrame(rule, f"lane {number} was never opened")
        lane = self._lanes.get(number)
        if lane is None or lane.over:
            raise UnexpectedFrame("KVW-LN-08", f"lane {number} is over")
        return lane

    def _fate_known(self, lane: LaneRecord, index: int, *, taken: bool) -> None:
        chunk = lane.waiting[index]
        chunk.taken = taken
        lane.moved_out += 1
        self._release(lane, chunk)

    def _release(self, lane: LaneRecord, chunk: Chunk) -> bool:
        """Drop a chunk's hold once nothing needs it, or send the chunk again.

        Before: the chunk is in ``lane.waiting`` and held. If this returns True it is
        out of ``waiting``, and its hold was dropped or passed on to its next sending.
        """
        if not chunk.quiet or (chunk.taken is None and not self._ended):
            return False
        del lane.waiting[chunk.index]
        lane.waiting_bytes -= chunk.length
        if chunk.taken is False and not self._ended:
            self._flows.chunk_missed(chunk)
        else:
            self._flows.chunk_sent(chunk)
        return True

    def _send_open(self, number: int, backend: str, bootstrap: bytes) -> None:
        body = LaneOpen(lane=number, backend=backend, bootstrap=bootstrap)
        self._outbox.send(FrameType.LANE_OPEN, body)

    def _send_close(self, lane: LaneRecord, reason: str) -> None:
        missed = tuple(lane.missed)
        lane.missed = []
        body = LaneClose(
            lane=lane.number,
            reason=sayable(reason),
            seen=lane.seen,
            missed=missed,
        )
        self._outbox.send(FrameType.LANE_CLOSE, body)


def _as_data(header: Header, body: LaneData) -> Header:
    """Return the header that the chunk would have on the control link.

    Its type stays LANE_DATA, since a lane's payload may consist of several chunks.
    """
    return Header(
        type=FrameType.LANE_DATA,
        flags=0 if body.check is None else _CHECKED,
        sequence=header.sequence,
        length=body.nbytes,
        request=header.request,
        segment=body.segment,
        offset=body.offset,
        payload_check=body.check or 0,
        header_check=0,
    )
