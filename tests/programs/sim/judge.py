"""Whether what the core does and says is true, of KV transfers and of errors too.

The applications record what they mean (:mod:`tests.programs.sim.ask`); here it is
compared with where bytes go, what completions say, and why connections end.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvwire.errors import (
    AccessDenied,
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    DeadlineExceeded,
    IntegrityError,
    KVWireError,
    MessageTooLarge,
    PeerCancelled,
    PeerError,
    PeerUnresponsive,
    RequestCancelled,
    StaleRegion,
    UsageError,
)
from kvwire.limits import STALL_TOLERANCE_S
from kvwire.proto.chunks import Chunk
from kvwire.proto.events import Ended, MemoryWanted, MessageArrived, RequestDone
from kvwire.proto.records import ChunkArrival, ChunkPlace, RequestRecord, SegmentRecord
from kvwire.proto.state import RequestKind
from kvwire_certify.oracle import Wrong
from tests.programs.sim import inside
from tests.programs.sim.ask import Ask, Mailbox, Message, Part
from tests.programs.sim.endpoint import Endpoint
from tests.programs.sim.judge_windows import (
    WindowJudge,
    has_no_window,
    refused,
)
from tests.programs.sim.memory import content, demand
from tests.programs.sim.net import Frame

if TYPE_CHECKING:
    from tests.programs.sim.world import World

# What a peer is told about a grant that is not its own, whatever is wrong with it.
_NO_GRANT: Final = "no such grant on this connection"
# What is said of a close that has taken too long.
_TOO_LATE: Final = "did not finish closing in time"
_SAME_ANSWER: Final = frozenset({"wrong token", "foreign", "unknown"})


class Truth:
    """Compares what errors say with what has happened."""

    def __init__(self, world: World) -> None:
        setup = world.plan.setup
        self._world = world
        self._setup = setup
        self._patience_s = setup.ping_interval_s * setup.ping_misses
        self._claims: dict[type[KVWireError], Callable[[Ask], bool]] = {
            RequestCancelled: lambda ask: ask.cancelled,
            DeadlineExceeded: self._expired,
            PeerCancelled: self._peer_cancelled,
            AccessDenied: _has_no_right,
            PeerError: lambda ask: ask.blind and refused(ask),
            StaleRegion: _is_stale,
            IntegrityError: self._damaged,
            MessageTooLarge: _is_too_large,
            ClosedOK: lambda ask: _closed(ask.endpoint) and not _is_delivered(ask),
            ConnectionLost: lambda ask: _closed(ask.endpoint),
            PeerUnresponsive: lambda ask: _closed(ask.endpoint),
        }

    # --- requests ---------------------------------------------------------------------

    def error(self, ask: Ask, error: KVWireError) -> None:
        """A request has failed: for the reason it gives?"""
        claim = self._claims.get(type(error))
        if claim is None or not claim(ask):
            raise Wrong("untrue", f"{ask} failed with {error!r}, which is not so")
        if _TOO_LATE in str(error) and _is_delivered(ask):
            self._check_hindered(ask)
        if isinstance(error, AccessDenied) and ask.aim is not None:
            demand(
                _NO_GRANT in str(error) or ask.aim.wrong not in _SAME_ANSWER,
                "oracle",
                f"the answer to a {ask.aim.wrong} grant tells more: {error}",
            )

    def refused(self, ask: Ask, error: ConnectionClosed | UsageError) -> None:
        """The core would not start a request: is there a reason?"""
        if isinstance(error, UsageError):
            small = self._setup.small_tables
            demand(small, "limit", f"no room for a {ask.kind.value}: {error}")
        else:
            self.refused_as_closed(ask.endpoint)

    def refused_as_closed(self, endpoint: Endpoint) -> None:
        """The core says that the connection is closed, or closing."""
        demand(_closed(endpoint), "untrue", "refused as closed, which it is not")

    def no_deadline_passed(self, endpoint: Endpoint, now: float) -> None:
        """After a tick nothing is open whose deadline has passed."""
        for ask in endpoint.open:
            demand(
                ask.deadline is None or ask.deadline > now,
                "deadline",
                "a request is open after its deadline",
            )

    def _check_hindered(self, ask: Ask) -> None:
        """Puts and gets need no application: a close waits for them, and they move."""
        setup, wire = self._setup, ask.endpoint.end.out.wire
        slow = setup.stuck or setup.late or setup.gap or setup.bytes_per_s
        slow = slow or self._world.fate.loses
        trips = setup.close_timeout_s / setup.latency_s[1]
        demand(
            slow or trips < 40 or not wire.healthy,
            "stuck",
            f"{ask} was not over when a close of {setup.close_timeout_s:g} s was",
        )

    def _expired(self, ask: Ask) -> bool:
        now = ask.endpoint.node.clock
        mine = ask.deadline is not None and ask.deadline <= now
        # Or the peer has given up its side of it.
        return mine or self._setup.deadlines > 0

    def _peer_cancelled(self, ask: Ask) -> bool:
        peer = ask.endpoint.peer
        return peer is None or peer.node.app.cancels > 0

    def _damaged(self, ask: Ask) -> bool:
        end = ask.endpoint.end
        if ask.kind is RequestKind.READ:
            return False  # it leaves the damaged blocks to its reader
        return self._setup.checked and (end.into.damaged or end.out.damaged)

    # --- connections ------------------------------------------------------------------

    def ends(self, endpoint: Endpoint, event: Ended) -> None:
        """A connection is over: only once, and for the reason it gives?"""
        error = event.error
        self._world.note(endpoint.name, "ended", repr(error))
        demand(endpoint.ended is None, "closed", "a connection ended twice")
        if isinstance(error, ClosedOK):
            demand(_is_closing(endpoint), "untrue", "closed on purpose, by nobody")
        elif isinstance(error, PeerUnresponsive):
            self._check_silence(endpoint)
        else:
            demand(isinstance(error, ConnectionLost), "untrue", repr(error))
            if isinstance(error.__cause__, PeerUnresponsive):
                peer = endpoint.peer
                said = peer is not None and isinstance(
                    peer.core.error, PeerUnresponsive
                )
                demand(said, "untrue", f"{error!r}, which it does not say")

    def no_silence(self, endpoint: Endpoint) -> None:
        """After a tick nobody has been silent for longer than is borne."""
        if endpoint.node.was_late:
            return  # its own lateness is forgiven to its peer
        silence_s = self._world.now - endpoint.end.into.last_arrival()
        longest_s = self._patience_s + self._setup.ping_interval_s
        demand(
            silence_s < longest_s + STALL_TOLERANCE_S,
            "detection",
            f"{endpoint.name} has not noticed a silence of {silence_s:.3f} s",
        )
        still_s = endpoint.beside.still_s()
        demand(
            still_s < longest_s + self._setup.ping_interval_s + STALL_TOLERANCE_S,
            "detection",
            f"{endpoint.name} has not noticed that a lane is still for {still_s:.3f} s",
        )

    def _check_silence(self, endpoint: Endpoint) -> None:
        """Whoever calls its peer dead has not heard of it for long enough."""
        lane = endpoint.end.into
        # A jump of the clock passes for the rest of the interval it falls into.
        jumps_s = endpoint.node.jumps * self._setup.ping_interval_s
        silence_s = self._world.now - lane.last_arrival()
        demand(
            silence_s >= self._patience_s - jumps_s - 2 * STALL_TOLERANCE_S,
            "blame",
            f"{endpoint.name} calls its peer dead, whose bytes came {silence_s:.3f} s "
            f"ago; its patience is {self._patience_s:g} s",
        )
        # Where payload pauses for as long as a ping waits, nobody can tell.
        longest_s = 6 * self._setup.latency_s[1] if self._setup.gap else 0.0
        demand(
            longest_s > self._setup.ping_interval_s / 2 or not lane.wire.healthy,
            "blame",
            f"{endpoint.name} calls a peer dead that lives and can be reached",
        )


def _is_closing(endpoint: Endpoint) -> bool:
    """Whether an application has called ``close``, on either side."""
    peer = endpoint.peer
    return endpoint.closing or (peer is not None and peer.closing)


def _closed(endpoint: Endpoint) -> bool:
    return endpoint.core.error is not None or _is_closing(endpoint)


def _is_delivered(ask: Ask) -> bool:
    """Whether it moves without the peer's application: a clean end awaits it."""
    return ask.kind in (RequestKind.PUT, RequestKind.GET, RequestKind.READ)


def _has_no_right(ask: Ask) -> bool:
    if ask.kind is RequestKind.OPEN_WINDOW:
        return refused(ask)
    # A full table forgets grants that are stale before it says no.
    return ask.aim is not None and (ask.aim.wrong != "" or not ask.aim.current)


def _is_stale(ask: Ask) -> bool:
    if ask.kind is RequestKind.READ:
        return has_no_window(ask)
    return ask.aim is not None and not ask.aim.current


def _is_too_large(ask: Ask) -> bool:
    if ask.kind is RequestKind.SEND:
        return ask.endpoint.end.out.mailbox(ask.tag).refused > 0
    box = ask.endpoint.end.into.mailbox(ask.tag)
    return any(message.nbytes > ask.nbytes for message in box.messages)


class KVJudge:
    """Compares what a consumer has with what its producer has marked."""

    def serial_of(self, ask: Ask, segment: SegmentRecord) -> int:
        """The content of a segment that its producer has marked."""
        part = _other(ask).parts.get(segment.number)
        demand(part, "kv", "a segment that was never marked")
        assert part is not None
        demand(part.nbytes == segment.nbytes, "kv", "a segment of another size")
        return part.serial

    def lands(self, arrival: ChunkArrival) -> None:
        """A chunk is about to be written: there, and may it be?"""
        segment = arrival.segment
        assert segment is not None
        ask, part = _consumer(segment)
        demand(not ask.over, "completion", "a transfer takes bytes after its end")
        demand(not part.landed, "kv", "a segment takes bytes after it has landed")
        demand(arrival.buffer == part.buffer, "place", "a chunk for another buffer")
        demand(
            arrival.offset == arrival.header.offset, "place", "a chunk beside its place"
        )

    def landed(self, arrival: ChunkArrival, data: bytes) -> None:
        """A chunk is in place: is it what its producer meant?"""
        segment = arrival.segment
        assert segment is not None
        _, part = _consumer(segment)
        begin = arrival.header.offset
        right = content(part.nbytes, part.serial)[begin : begin + len(data)]
        demand(data == right, "content", "a chunk has other bytes than were marked")
        part.covered += len(data)

    def segment_landed(self, ask: Ask, segment: SegmentRecord) -> None:
        """The core says that a segment is all here."""
        part = ask.parts[segment.number]
        part.landed = True
        if segment.damaged:
            damaged = ask.endpoint.end.into.damaged
            demand(damaged, "untrue", "damage that never was")
            return
        demand(part.covered == part.nbytes, "completion", "a segment with holes landed")
        assert part.lease is not None
        data = part.lease.load(0, part.nbytes)
        right = content(part.nbytes, part.serial)
        demand(data == right, "content", "a segment has other bytes than were marked")

    def taken(
        self, ask: Ask, segment: SegmentRecord, body: bytes | memoryview | None
    ) -> None:
        """The core passes all bytes of a small segment on."""
        part = ask.parts[segment.number]
        demand(not ask.over, "completion", "a transfer takes bytes after its end")
        part.landed = True
        if body is None:
            damaged = ask.endpoint.end.into.damaged
            demand(damaged, "untrue", "damage that never was")
            return
        right = content(part.nbytes, part.serial)
        demand(body == right, "content", "a segment has other bytes than were marked")
        part.covered = part.nbytes

    def acknowledged(self, ask: Ask, numbers: tuple[int, ...]) -> None:
        """The core says that the consumer has these segments."""
        consumer = _other(ask)
        for number in numbers:
            part = consumer.parts.get(number)
            demand(part and part.landed, "kv", "acknowledged, and has not landed")
            assert part is not None
            demand(part.covered == part.nbytes, "kv", "acknowledged, and is damaged")

    def settled(self, ask: Ask) -> None:
        """The core says that the consumer has all it will get."""
        producer = _other(ask)
        demand(producer.committed, "kv", "settled before the commit")
        demand(len(producer.parts) == len(ask.parts), "kv", "settled with a gap")
        demand(
            all(part.landed for part in ask.parts.values()),
            "completion",
            "settled before everything has landed",
        )

    def succeeded(self, ask: Ask) -> None:
        """A transfer has ended well, on either side."""
        producer, consumer = ask, _other(ask)
        if ask.kind is RequestKind.INCOMING:
            producer, consumer = consumer, producer
        demand(producer.committed, "kv", "a transfer ends well without a commit")
        demand(
            len(producer.parts) == len(consumer.parts)
            and all(part.landed for part in consumer.parts.values()),
            "completion",
            "a transfer ends well before everything has landed",
        )
        damaged = [
            number
            for number, part in consumer.parts.items()
            if part.covered < part.nbytes
        ]
        said = ask.endpoint.core.transfers.records[ask.core].damaged
        demand(
            sorted(said) == damaged, "untrue", "damage that both sides see otherwise"
        )


def _consumer(segment: SegmentRecord) -> tuple[Ask, Part]:
    ask = segment.request.context
    assert isinstance(ask, Ask)
    return ask, ask.parts[segment.number]


def _other(ask: Ask) -> Ask:
    """The same transfer at the other side."""
    peer = ask.endpoint.peer
    other = None
    if peer is not None and ask.core.wire_id:
        other = peer.asks.get(ask.core.wire_id)
    demand(other, "kv", "a transfer that the other side does not know")
    assert other is not None
    return other


class Judge:
    """Compares what happens with what is right; raises Wrong if they differ."""

    def __init__(self, world: World) -> None:
        self.completed_count = 0
        self.kv = KVJudge()
        self.windows = WindowJudge(world)
        self.truth = Truth(world)
        self._world = world
        self._eager: dict[int, Message] = {}

    def eager_sent(self, message: Message) -> None:
        """A message has left in a frame of its own."""
        message.eager = True
        self._eager[message.serial] = message

    # --- bytes ------------------------------------------------------------------------

    def leaves(self, endpoint: Endpoint, chunk: Chunk) -> None:
        """A chunk is handed to the wire: may its memory be read?"""
        request, number = chunk.request, chunk.number
        if request.kind is RequestKind.SERVE_READ:
            self.windows.leaves(endpoint, chunk)
            return
        if request.kind is RequestKind.SERVE_GET:
            ask = _asked(endpoint, request)
            _check_aim(ask, chunk.offset - chunk.position, "reads")
            return
        ask = _own(request)
        demand(not ask.over, "completion", "a request moves bytes after its end")
        buffer = ask.parts[number].buffer if number else ask.buffer
        demand(chunk.buffer == buffer, "place", "a chunk of another buffer")

    def lands(self, endpoint: Endpoint, frame: Frame, arrival: ChunkArrival) -> None:
        """A payload is about to be written: may it be, and there?"""
        request, header = arrival.request, arrival.header
        if arrival.segment is not None:
            self.kv.lands(arrival)
            return
        assert request is not None
        if request.kind is RequestKind.SERVE_PUT:
            _check_aim(
                _asked(endpoint, request), arrival.offset - header.offset, "writes"
            )
            return
        ask = _own(request)
        demand(not ask.over, "completion", "a request takes bytes after its end")
        demand(arrival.buffer == ask.buffer, "place", "bytes for another buffer")
        if frame.serial:
            ask.message = self._eager[frame.serial]
            demand(arrival.offset == 0, "place", "a message beside its beginning")
        else:
            demand(arrival.offset == header.offset, "place", "bytes beside their place")

    def landed(
        self,
        endpoint: Endpoint,
        frame: Frame,
        arrival: ChunkArrival,
        data: bytes,
        *,
        intact: bool,
    ) -> None:
        """A payload is in place: is it what its sender meant?"""
        to_core = arrival.place in (ChunkPlace.CONTROL, ChunkPlace.WHOLE)
        if not intact or frame.harm or (to_core and not frame.serial):
            return
        if frame.serial:
            message = self._eager[frame.serial]
            demand(data == content(len(data), frame.serial), "content", "eager message")
            demand(len(data) == message.nbytes, "content", "a message cut short")
            message.landed = True
            return
        if arrival.segment is not None:
            self.kv.landed(arrival, data)
            return
        request, begin = arrival.request, arrival.header.offset
        if request is None:
            return
        if request.kind in (RequestKind.GET, RequestKind.READ):
            ask = _own(request)
            ask.read[begin : begin + len(data)] = data
        else:
            ask = _asked(endpoint, request)
            right = content(ask.nbytes, ask.serial)[begin : begin + len(data)]
            demand(data == right, "content", "a chunk has other bytes than were sent")
        ask.covered += len(data)

    # --- completions ------------------------------------------------------------------

    def wanted(self, endpoint: Endpoint, event: MemoryWanted) -> None:
        """A receive asks for memory: no more than it may have."""
        ask = _own(event.request)
        demand(
            event.nbytes <= ask.nbytes and ask.lease is None,
            "limit",
            "a receive wants more memory than its limit",
        )

    def completed(self, endpoint: Endpoint, event: RequestDone) -> None:
        """A request is over: for the first time, and truly?"""
        ask = event.request.context
        if not isinstance(ask, Ask):
            self._served(endpoint, event)
            return
        demand(not ask.over, "completion", "a request was completed twice")
        ask.over = True
        ask.error = event.error
        endpoint.open.pop(ask, None)
        self.completed_count += 1
        self._world.note(
            endpoint.name, ask.kind.value, type(event.error).__name__, event.nbytes
        )
        moves = ask.kind in (RequestKind.OUTGOING, RequestKind.INCOMING)
        if event.error is None and ask.buffer is not None:
            held = endpoint.node.holds.held(ask.buffer)
            demand(not held, "memory-reuse", "a success, and the link uses its memory")
        if event.error is not None:
            self.truth.error(ask, event.error)
            self._failed(ask, event)
        elif moves:
            self.kv.succeeded(ask)
        elif ask.kind is RequestKind.RECV:
            self._check_received(ask, event)
        elif ask.kind is RequestKind.READ:
            self.windows.got(ask)
        elif ask.kind is RequestKind.OPEN_WINDOW:
            endpoint.node.app.windows.opened(ask)
        elif ask.aim is not None:
            _check_one_sided(ask)
        if moves:
            endpoint.node.app.kv.over(ask)

    def _served(self, endpoint: Endpoint, event: RequestDone) -> None:
        """A request of the peer is over on this side, which nobody here began."""
        kind = event.request.kind
        if kind is RequestKind.SERVE_READ:
            self.windows.served(endpoint, event)
            return
        serving = kind in (RequestKind.SERVE_PUT, RequestKind.SERVE_GET)
        demand(serving, "completion", "a completion of nobody's request")

    def _failed(self, ask: Ask, event: RequestDone) -> None:
        """A receive without a buffer that fails for its limit refuses the message."""
        if event.held is not None:
            ask.endpoint.held.pop(event.held).lease.free()
        if isinstance(event.error, MessageTooLarge) and ask.kind is RequestKind.RECV:
            _mailbox(ask).refused += ask.buffer is None

    def _check_received(self, ask: Ask, event: RequestDone) -> None:
        endpoint = ask.endpoint
        if event.held is not None:
            held = endpoint.held.pop(event.held)
            message = self._eager[held.serial]
            demand(held.whole, "completion", "a receive ends before its message is in")
            data = held.lease.load(0, event.nbytes)
            if ask.lease is not None:
                ask.lease.store(0, data)
            held.lease.free()
        elif ask.message is not None:
            message = ask.message
            demand(message.landed, "completion", "a receive ends before its message")
            assert ask.lease is not None
            data = ask.lease.load(0, event.nbytes)
        else:
            sender = _asked(endpoint, ask.core)
            assert sender.message is not None
            message = sender.message
            demand(
                sender.covered == sender.nbytes,
                "completion",
                "a receive ends before all bytes are in",
            )
            lease = ask.lease
            data = lease.load(0, event.nbytes) if lease else b""
        self._check_message(ask, message, data)

    def passed_on(self, event: MessageArrived, data: bytes, serial: int) -> None:
        """A receive that stays has got a message."""
        ask, message = _own(event.request), self._eager[serial]
        demand(not ask.over, "completion", "a message for a receive that has ended")
        self._world.note(ask.endpoint.name, "passed on", message.tag, message.nbytes)
        self._check_message(ask, message, data)

    def _check_message(self, ask: Ask, message: Message, data: bytes) -> None:
        right = content(message.nbytes, message.serial)
        demand(message.tag == ask.tag, "content", "a message of another tag")
        demand(data == right, "content", "a message with other bytes than were sent")
        demand(not message.taken, "completion", "a message was received twice")
        message.taken = True
        _check_order(_mailbox(ask), ask.place, message.place)

    # --- the end ----------------------------------------------------------------------

    def settled(self, endpoint: Endpoint) -> None:
        """Faults are long over and everything was closed: nothing may be left."""
        name = endpoint.name
        demand(endpoint.ended, "liveness", f"{name} has not ended")
        demand(endpoint.down, "liveness", f"the link of {name} has not ended")
        self.windows.settled(endpoint)
        for ask in endpoint.open:
            raise Wrong("completion", f"{ask} has no completion")
        for ask in endpoint.asks.values():
            demand(ask.over, "completion", f"{ask} has no completion")
        whole = sum(held.whole for held in endpoint.held.values())
        demand(
            whole == inside.landed_messages(endpoint),
            "completion",
            f"{name}: messages that nobody has taken are not all there",
        )
        peer = endpoint.peer
        if peer is not None and peer.ended and endpoint.ended:
            errors = (endpoint.ended.error, peer.ended.error)
            if all(isinstance(error, ClosedOK) for error in errors):
                _check_delivered(endpoint)


def _own(request: RequestRecord) -> Ask:
    """What this side's application asked for."""
    ask = request.context
    if not isinstance(ask, Ask):
        raise Wrong("place", f"bytes of a {request.kind.value} that nobody asked")
    return ask


def _asked(endpoint: Endpoint, request: RequestRecord) -> Ask:
    """What the peer's application asked for, which this side carries out."""
    peer = endpoint.peer
    ask = None
    if peer is not None and request.wire_id:
        ask = peer.asks.get(request.wire_id)
    if ask is None:
        raise Wrong("place", f"request {request.wire_id} was never asked for")
    return ask


def _mailbox(ask: Ask) -> Mailbox:
    """Where the messages for a receive come from."""
    return ask.endpoint.end.into.mailbox(ask.tag)


def _check_aim(ask: Ask, base: int, verb: str) -> None:
    aim = ask.aim
    if aim is None:
        raise Wrong("place", f"the peer {verb} memory for a {ask.kind.value}")
    demand(not aim.wrong, "access", f"a {aim.wrong} access {verb} memory")
    demand(aim.current, "stale", f"the peer {verb} a region that was closed or revoked")
    demand(base == aim.offset, "place", f"the peer {verb} beside the range it named")


def _check_one_sided(ask: Ask) -> None:
    aim = ask.aim
    assert aim is not None
    demand(not aim.wrong, "access", f"a {aim.wrong} {ask.kind.value} has succeeded")
    demand(
        ask.covered == ask.nbytes,
        "completion",
        f"a {ask.kind.value} ends before all bytes are in place",
    )
    if ask.kind is RequestKind.GET:
        assert ask.lease is not None
        data = ask.lease.load(0, ask.nbytes)
        demand(data == ask.read, "content", "a get has other bytes than were read")


def _check_order(box: Mailbox, receive: int, message: int) -> None:
    """Messages of one tag are received in the order in which they were sent."""
    at = bisect(box.taken, (receive, message))
    before = box.taken[at - 1][1] if at else -1
    after = box.taken[at][1] if at < len(box.taken) else message + 1
    demand(before < message < after, "order", "a message has overtaken another")
    box.taken.insert(at, (receive, message))


def _check_delivered(endpoint: Endpoint) -> None:
    """After a clean end on both sides, everything that was sent has arrived."""
    lane = endpoint.end.out
    if lane.tampered or lane.damaged:
        return  # it may have arrived damaged, and its receiver was told so
    for box in lane.mail.values():
        for message in box.messages:
            lost = message.eager and not message.landed
            demand(not lost, "delivery", "a message was lost in a clean close")
