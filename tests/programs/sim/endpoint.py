"""One side of a connection: a core's harness with a wire that fails and a judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ConnectionLost, HandshakeError, ProtocolError
from kvwire.limits import HANDSHAKE_TIMEOUT_S
from kvwire.proto.chunks import Chunk
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import (
    Ended,
    Event,
    LaneEvent,
    MemoryWanted,
    MessageArrived,
    MessageKept,
    RequestDone,
    WindowEvent,
)
from kvwire.proto.handshake import Agreement, Handshake, ServerHandshake
from kvwire.proto.records import (
    ChunkArrival,
    ChunkPlace,
    RequestRecord,
    SegmentRecord,
)
from kvwire.types import BufferId, RequestId
from tests.programs.sim import inside
from tests.programs.sim.ask import Ask, Known, OpenedWindow, Serving, ShownWindow
from tests.programs.sim.beside import Beside
from tests.programs.sim.memory import Lease, demand
from tests.programs.sim.net import End, Frame, Landing
from tests.programs.sim.plan import Dice
from tests.support.core_pair.end import CoreEnd
from tests.support.core_pair.handshakes import choose_first

if TYPE_CHECKING:
    from tests.programs.sim.node import Node
    from tests.programs.sim.world import World


@dataclass(slots=True, eq=False)
class Held:
    """Memory of a message that nobody had asked for when it came."""

    lease: Lease
    serial: int
    whole: bool = False


class Endpoint(CoreEnd):
    """A core, its end of the wire, and what the application has asked of it.

    Attributes:
        node, end, core: The process, its end of the wire, the protocol.
        peer: The other side, once it has agreed as well.
        asks: Requests by the number they have on the wire.
        ended: The core has said that it is over.
        shown, opened: Windows of this side that the peer has open, and the peer's.
        closed_windows: Those that this side has had open.
        serving: Gets of the peer from windows, whose bytes are on their way.
        served: Numbers of those that are over.
        refused: Numbers of the peer's requests for windows that were refused.
    """

    def __init__(
        self, world: World, node: Node, end: End, core: ConnectionCore
    ) -> None:
        self.name = f"{node.name}.{len(node.endpoints)}"
        self.node = node
        self.end = end
        self.core = core
        self.peer: Endpoint | None = None
        self.asks: dict[int, Ask] = {}
        self.open: dict[Ask, None] = {}
        self.grants: list[Known] = []
        self.held: dict[BufferId, Held] = {}
        # The message whose frame was the last to land, and whether one is arriving that
        # a receive which stays will get.
        self._serial = 0
        self.passing = False
        self.shown: dict[int, ShownWindow] = {}
        self.opened: dict[int, OpenedWindow] = {}
        self.closed_windows: list[OpenedWindow] = []
        self.serving: dict[RequestRecord, Serving] = {}
        self.served: set[int] = set()
        self.refused: set[int] = set()
        self.closing = False
        self.ended: Ended | None = None
        self.down = False
        self._world = world
        self._checked = world.plan.setup.checked
        self._queue_bytes = world.plan.setup.queue_bytes
        self._seen_bytes = end.received_bytes
        self._timer_at = -1.0
        parameters = core.agreement.parameters
        chunk, eager = parameters.chunk_bytes, parameters.eager_bytes
        self._sizes = (
            *(0, 1, 63, 64, 65, eager, eager + 1, chunk - 1, chunk, chunk + 1),
            *(2 * chunk, 3 * chunk + 17, 5 * chunk),
        )
        self.longest = max(self._sizes)
        self.beside = Beside(world, self)
        node.endpoints.append(self)
        self.set_timer()

    # --- the application --------------------------------------------------------------

    def note(self, ask: Ask, *, numbered: bool = True) -> None:
        """Remember a request that the core has taken."""
        ask.core.context = ask
        self.open[ask] = None
        if numbered and ask.core.wire_id:
            self.asks[ask.core.wire_id] = ask

    def keep(self, ask: Ask, *, numbered: bool = True) -> None:
        """Remember it, and carry out what the core says to it."""
        self.note(ask, numbered=numbered)
        self.collect()
        self.set_timer()

    def size(self, dice: Dice) -> int:
        """A number of bytes, near one of the borders there are."""
        return self._sizes[dice.below(len(self._sizes))]

    def deadline(self, dice: Dice) -> float | None:
        """When a request has to be over, if it has to."""
        setup = self._world.plan.setup
        if dice.share() >= setup.deadlines:
            return None
        longest_s = setup.latency_s[1]
        after_s = (0.0, longest_s, 4 * longest_s, 0.3, 2.0)[dice.below(5)]
        return self.node.clock + after_s

    def soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Let the application do its part, now or late where applications are slow."""
        delay_s = self._world.afterthought_s()
        if delay_s:
            self.node.after(delay_s, self._late, call, arguments)
        else:
            call(*arguments)

    def _late(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        call(*arguments)
        self.collect()
        self.set_timer()

    # --- the wire ---------------------------------------------------------------------

    def header_received(self, frame: Frame) -> Landing | None:
        arrival = self.header(frame.header)
        if arrival is None:
            return None
        if arrival.place is ChunkPlace.BUFFER:
            assert arrival.buffer is not None
            lease = self.node.lease(arrival.buffer)
            self._world.judge.lands(self, frame, arrival)
            return Landing(arrival, lease, arrival.offset)
        if arrival.place is ChunkPlace.HOLD:
            assert arrival.buffer is not None
            lease = self.node.memory(frame.length, writable=True)
            self.held[arrival.buffer] = Held(lease, frame.serial)
            return Landing(arrival, lease, 0)
        whole = arrival.place is ChunkPlace.WHOLE
        self.passing = whole and frame.serial > 0
        return Landing(arrival, None, 0, whole)

    def body_received(
        self, frame: Frame, landing: Landing, data: bytes, *, intact: bool
    ) -> bool:
        arrival, ignores = landing.arrival, self.core.closed
        assert isinstance(arrival, ChunkArrival)
        self._world.judge.landed(self, frame, arrival, data, intact=intact)
        if arrival.place is ChunkPlace.HOLD:
            self._held_landed(arrival, intact=intact)
        if arrival.place is not ChunkPlace.CONTROL:
            self._serial = frame.serial
            self.passing = False
        kept_a_rule = self.land(arrival, data, self.node.clock, intact=intact)
        return kept_a_rule and not ignores

    def _held_landed(self, arrival: ChunkArrival, *, intact: bool) -> None:
        assert arrival.buffer is not None
        self.held[arrival.buffer].whole = True
        if not intact:
            # Whoever receives it gets an error; the bytes are of no use to anybody.
            self.held.pop(arrival.buffer).lease.free()

    def frame_sent(self, chunk: Chunk) -> None:
        self.core.chunk_sent(chunk)
        self.collect()

    def _kept(self, event: MessageKept) -> None:
        """Its receive ended while it arrived."""
        data = bytes(event.body)
        lease = self.node.memory(len(data), writable=True)
        lease.store(0, data)
        self.held[event.buffer] = Held(lease, self._serial, whole=True)

    def link_writable(self) -> None:
        self.collect()

    def link_closed(self, error: ConnectionLost | None) -> None:
        self._world.note(self.name, "link closed", str(error or ""))
        self.down = True
        self.core.link_lost(error)
        self.beside.break_all()
        self.collect()
        for buffer, held in list(self.held.items()):
            if not held.whole:
                self.held.pop(buffer).lease.free()

    def vanish(self) -> None:
        self.beside.vanish()
        self.end.vanish()

    # --- carrying out -----------------------------------------------------------------

    def collect(self) -> None:
        super().collect()
        inside.check(self)

    def drained(self, buffer: BufferId) -> None:
        self.node.drained(buffer)

    def send_together(self, wire_id: RequestId, data: bytes) -> None:
        """Answer a small get from a window by all of its bytes."""
        if self.core.outbox.shut:
            return
        self.send_frames()
        check = 0 if self._checked else None
        header = self.core.windows.data_frame(wire_id, len(data), check)
        frame = Frame(header, data)
        frame.payload = True
        self.end.send(frame)

    def send_frame(self, header: bytes, body: bytes) -> None:
        demand(self.ended is None, "closed", "a frame after the end")
        self.end.send(Frame(header, body))

    def set_timer(self) -> None:
        """Be woken when the core wants to look at the clock."""
        if self.core.closed or self.down:
            return
        at = self.node.to_world(self.core.next_tick)
        if self.node.timers_late_until > self._world.now:
            at += self._world.lateness_s()
        at = max(at, self._world.now)
        if self._timer_at < 0 or at < self._timer_at:
            self._timer_at = at
            self.node.at(at, self._tick, at)

    def _tick(self, woken_for: float) -> None:
        if woken_for != self._timer_at or self.down:
            return
        self._timer_at = -1.0
        core, now = self.core, self.node.clock
        if self.end.received_bytes != self._seen_bytes:
            self._seen_bytes = self.end.received_bytes
            core.liveness.note_received(now)
        core.tick(now)
        self.collect()
        if not core.closed:
            demand(core.next_tick > now, "timer", "the next tick is in the past")
            self._world.judge.truth.no_deadline_passed(self, now)
            self._world.judge.truth.no_silence(self)
        self.set_timer()

    def send_chunk(self) -> bool:
        if self.end.queued_bytes >= self._queue_bytes:
            return False
        lane = self.beside.pick()
        chunk = self.core.next_chunk(self.beside.span if lane else None)
        if chunk is None:
            demand(not self.core.sending, "progress", "sending, and has no chunk")
            return False
        self._world.judge.leaves(self, chunk)
        check = 0 if self._checked else None
        if lane is None or chunk.carries_mark:
            self._send_payload(chunk, self.core.chunk_header(chunk, check))
        else:
            self.end.send(self.beside.send(lane, chunk, check))
        return True

    def leaves(self, segment: SegmentRecord, buffer: BufferId) -> bool:
        """Send a segment at once that was just marked, if nothing goes before it."""
        core = self.core
        if segment.unsent_mark is None or core.chunks.busy or core.outbox.frames:
            return False
        if self.end.queued_bytes >= self._queue_bytes:
            return False  # blocks that went together are before it
        chunk, header = core.transfers.leave(segment, 0 if self._checked else None)
        core.transfers.keep(chunk, buffer)
        self._world.judge.leaves(self, chunk)
        self._send_payload(chunk, header)
        return True

    def _send_payload(self, chunk: Chunk, header: bytes) -> None:
        frame = Frame(
            header,
            None,
            lease=self.node.lease(chunk.buffer),
            offset=chunk.offset,
            length=chunk.length,
            chunk=chunk,
        )
        self.end.send(frame)
        demand(
            self.end.queued_bytes < self._queue_bytes + chunk.length
            or self.end.out.tampered,
            "in-flight",
            "more payload was handed to the link than it had room for",
        )

    def deal_with(self, event: Event) -> None:
        judge = self._world.judge
        if isinstance(event, RequestDone):
            judge.completed(self, event)
        elif isinstance(event, MessageArrived):
            judge.passed_on(event, bytes(event.body), self._serial)
        elif isinstance(event, MessageKept):
            self._kept(event)
        elif isinstance(event, MemoryWanted):
            judge.wanted(self, event)
            self.soon(self.node.app.messages.provide, self, event)
        elif isinstance(event, Ended):
            judge.truth.ends(self, event)
            self.ended = event
            if event.graceful:
                self.end.close()
            else:
                self.end.abort()
            self.beside.break_all()
            self.node.app.windows.ended(self)
        elif isinstance(event, LaneEvent):
            self.beside.event(event)
        elif isinstance(event, WindowEvent):
            self.node.app.windows.event(self, event)
        else:
            self.node.app.kv.event(self, event)

    def broke(self, error: ProtocolError) -> None:
        self._world.note(self.name, "refuses a frame", str(error))
        demand(
            self.end.into.tampered,
            "accused",
            f"{self.name} accuses an honest peer: {error}",
        )
        super().broke(error)


class Opening:
    """A handshake under way."""

    def __init__(
        self, world: World, node: Node, end: End, handshake: Handshake
    ) -> None:
        self.endpoint: Endpoint | None = None
        self._world = world
        self._node = node
        self._end = end
        self._over = False
        self._handshake = handshake
        end.handler = self

    def begin(self) -> None:
        """Send what the handshake starts with, and give it limited time."""
        self._flush()
        self._node.after(HANDSHAKE_TIMEOUT_S, self._time_out)

    def header_received(self, frame: Frame) -> Landing | None:
        if self._over:
            return None
        try:
            self._handshake.header_received(frame.header)
        except ProtocolError as exc:
            self._failed(exc)
            return None
        return Landing(None, None, 0)

    def body_received(
        self, frame: Frame, landing: Landing, data: bytes, *, intact: bool
    ) -> bool:
        handshake = self._handshake
        try:
            handshake.body_received(data)
            if isinstance(handshake, ServerHandshake) and handshake.offer is not None:
                choose_first(handshake)
        except (HandshakeError, ProtocolError) as exc:
            self._failed(exc)
            return False
        self._flush()
        if handshake.agreement is not None:
            self._agree(handshake.agreement)
        return True

    def frame_sent(self, chunk: Chunk) -> None:
        """See net.Handler."""

    def link_writable(self) -> None:
        """See net.Handler."""

    def link_closed(self, error: ConnectionLost | None) -> None:
        self._over = True

    def _agree(self, agreement: Agreement) -> None:
        node, end = self._node, self._end
        setup = self._world.plan.setup
        core = ConnectionCore(
            agreement,
            self._handshake.framing,
            node.holds,
            parameters=node.identity.parameters,
            ping_interval_s=setup.ping_interval_s,
            ping_misses=setup.ping_misses,
            now=node.clock,
        )
        self._over = True
        self.endpoint = endpoint = Endpoint(self._world, node, end, core)
        end.handler = endpoint
        self._world.agreed(endpoint)
        endpoint.beside.ask()
        endpoint.collect()

    def _flush(self) -> None:
        for header, body in self._handshake.outgoing:
            self._end.send(Frame(header, body))
        self._handshake.outgoing.clear()

    def _failed(self, error: HandshakeError | ProtocolError) -> None:
        """Say the last word, if there is one, and end the link after it."""
        self._world.note(self._node.name, "handshake failed", str(error))
        demand(
            self._end.into.tampered or self._end.out.tampered,
            "accused",
            f"an honest handshake is refused: {error}",
        )
        self._over = True
        self._flush()
        self._end.close()

    def _time_out(self) -> None:
        if not self._over:
            self._world.note(self._node.name, "handshake timed out")
            self._over = True
            self._end.abort()
