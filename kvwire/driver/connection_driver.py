"""The driver of a connection, which joins one link to one protocol core.

At every input (a frame arrives, the link has room, a timer fires, the application
calls), the driver passes it to the core, and then :meth:`ConnectionDriver.run` does
what the core requests: control frames are queued, events dispatched, and then chunks
sent while the link has room. Frames and the first chunks are flushed together, in one
system call.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from kvwire.backend import Landing, Link, LinkHandler, Payload
from kvwire.driver.checksums import (
    ChecksumPolicy,
    ScratchPool,
    arrived,
    landing_for,
    matches,
)
from kvwire.driver.device_staging import DeviceStaging
from kvwire.driver.lanes.active_transport import ActiveTransport
from kvwire.driver.lanes.scheduler import LaneScheduler
from kvwire.driver.lanes.setup import LaneSetup
from kvwire.driver.lanes.state import LaneEndpoint, LaneSet
from kvwire.driver.services import Services
from kvwire.driver.unreceived_log import Seen, overdue
from kvwire.errors import (
    ConnectionClosed,
    ConnectionLost,
    ProtocolError,
)
from kvwire.kv.fragments import Fragments
from kvwire.limits import (
    CONTROL_QUEUE_BYTES_MAX,
    KIB,
    LINK_QUEUE_BYTES,
    SMALL_SEGMENT_BYTES,
    WAITING_LOG_S,
    WAKEUP_BYTES,
)
from kvwire.memory.buffers import mid_page_memory, uncleared
from kvwire.memory.checksum import LOW_32_BITS, view_digest
from kvwire.memory.copy import copy
from kvwire.proto.chunks import Chunk
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import (
    Ended,
    Event,
    LaneAsked,
    LaneBootstrapped,
    LaneClosed,
    LaneDataReceived,
    LaneOpened,
    LaneStalled,
)
from kvwire.proto.records import (
    Box,
    ChunkArrival,
    ChunkPlace,
    RequestRecord,
    SegmentRecord,
    TransferRecord,
)
from kvwire.proto.transfers import Transfers
from kvwire.types import BufferId, PeerInfo, RequestId
from kvwire.wire.header import Flag

logger: logging.Logger = logging.getLogger("kvwire.connections")

# Payload up to this size (some 50 us) is sent before tasks that an event has woken run.
# More payload waits for these tasks.
_WOKEN_BYTES: Final = 256 * KIB
# The most bytes of a message's memory that are cleared first: for these, another call
# takes longer.
_CLEARED_BYTES_MAX: Final = 4 * KIB
# What a link cannot send at once of a frame up to this size, it copies: a larger one
# stays in its own memory.
_COPIED_BYTES_MAX: Final = 72 * KIB
# Behind more frames than this, a part of a transfer is not copied but queued.
_FRAMES_MAX: Final = 8
# How many events in one turn of the loop make payload queue up again. More events, or a
# task that causes one in each turn, cannot keep payload from being sent.
_PUT_OFF_MAX: Final = 64


EventActs: TypeAlias = "Mapping[type[Event], Callable[[Any], object]]"
"""The function that acts on an event, by the event's type."""

_BUFFER: Final = ChunkPlace.BUFFER
_CONTROL: Final = ChunkPlace.CONTROL
_HOLD: Final = ChunkPlace.HOLD
_MARKED: Final = ChunkPlace.MARKED
_NOWHERE: Final = ChunkPlace.NOWHERE
_CHECKED: Final = int(Flag.CHECKED)
_WHOLE: Final = ChunkPlace.WHOLE
_new: Final = object.__new__


class TransferPart(Protocol):
    """The part of a transfer that runs on a connection, as the driver sees it.

    Attributes:
        core: Its request on the connection.
    """

    core: RequestRecord | None


class _Landing(Landing):
    """A landing that knows its ``place``.

    It is created without an ``__init__``, since there is one for each frame.
    """

    __slots__ = ("arrival", "place")

    arrival: ChunkArrival
    place: Payload | None


class _Anywhere(_Landing):
    """A landing for which the link has memory."""

    __slots__ = ()

    anywhere = True


class ConnectionDriver(LinkHandler):
    """Runs the link and the lanes of one connection, after its handshake.

    Attributes:
        core: Decides which frames are sent, and interprets the received ones.
        peer: The other side.
        services: The services that the communicator's parts share.
        front: The :class:`~kvwire.Connection` that users hold.
        transfers: The core's part for KV transfers.
        chunk_bytes: The size of incoming chunks.
        staging: The chunks in pinned memory, on their way to or from a device.
        held: Messages that no receive has taken yet, by the core's buffer numbers.
        running: Whether the core is being drained, and events are dispatched.
        ended: Set when the link and its lanes have closed: nothing touches memory any
            more.
    """

    def __init__(
        self,
        link: Link,
        core: ConnectionCore,
        services: Services,
        lanes: LaneSet,
        peer: PeerInfo,
    ) -> None:
        loop = services.loop
        self.link = link
        self.core = core
        self.services = services
        self.peer = peer
        self.front: Any = None
        self.transfers: Transfers = core.transfers
        self.chunk_bytes: int = core.agreement.parameters.chunk_bytes
        # bounded: EAGER_WINDOW_BYTES, by the credit that the core gives
        self.held: dict[BufferId, memoryview] = {}
        self.ended: asyncio.Future[None] = loop.create_future()
        self._outbox = core.outbox
        self._chunks = core.chunks
        self._buffers = services.buffers
        self._drained = services.buffers.holds.drained
        self._loop = loop
        self._made_at = loop.time()
        self._checks = ChecksumPolicy(services.config.checksum)
        self._copies = ScratchPool()
        self._unreceived: Seen = {}
        self._timer: asyncio.TimerHandle | None = None
        # Of the timer, which is set again and again, by whichever call is the last one.
        self._context = contextvars.Context()
        self._timer_at = 0.0
        # The bytes received by the last tick, and when they were first noticed.
        self._seen_bytes = 0
        self._seen_at = loop.time()
        # The last chunk is queued as soon as there is room for one of its bytes.
        payload_bytes = LINK_QUEUE_BYTES + core.agreement.parameters.chunk_bytes
        self._unsent_bytes_max = payload_bytes + CONTROL_QUEUE_BYTES_MAX
        self.running: bool = False
        self._closed = False
        # Sends payload in a separate turn of the loop; no payload is sent before it.
        self._again: asyncio.Handle | None = None
        self._times_put_off = 0
        # The paths of payload: staging for device memory, and lanes.
        self.lanes = lanes
        self.staging: DeviceStaging = DeviceStaging(self)
        self.transfers.only_link = lanes.possible == (lanes.scheme,)
        self.active: ActiveTransport = ActiveTransport(lanes, peer, services.counters)
        self._scheduler = LaneScheduler(self, self.staging, self._checks)
        self.lane_setup: LaneSetup = LaneSetup(self, self.active, self._scheduler)
        # Handlers for events of the link and its lanes; all others go to the front.
        self._acts: EventActs = {
            LaneDataReceived: self._receive_on_lane,
            LaneAsked: self.lane_setup.asked,
            LaneBootstrapped: self.lane_setup.bootstrapped,
            LaneOpened: self.lane_setup.opened,
            LaneClosed: self._lane_closed,
            LaneStalled: self._scheduler.stalled,
        }
        self.set_timer()

    def serve(self, front: object, acts: EventActs) -> None:
        """Dispatch the core's events to the user's object from now on.

        Args:
            front: The user's object.
            acts: The handlers, by type, of all events that are not about lanes.
        """
        self.front = front
        self._ended_act = acts[Ended]
        self._acts = {**acts, **self._acts, Ended: self._end_link}

    @property
    def age_s(self) -> float:
        """Return the seconds since the handshake."""
        return self._loop.time() - self._made_at

    @property
    def silent_s(self) -> float:
        """Return the seconds since the peer last sent anything."""
        return max(0.0, self.core.liveness.silence_s(self._loop.time()))

    def start_transfer(
        self,
        leg: TransferPart,
        *,
        key: bytes,
        priority: int,
        description: bytes,
        pull: bool,
    ) -> None:
        """Request a transfer from the peer; `leg` gets the core's request.

        Raises:
            ConnectionClosed: The connection is closing or closed.
            UsageError: The peer has too many transfers to answer already.
        """
        transfer = TransferRecord(id=key, priority=priority)
        leg.core = self.core.open_transfer(
            transfer, description, pull=pull, deadline=None
        )
        leg.core.context = leg
        self.run()

    def send_segment(
        self,
        request: RequestRecord,
        box: Box,
        memory: Payload,
        nbytes: int,
        commit: int = 0,
    ) -> SegmentRecord:
        """Send a part of a transfer at once, or queue it for :meth:`run` to send.

        It is sent at once if no frame goes before it. Then the link has taken it when
        this returns, and its memory need not be kept. A copy of a small part is sent
        behind the frames that are due, such as the transfer's own AGREE; then the
        caller has to call :meth:`run`.

        Args:
            request: The transfer.
            box: The part's box.
            memory: The part's memory, which is lent until the link has sent it.
            nbytes: The part's bytes.
            commit: Above 0, this is the last part; see SEGMENT.
        """
        transfers = self.transfers
        segment = transfers.mark(request, box, nbytes, commit)
        if (
            segment.unsent_mark is None
            or self._chunks.busy
            or not (transfers.only_link or self._link_carries)
        ):
            transfers.queue(segment, self._buffers.lend(memory))
            return segment
        if self.running or self._outbox.frames:
            self._send_behind(segment, memory)
            return segment
        copies = self._copies
        payload, check = self._checks.seal(memory, copies, segment)
        chunk, header = transfers.leave(segment, check)
        if self.link.send_now(header, payload, chunk):
            if copies.lent_bytes:
                copies.give_back(segment)
            if commit:
                transfers.settle(request)
        else:
            if copies.lent_bytes:
                copies.pass_on(segment, chunk)
            transfers.keep(chunk, self._buffers.lend(memory))
            self.link.flush()
        return segment

    def _send_behind(self, segment: SegmentRecord, memory: Payload) -> None:
        """Send a newly marked segment behind the frames that are due."""
        transfers = self.transfers
        frames = self._outbox.frames
        nbytes = memory.nbytes
        if (
            nbytes > SMALL_SEGMENT_BYTES
            or len(frames) >= _FRAMES_MAX
            or self.link.queued_bytes >= SMALL_SEGMENT_BYTES
            or (isinstance(memory, Fragments) and memory.device is not None)
        ):
            transfers.queue(segment, self._buffers.lend(memory))
            return
        # Its memory is not touched again, so nothing holds it.
        data = mid_page_memory(nbytes).data
        copy(memory, data)
        check = self._checks.seal(data, self._copies, None)[1]
        header = transfers.leave(segment, check)[1]
        frames.append((header, data))  # bounded: _FRAMES_MAX
        if segment.commit:
            transfers.settle(segment.request)

    @property
    def _link_carries(self) -> bool:
        """Whether the control link carries payload now, beside possible lanes."""
        return self.lanes.fallback and not self.lanes.open

    def answer_get(self, wire_id: RequestId, data: memoryview) -> None:
        """Send all bytes of a small get from a window, in one frame.

        It is sent at once, or behind frames or bytes that wait to be sent.
        """
        outbox = self._outbox
        if outbox.shut:
            return
        check = self._checks.seal(data, self._copies, None)[1]
        header = self.core.windows.data_frame(wire_id, data.nbytes, check)
        if outbox.frames or self.link.queued_bytes:
            frame = (header, data)
            outbox.frames.append(frame)  # bounded: CONTROL_QUEUE_BYTES_MAX
        else:
            token = data if data.nbytes > _COPIED_BYTES_MAX else None
            if not self.link.send_now(header, data, token):
                self.link.flush()

    # --- the link ---------------------------------------------------------------------

    def header_received(self, link: Link, header: memoryview) -> Landing:
        try:
            arrival = self.core.header_received(header)
            if arrival.place is _MARKED:
                for event in self._outbox.events[:]:
                    del self._outbox.events[0]
                    self._acts[type(event)](event)  # the front gives it memory
                arrival = self.core.transfers.marked_place(arrival)
        except ProtocolError as exc:
            self._broken(exc)
            return Landing(0, None)
        length = arrival.header.length
        buffer = arrival.buffer
        landing = _new(_Landing)
        landing.length = length
        landing.arrival = arrival
        place: Payload | None = None
        if arrival.place is _BUFFER:
            assert buffer is not None
            place = self._buffers.part(buffer, arrival.offset, length)
            if isinstance(place, Fragments):
                place = self._destination(arrival, place)
                landing.place = place
                landing.payload = landing_for(
                    place, arrival.header, self._copies, arrival
                )
                return landing
        elif arrival.place is not _NOWHERE:
            # Clearing much memory would only drive other things out of the cache.
            much = length > _CLEARED_BYTES_MAX
            if much and arrival.place is _WHOLE:
                if link.brings_memory:
                    landing = _new(_Anywhere)
                    landing.length = length
                    landing.arrival = arrival
                else:
                    place = mid_page_memory(length).data
                landing.place = landing.payload = place
                return landing
            place = memoryview(uncleared(length) if much else bytearray(length))
        landing.place = landing.payload = place
        return landing

    def body_received(self, link: Link, landing: Landing) -> None:
        assert isinstance(landing, _Landing)
        core = self.core
        arrival = landing.arrival
        payload = landing.payload
        self._seen_at = now = self._loop.time()
        try:
            if arrival.place is _CONTROL:
                assert isinstance(payload, memoryview)
                core.body_received(arrival, now, body=bytes(payload))
            else:
                header = arrival.header
                if type(payload) is memoryview and (
                    payload is landing.place or landing.anywhere
                ):
                    # Inlined from `matches`: the fast path of nearly all payloads.
                    check = view_digest(payload) if header.flags & _CHECKED else None
                    intact = (
                        check is None or check & LOW_32_BITS == header.payload_check
                    )
                elif payload is landing.place:
                    intact = matches(payload, header)
                else:
                    intact = arrived(payload, landing.place, header)
                    self._copies.give_back(arrival)
                if arrival.place is _HOLD and intact:
                    assert arrival.buffer is not None
                    assert isinstance(payload, memoryview)
                    self.held[arrival.buffer] = payload
                staging = self.staging
                if staging.landing and staging.landed(
                    arrival, self._in_place, intact=intact
                ):
                    return
                if arrival.place is _WHOLE:
                    assert isinstance(payload, memoryview)
                    core.body_received(arrival, now, body=payload, intact=intact)
                else:
                    core.body_received(arrival, now, intact=intact)
        except ProtocolError as exc:
            self._broken(exc)
            return
        self.run(woken=arrival.place is _WHOLE)  # perhaps a layer's readers

    def frame_sent(self, link: Link, token: object) -> None:
        if not isinstance(token, Chunk):
            return  # the token of a small get's bytes, which are not used again
        if self.staging.leaving:
            self.staging.sent(token)
        if self._copies.lent_bytes:
            self._copies.give_back(token)
        self.core.chunk_sent(token)
        if not self.running:
            self.run()

    def link_writable(self, link: Link) -> None:
        self.run()

    def link_closed(self, link: Link, error: Exception | None) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._again is not None:
            self._again.cancel()
        self._scheduler.end()
        self.staging.link_gone()
        self.core.link_lost(_as_closed(error))
        self.run()
        self.lane_setup.cancel()
        self.check_ended()

    # --- draining the core ------------------------------------------------------------

    def run(self, *, its_turn: bool = False, woken: bool = False) -> None:
        """Do everything that the core requests now.

        Queue frames, dispatch events, then send payload, until nothing is left. Frames
        go before each event, since an event may be the end of the link.

        An event wakes its waiter in the next turn of the loop. Sending much payload
        would delay that waiter until the link has taken megabytes, so it is deferred to
        a separate turn behind the waiter. ``its_turn`` marks this separate turn, in
        which the payload is not deferred again, whatever else happens. ``woken``: a
        waiter was woken already.
        """
        if self.running:
            return  # called from inside a run, which continues until nothing is left
        core = self.core
        scheduler = self._scheduler
        acts = self._acts
        frames = self._outbox.frames
        events = self._outbox.events
        queued = False
        self.running = True
        try:
            while True:
                while frames:
                    header, body = frames.popleft()
                    # Without a token, a link copies the bytes that it could not send.
                    token = body if len(body) > _COPIED_BYTES_MAX else None
                    self.link.send(header, memoryview(body), token)
                    queued = True
                if events:
                    # Removed before its handler runs, so that a bug in the handler does
                    # not lose the other events; each is the only report about a request
                    # or memory. The bug ends the link, which causes another run.
                    event = events.pop(0)
                    acts[type(event)](event)
                    woken = woken or type(event) is not LaneDataReceived
                    continue
                if queued or self._chunks.sending or self.staging.ready:
                    self._send(core, put_off=woken and not its_turn)
                    queued = False
                if scheduler.dirty:
                    scheduler.flush()
                elif not (frames or events):
                    break
        finally:
            self.running = False
        speak_by = core.speak_by
        if speak_by is not None and speak_by < self._timer_at and self._timer:
            self.set_timer()
        if self._drained:
            self._buffers.collect()

    def set_timer(self) -> None:
        """Set the timer to the time that the core asks for."""
        at = self.core.next_tick
        if self._timer is not None:
            if at >= self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(
            at, self._safely, self._tick, context=self._context
        )

    def _send(self, core: ConnectionCore, *, put_off: bool) -> None:
        """Flush frames, and send chunks until the link is full or other tasks must run.

        It stops when a callback within a flush leaves the core with events, or with
        frames, which are numbered before the next chunk. With ``put_off``, payload
        beyond ``_WOKEN_BYTES`` waits for a separate turn.
        """
        link = self.link
        outbox = core.outbox
        moved_bytes = 0
        while True:
            queued_bytes = 0
            if self._chunks.sending or self.staging.ready:
                if put_off and self._is_much(core, moved_bytes):
                    self._put_off()
                if self._again is None:
                    queued_bytes = self._queue_chunks(core, one=put_off)
            link.flush()
            moved_bytes += queued_bytes
            unsent_bytes = link.queued_bytes
            if not queued_bytes or outbox.frames or outbox.events or unsent_bytes:
                break
            if not (self._chunks.sending or self.staging.ready):
                break
            if moved_bytes >= WAKEUP_BYTES:
                if not self._scheduler.full:  # else a lane calls when it has room
                    self._run_again()
                break
        if unsent_bytes > self._unsent_bytes_max:
            lost = f"the peer does not read: {unsent_bytes} bytes are queued"
            core.fail(ConnectionLost(lost))

    def _run_again(self) -> None:
        """Schedule the rest of the payload for a later turn of the loop."""
        if self._again is None:
            self._again = self._loop.call_soon(self._safely, self._next_run)

    def _put_off(self) -> None:
        """Reschedule the next turn after the waiters that were just woken."""
        if self._again is not None and self._times_put_off < _PUT_OFF_MAX:
            self._times_put_off += 1
            self._again.cancel()
            self._again = None
        self._run_again()

    def _next_run(self) -> None:
        self._again = None
        self._times_put_off = 0
        self.run(its_turn=True)

    def _is_much(self, core: ConnectionCore, moved_bytes: int) -> bool:
        """Return whether to let woken waiters run before sending the next payload."""
        ready = self.staging.ready
        if self._again is not None:
            return True
        due_bytes = ready[0].length if ready else core.due_bytes
        return due_bytes + moved_bytes > _WOKEN_BYTES

    def _queue_chunks(self, core: ConnectionCore, *, one: bool) -> int:
        """Queue chunks, or only one, while there is room; return the bytes queued.

        At most one wake-up's bytes are queued, since a lane may copy them.
        """
        link = self.link
        queued_bytes = 0
        lanes = self.lanes
        scheduler = self._scheduler
        ready = self.staging.ready
        while link.queued_bytes < LINK_QUEUE_BYTES and queued_bytes < WAKEUP_BYTES:
            if (lanes.open or not lanes.fallback) and scheduler.full:
                break
            if not ready and self.staging.waiting is not None:
                break
            endpoint = scheduler.pick(link.queued_bytes) if lanes.open else None
            if ready:
                chunk: Chunk | None = ready.popleft()
            elif endpoint is not None and endpoint.lane.span_bytes:
                span = partial(scheduler.span, endpoint)
                chunk = core.next_chunk(span, endpoint.lane.bytes_min)
            else:
                chunk = core.next_chunk()
            if chunk is None:
                break
            queued_bytes += self._send_chunk(core, chunk, endpoint)
            if one or not (ready or self._chunks.sending):
                break
        return queued_bytes

    def _send_chunk(
        self, core: ConnectionCore, chunk: Chunk, endpoint: LaneEndpoint | None
    ) -> int:
        """Hand a chunk to link, lane or staging; return the bytes handed over."""
        slot = self.staging.leaving.get(chunk)
        if slot is not None:
            payload: Payload = slot.view
        else:
            payload = self._buffers.part(chunk.buffer, chunk.offset, chunk.length)
        if (
            endpoint is not None
            and not chunk.carries_mark
            and self._scheduler.carries(endpoint, payload)
        ):
            header, body = self._scheduler.send(endpoint, chunk, payload)
            self.link.send(header, memoryview(body))
        elif isinstance(payload, Fragments) and payload.device is not None:
            self.staging.stage(chunk, payload)
            return 0
        else:
            payload, check = self._checks.seal(payload, self._copies, chunk)
            self.link.send(core.chunk_header(chunk, check), payload, chunk)
        return chunk.length

    def _destination(self, arrival: ChunkArrival, part: Payload) -> Payload:
        """Return the first destination of a payload for a part of a buffer."""
        if not isinstance(part, Fragments) or part.device is None:
            return part
        if arrival.lane and self._scheduler.takes(arrival.lane, part.device.kind):
            return part
        return self.staging.land(arrival, part)

    def _in_place(self, arrival: ChunkArrival) -> None:
        """Report to the core that a staged payload is in its place."""
        if self._closed:
            return
        try:
            self.core.body_received(arrival, self._loop.time())
        except ProtocolError as exc:
            self._broken(exc)

    def _receive_on_lane(self, event: LaneDataReceived) -> None:
        arrival = event.arrival
        if not self.core.lanes.expects(arrival):
            return  # its lane has ended meanwhile, and so has the hold on its memory
        payload: Payload | None = None
        if arrival.buffer is not None:
            length = arrival.header.length
            payload = self._buffers.part(arrival.buffer, arrival.offset, length)
            payload = self._destination(arrival, payload)
        try:
            self._scheduler.receive(event, payload)
        except ProtocolError as exc:
            self._broken(exc)

    def check_ended(self) -> None:
        """End the connection once link, lanes and staging no longer touch memory."""
        if not self._closed or self.ended.done():
            return
        if not self.lane_setup.busy and self.lanes.quiet and self.staging.quiet:
            self.ended.set_result(None)

    def lane_broke(self, endpoint: LaneEndpoint) -> None:
        """Log a broken lane, and open another in its place."""
        self.active.lane_broke(endpoint)
        self.lane_setup.reopen_lost()

    def _lane_closed(self, event: LaneClosed) -> None:
        self.lane_setup.peer_closed(event)
        self._scheduler.peer_closed(event)

    def _end_link(self, event: Ended) -> None:
        self.link.flush()  # the last frames
        self._scheduler.end(graceful=event.graceful)
        if event.graceful:
            self.link.close()
        else:
            self.link.abort()
        self._ended_act(event)

    def _tick(self) -> None:
        self._timer = None
        core = self.core
        now = self._loop.time()
        if self.staging.paused:
            # This side does not read, so the silence is not the peer's.
            core.liveness.note_received(now)
        elif self.link.received_bytes != self._seen_bytes:
            # Part of a frame arrived at some time since: assume the earliest, or a peer
            # that dies in the middle of a frame would be detected an interval too late.
            core.liveness.note_received(self._seen_at)
            self._seen_bytes = self.link.received_bytes
            self._seen_at = now
        self._copies.trim()
        for tag in overdue(self._unreceived, core.messages.oldest, now):
            logger.warning(
                "peer %s: no receive is posted for a message with tag %d that "
                "arrived more than %g s ago; discard(tag) drops unwanted messages",
                core.agreement.peer,
                tag,
                WAITING_LOG_S,
            )
        self._scheduler.note_bytes()
        core.tick(now)
        self.run()
        if core.error is None:
            self.set_timer()

    def _broken(self, error: ProtocolError) -> None:
        logger.warning("peer %s: %s", self.core.agreement.peer, error)
        self.core.fail(error)
        self.run()
        # Even if the connection has ended already, and only its link was closing.
        self.link.abort()

    def _safely(self, step: Callable[[], None]) -> None:
        """Run a step of the loop; a bug in it ends this connection only."""
        try:
            step()
        except Exception:
            logger.exception("a bug of kvwire; its connection is aborted")
            self.link.abort()


def _as_closed(error: Exception | None) -> ConnectionClosed | None:
    if error is None or isinstance(error, ConnectionClosed):
        return error
    lost = ConnectionLost(str(error))
    lost.__cause__ = error
    return lost
