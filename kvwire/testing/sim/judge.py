"""Whether what the core does and says is true.

The applications record what they mean (:mod:`kvwire.testing.sim.ask`); here it is
compared with where bytes go, what completions say, and why connections end.
"""

from __future__ import annotations

from bisect import bisect
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
from kvwire.proto.events import Ended, MemoryWanted, RequestDone
from kvwire.proto.flows import Arrival, Chunk, Place
from kvwire.proto.requests import Request
from kvwire.proto.state import Kind
from kvwire.testing.sim import inside
from kvwire.testing.sim.ask import Ask, Mailbox, Message
from kvwire.testing.sim.content import content
from kvwire.testing.sim.kv_judge import KVJudge
from kvwire.testing.sim.net import Frame
from kvwire.testing.sim.violation import Violation, demand

if TYPE_CHECKING:
    from kvwire.testing.sim.endpoint import Endpoint
    from kvwire.testing.sim.world import World

# What a peer is told about a grant that is not its own, whatever is wrong with it.
_NO_GRANT: Final = "no such grant on this connection"
_SAME_ANSWER: Final = frozenset({"wrong token", "foreign", "unknown"})


class Judge:
    """Compares what happens with what is right; raises Violation if they differ.

    Attributes:
        completed_count: Completions seen.
        kv: Does the same for KV transfers.
    """

    def __init__(self, world: World) -> None:
        self.completed_count = 0
        self.kv = KVJudge()
        self._world = world
        setup = world.plan.setup
        self._patience_s = setup.ping_interval_s * setup.ping_misses
        self._eager: dict[int, Message] = {}

    def eager_sent(self, message: Message) -> None:
        """A message has left in a frame of its own."""
        message.eager = True
        self._eager[message.serial] = message

    # --- bytes ------------------------------------------------------------------------

    def leaves(self, endpoint: Endpoint, chunk: Chunk) -> None:
        """A chunk is handed to the wire: may its memory be read?"""
        request, number = chunk.request_and_segment
        if request.kind is Kind.SERVE_GET:
            ask = _asked(endpoint, request)
            _check_aim(ask, chunk.offset - chunk.position, "reads")
            return
        ask = _own(request)
        demand(not ask.over, "completion", "a request moves bytes after its end")
        buffer = ask.parts[number].buffer if number else ask.buffer
        demand(chunk.buffer == buffer, "place", "a chunk of another buffer")

    def lands(self, endpoint: Endpoint, frame: Frame, arrival: Arrival) -> None:
        """A payload is about to be written: may it be, and there?"""
        request, header = arrival.request, arrival.header
        if arrival.segment is not None:
            self.kv.lands(arrival)
            return
        assert request is not None
        if request.kind is Kind.SERVE_PUT:
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
        arrival: Arrival,
        data: bytes,
        *,
        intact: bool,
    ) -> None:
        """A payload is in place: is it what its sender meant?"""
        if not intact or frame.harm or arrival.place is Place.CONTROL:
            return
        if frame.serial:
            message = self._eager[frame.serial]
            demand(data == content(frame.serial, len(data)), "content", "eager message")
            demand(len(data) == message.nbytes, "content", "a message cut short")
            message.landed = True
            return
        if arrival.segment is not None:
            self.kv.landed(arrival, data)
            return
        request, begin = arrival.request, arrival.header.offset
        if request is None:
            return
        if request.kind is Kind.GET:
            ask = _own(request)
            ask.read[begin : begin + len(data)] = data
        else:
            ask = _asked(endpoint, request)
            right = content(ask.serial, ask.nbytes)[begin : begin + len(data)]
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
            serving = event.request.kind in (Kind.SERVE_PUT, Kind.SERVE_GET)
            demand(serving, "completion", "a completion of nobody's request")
            return
        demand(not ask.over, "completion", "a request was completed twice")
        ask.over = True
        ask.error = event.error
        endpoint.open.pop(ask, None)
        self.completed_count += 1
        self._world.note(
            endpoint.name, ask.kind.value, type(event.error).__name__, event.nbytes
        )
        moves = ask.kind in (Kind.OUTGOING, Kind.INCOMING)
        if event.error is None and ask.buffer is not None:
            held = endpoint.node.holds.held(ask.buffer)
            demand(not held, "memory-reuse", "a success, and the link uses its memory")
        if event.error is not None:
            self._check_error(ask, event.error)
        elif moves:
            self.kv.succeeded(ask)
        elif ask.kind is Kind.RECV:
            self._check_received(ask, event)
        elif ask.aim is not None:
            _check_one_sided(ask)
        if moves:
            endpoint.node.app.kv.over(ask)

    def no_deadline_passed(self, endpoint: Endpoint, now: float) -> None:
        """After a tick nothing is open whose deadline has passed."""
        for ask in endpoint.open:
            demand(
                ask.deadline is None or ask.deadline > now,
                "deadline",
                "a request is open after its deadline",
            )

    def _check_received(self, ask: Ask, event: RequestDone) -> None:
        endpoint, memory = ask.endpoint, ask.endpoint.node.memory
        if event.held is not None:
            held = endpoint.held.pop(event.held)
            message = self._eager[held.serial]
            demand(held.whole, "completion", "a receive ends before its message is in")
            data = memory.load(held.lease, 0, event.nbytes)
            if ask.lease is not None:
                memory.store(ask.lease, 0, data)
            memory.free(held.lease)
        elif ask.message is not None:
            message = ask.message
            demand(message.landed, "completion", "a receive ends before its message")
            assert ask.lease is not None
            data = memory.load(ask.lease, 0, event.nbytes)
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
            data = memory.load(lease, 0, event.nbytes) if lease else b""
        right = content(message.serial, message.nbytes)
        demand(message.tag == ask.tag, "content", "a message of another tag")
        demand(data == right, "content", "a message with other bytes than were sent")
        demand(not message.taken, "completion", "a message was received twice")
        message.taken = True
        _check_order(_mailbox(ask), ask.place, message.place)

    def refused(self, ask: Ask, error: ConnectionClosed | UsageError) -> None:
        """The core would not start a request: is there a reason?"""
        if isinstance(error, UsageError):
            small = self._world.plan.setup.small_tables
            demand(small, "limit", f"no room for a {ask.kind.value}: {error}")
        else:
            self.refused_as_closed(ask.endpoint)

    def refused_as_closed(self, endpoint: Endpoint) -> None:
        """The core says that the connection is closed, or closing."""
        peer = endpoint.peer
        demand(
            endpoint.closing
            or endpoint.core.error is not None
            or (peer is not None and peer.closing),
            "untrue",
            "refused as closed, which it is not",
        )

    # --- errors -----------------------------------------------------------------------

    def _check_error(self, ask: Ask, error: KVWireError) -> None:
        if not self._is_true(ask, error):
            raise Violation("untrue", f"{ask} failed with {error!r}, which is not so")
        if isinstance(error, AccessDenied) and ask.aim is not None:
            says_no_grant = _NO_GRANT in str(error)
            demand(
                says_no_grant or ask.aim.wrong not in _SAME_ANSWER,
                "oracle",
                f"the answer to a {ask.aim.wrong} grant tells more: {error}",
            )

    def _is_true(self, ask: Ask, error: KVWireError) -> bool:
        """Whether what the error says has happened."""
        endpoint, aim = ask.endpoint, ask.aim
        match error:
            case RequestCancelled():
                return ask.cancelled
            case DeadlineExceeded():
                now = endpoint.node.clock
                mine = ask.deadline is not None and ask.deadline <= now
                return mine or self._world.plan.setup.deadlines > 0
            case PeerCancelled():
                return endpoint.peer is None or endpoint.peer.node.app.cancels > 0
            case AccessDenied():
                # A full table forgets grants that are stale before it says no.
                return aim is not None and (aim.wrong != "" or not aim.current)
            case StaleRegion():
                return aim is not None and not aim.current
            case IntegrityError():
                tampered = endpoint.end.into.tampered or endpoint.end.out.tampered
                return tampered and self._world.plan.setup.checked
            case PeerError():
                # The peer closes, and has not answered a transfer of ours.
                moves = ask.kind in (Kind.OUTGOING, Kind.INCOMING)
                return moves and endpoint.peer is not None and endpoint.peer.closing
            case MessageTooLarge():
                box = _mailbox(ask)
                return any(message.nbytes > ask.nbytes for message in box.messages)
            case ClosedOK() if ask.kind in (Kind.PUT, Kind.GET):
                return False  # what was begun is delivered before a clean end
            case ConnectionClosed():
                peer = endpoint.peer
                ended = endpoint.core.error is not None
                return ended or endpoint.closing or (peer is not None and peer.closing)
            case _:
                return False

    def ends(self, endpoint: Endpoint, event: Ended) -> None:
        """A connection is over: only once, and for the reason it gives?"""
        error, peer = event.error, endpoint.peer
        self._world.note(endpoint.name, "ended", repr(error))
        demand(endpoint.ended is None, "closed", "a connection ended twice")
        if isinstance(error, ClosedOK):
            closing = endpoint.closing or (peer is not None and peer.closing)
            demand(closing, "untrue", "closed on purpose, by nobody")
        elif isinstance(error, PeerUnresponsive):
            self._check_silence(endpoint)
        else:
            demand(isinstance(error, ConnectionLost), "untrue", repr(error))

    def _check_silence(self, endpoint: Endpoint) -> None:
        """Whoever calls its peer dead has not heard of it for long enough."""
        world, lane = self._world, endpoint.end.into
        setup = world.plan.setup
        # A jump of the clock passes for the rest of the interval it falls into.
        jumps_s = endpoint.node.jumps * setup.ping_interval_s
        silence_s = world.now - lane.last_arrival()
        demand(
            silence_s >= self._patience_s - jumps_s - 2 * STALL_TOLERANCE_S,
            "blame",
            f"{endpoint.name} calls its peer dead, whose bytes came {silence_s:.3f} s "
            f"ago; its patience is {self._patience_s:g} s",
        )
        # A ping waits behind payload that arrives with pauses, for any time.
        demand(
            setup.gap or not lane.wire.healthy,
            "blame",
            f"{endpoint.name} calls a peer dead that lives and can be reached",
        )

    def no_silence(self, endpoint: Endpoint) -> None:
        """After a tick nobody has been silent for longer than is borne."""
        world, node = self._world, endpoint.node
        if node.was_late:
            return  # its own lateness is forgiven to its peer
        silence_s = world.now - endpoint.end.into.last_arrival()
        longest_s = self._patience_s + world.plan.setup.ping_interval_s
        demand(
            silence_s < longest_s + STALL_TOLERANCE_S,
            "detection",
            f"{endpoint.name} has not noticed a silence of {silence_s:.3f} s",
        )

    # --- the end ----------------------------------------------------------------------

    def settled(self, endpoint: Endpoint) -> None:
        """Faults are long over and everything was closed: nothing may be left."""
        name = endpoint.name
        demand(endpoint.ended, "liveness", f"{name} has not ended")
        demand(endpoint.down, "liveness", f"the link of {name} has not ended")
        for ask in endpoint.open:
            raise Violation("completion", f"{ask} has no completion")
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


def _own(request: Request) -> Ask:
    """What this side's application asked for."""
    ask = request.context
    if not isinstance(ask, Ask):
        raise Violation("place", f"bytes of a {request.kind.value} that nobody asked")
    return ask


def _asked(endpoint: Endpoint, request: Request) -> Ask:
    """What the peer's application asked for, which this side carries out."""
    peer = endpoint.peer
    ask = None
    if peer is not None and request.wire_id is not None:
        ask = peer.asks.get(request.wire_id)
    if ask is None:
        raise Violation("place", f"request {request.wire_id} was never asked for")
    return ask


def _mailbox(ask: Ask) -> Mailbox:
    """Where the messages for a receive come from."""
    return ask.endpoint.end.into.mailbox(ask.tag)


def _check_aim(ask: Ask, base: int, verb: str) -> None:
    aim = ask.aim
    if aim is None:
        raise Violation("place", f"the peer {verb} memory for a {ask.kind.value}")
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
    if ask.kind is Kind.GET:
        assert ask.lease is not None
        data = ask.endpoint.node.memory.load(ask.lease, 0, ask.nbytes)
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
    if lane.tampered:
        return  # it may have arrived damaged, and its receiver was told so
    for box in lane.mail.values():
        for message in box.messages:
            lost = message.eager and not message.landed
            demand(not lost, "delivery", "a message was lost in a clean close")
