"""The wire: frames in flight between two processes, in virtual time.

A wire has two *ends*, each in the hands of one process, and a *lane* each way, which
keeps its frames in order. A wire that copies, as TCP does, reads payload from the
sender's memory when it is sent. Any other reads it when it is delivered, as a NIC may.
Both write it to the receiver's memory on delivery.

The wire keeps the promises of :mod:`kvwire.backend`, in the least helpful way they
allow. The completion of a frame comes some time after its delivery, in any order, or
not before the end of the link. After an abort the wire still works on what was handed
over until it reports ``link_closed``. What breaks these promises is a
:class:`~tests.programs.sim.faults.Tamper`, and whoever accepts such a frame fails the
seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvwire.errors import ConnectionLost
from kvwire.limits import HEADER_BYTES
from kvwire.proto.chunks import Chunk
from tests.programs.sim.ask import Mailbox
from tests.programs.sim.memory import Lease, demand

if TYPE_CHECKING:
    from tests.programs.sim.faults import Tamper
    from tests.programs.sim.node import Node
    from tests.programs.sim.world import World


@dataclass(slots=True, eq=False)
class Frame:
    """One frame on its way.

    Attributes:
        header: Its 32 bytes.
        body: What follows, if the wire has a copy of it.
        lease: Else the sender's memory, of which ``length`` bytes from ``offset``.
        chunk: Named when the memory is no longer needed.
        serial: The number of the message in it, for frames that carry a whole one.
        starts: When its first byte arrives at the earliest.
        due: When its last byte does.
        harm: Why nobody may accept it; "" for an honest frame.
        flip: Which bit of the payload is turned on the way; -1 for none.
    """

    header: bytes
    body: bytes | None
    lease: Lease | None = None
    offset: int = 0
    length: int = 0
    chunk: Chunk | None = None
    serial: int = 0
    payload: bool = False
    starts: float = 0.0
    due: float = 0.0
    begun: bool = False
    harm: str = ""
    flip: int = -1

    def __post_init__(self) -> None:
        self.payload = self.body is None or self.serial > 0
        if self.body is not None:
            self.length = len(self.body)


@dataclass(slots=True, eq=False)
class Landing:
    """Where the body of a frame goes, as the receiver said.

    Attributes:
        whole: To the core, which wants a payload in one piece.
    """

    arrival: object
    lease: Lease | None
    offset: int
    whole: bool = False


class Handler(Protocol):
    """What holds an end of a wire; see :class:`kvwire.backend.LinkHandler`."""

    def header_received(self, frame: Frame) -> Landing | None:
        """Say where the body goes; None if the frame was refused."""

    def body_received(
        self, frame: Frame, landing: Landing, data: bytes, *, intact: bool
    ) -> bool:
        """The body is in place; False if the frame was refused or ignored."""

    def frame_sent(self, chunk: Chunk) -> None:
        """The wire no longer needs the memory of a chunk."""

    def link_writable(self) -> None:
        """The wire has taken everything that was queued."""

    def link_closed(self, error: ConnectionLost | None) -> None:
        """The wire touches nothing of this side any more."""


class Lane:
    """One ordered queue, one way.

    Attributes:
        blocked_until: Nothing arrives before.
        armed: What will happen to the frames that are sent next.
        history: Every control frame sent, None for another one; for reflection.
        damaged: A bit of a payload has been turned; the frame is as good as any other.
        tampered: Something has happened to a frame that no link allows.
        rewritten: That was in the handshake, and every checksum is right again.
        ambush: What happens when the next payload is half in place.
    """

    def __init__(self, world: World, wire: Wire, source: End, target: End) -> None:
        self.wire = wire
        self.source = source
        self.target = target
        self.frames: deque[Frame] = deque()
        self.queued_bytes = 0
        self.blocked_until = 0.0
        self.armed: deque[Tamper] = deque()
        self.history: list[tuple[bytes, bytes] | None] = []
        self.damaged = False
        self.tampered = False
        self.rewritten = False
        self.mail: dict[int, Mailbox] = {}
        self.ambush: Callable[[Lane], None] | None = None
        self.landing: Landing | None = None
        self._world = world
        rate = world.plan.setup.bytes_per_s
        self._byte_s = 1 / rate if rate else 0.0
        self._copies = world.plan.setup.copies
        self._last_due = 0.0
        self._wake_at = -1.0
        self._closing = False
        self._deaf = False

    def mailbox(self, tag: int) -> Mailbox:
        """The messages of one tag."""
        return self.mail.setdefault(tag, Mailbox())

    def put(self, frame: Frame) -> None:
        """Queue a frame, unless something happens to it on the way."""
        if self._world.keeps_history:
            body = None if frame.payload else frame.body
            self.history.append(None if body is None else (frame.header, body))
        if self._copies and frame.lease is not None:
            self._copy(frame)
        if self.armed and self.armed[0].apply(self, frame):
            return
        self.append(frame)

    def append(self, frame: Frame) -> None:
        """Queue a frame as it is."""
        if self._deaf:
            return
        world = self._world
        frame.starts = max(self._last_due, world.now + world.latency())
        frame.due = frame.starts + (HEADER_BYTES + frame.length) * self._byte_s
        self._last_due = frame.due
        self.frames.append(frame)
        self.queued_bytes += frame.length
        if len(self.frames) == 1:
            self._wake(frame.due)

    def close(self) -> None:
        """Deliver what is queued, then end both sides."""
        self._closing = True
        if not self.frames:
            self._wake(self._world.now + self._world.latency())

    def block(self, until: float) -> None:
        """Let nothing arrive before a time."""
        self.wire.disturbed = True
        self._keep_trickled()
        if self.frames:
            self.frames[0].starts = max(self.frames[0].starts, until)
        self.blocked_until = max(self.blocked_until, until)

    def unblock(self) -> None:
        """Let everything pass again."""
        for frame in self.frames:
            frame.due = max(frame.due, min(self.blocked_until, self._world.now))
        self.blocked_until = 0.0
        if self.frames or self._closing:
            self._wake(self._world.now)

    def drop(self, *, copies: bool) -> None:
        """Forget what is on its way; the ``copies`` at the front may still arrive."""
        self._keep_trickled()
        kept = deque[Frame]()
        if copies:
            while self.frames and self.frames[0].lease is None:
                kept.append(self.frames.popleft())
        if not (kept and kept[0].begun):
            self.landing = None
        self.frames = kept
        self.queued_bytes = 0
        self._closing = False

    def last_arrival(self) -> float:
        """When bytes last arrived, whether or not the receiver has looked at them."""
        now, arrived = self._world.now, self.target.heard_at
        for frame in self.frames:
            if max(frame.starts, self.blocked_until) >= now:
                break
            arrived = max(arrived, min(max(frame.due, self.blocked_until), now))
        return arrived

    @property
    def trickled_bytes(self) -> int:
        """Bytes of the oldest frame that have arrived, before all of it has."""
        now = self._world.now
        if not self.frames or self.target.node.stalled_until > now:
            return 0
        frame = self.frames[0]
        if frame.begun or max(frame.starts, self.blocked_until) >= now:
            return 0
        share = (now - frame.starts) / max(frame.due - frame.starts, 1e-9)
        return int(min(share, 1.0) * (HEADER_BYTES + frame.length))

    def late_access(self) -> None:
        """Finish, without a word to anybody, what was under way when an end aborted."""
        if self.landing is None or self.source.closed or self.target.closed:
            return
        frame = self.frames[0]
        self._write(frame, self.landing, frame.length // 2, self._read(frame))

    # --- inside -----------------------------------------------------------------------

    def _keep_trickled(self) -> None:
        """What has arrived of a frame stays heard, whatever becomes of the rest."""
        if trickled := self.trickled_bytes:
            self.target.delivered_bytes += trickled
            self.target.heard_at = self._world.now

    def _wake(self, at: float) -> None:
        self._wake_at = at
        self._world.at(at, self._advance, at)

    def _advance(self, woken_for: float) -> None:
        world, target = self._world, self.target
        if woken_for != self._wake_at:
            return  # another wake-up has taken its place
        self._wake_at = -1.0
        while not (target.closed or target.aborted):
            if not self.frames and not self._closing:
                return
            due = self.frames[0].due if self.frames else world.now
            ready = max(due, self.blocked_until, target.node.stalled_until)
            if ready > world.now:
                self._wake(ready)
                return
            if not self.frames:
                self._closing = False
                self._end()
                return
            target.heard_at = world.now
            self._deliver(self.frames[0])

    def _deliver(self, frame: Frame) -> None:
        target, handler = self.target, self.target.handler
        if not frame.begun:
            frame.begun = True
            target.delivered_bytes += len(frame.header)
            self.landing = handler.header_received(frame)
            if self.landing is None:
                # Where its body would end is not known: nothing after it is read.
                self._deaf = True
                self.frames.clear()
                return
            if frame.length > 1 and self._pauses(frame, self.landing):
                return
        landing = self.landing
        assert landing is not None
        data = self._read(frame)
        self._write(frame, landing, 0, data)
        self.landing = None
        self.frames.popleft()
        self.queued_bytes -= frame.length
        target.delivered_bytes += frame.length
        if frame.chunk is not None:
            self._complete(frame.chunk)
        accepted = handler.body_received(frame, landing, data, intact=frame.flip < 0)
        demand(not (accepted and frame.harm), "tamper", f"accepted: {frame.harm}")
        if not self.frames and not self.source.ending:
            self.source.handler.link_writable()

    def _pauses(self, frame: Frame, landing: Landing) -> bool:
        """Whether only half of a payload arrives now; and something may happen then."""
        world = self._world
        pause_s = world.pause_s()
        if self.ambush is not None and (landing.lease is not None or landing.whole):
            pause_s = pause_s or 4 * world.latency()
            world.at(world.now, self.ambush, self)
            self.ambush = None
        if not pause_s:
            return False
        half = self._read(frame)[: frame.length // 2]
        self._write(frame, landing, 0, half)
        self.target.delivered_bytes += len(half)
        frame.due = world.now + pause_s
        self._last_due = max(self._last_due, frame.due)
        return True

    def _copy(self, frame: Frame) -> None:
        """Take a copy, as a socket does, and give the memory back before delivery."""
        frame.body = self._read(frame)
        frame.lease = None
        if frame.chunk is not None:
            self._complete(frame.chunk)
            frame.chunk = None

    def _read(self, frame: Frame) -> bytes:
        if frame.body is not None:
            data = frame.body
        else:
            assert frame.lease is not None
            data = frame.lease.read(frame.offset, frame.length)
        return data if frame.flip < 0 else flipped(data, frame.flip)

    def _write(self, frame: Frame, landing: Landing, skip: int, data: bytes) -> None:
        if landing.lease is not None:
            landing.lease.write(landing.offset + skip, data[skip:])

    def _complete(self, chunk: Chunk) -> None:
        delay_s = self._world.completion_delay_s()
        if delay_s is not None:
            source = self.source
            source.node.after(delay_s, source.sent, chunk)

    def _end(self) -> None:
        """The end of a clean close has arrived."""
        self.target.finish(None)
        self.source.finish(None)


def flipped(data: bytes, bit: int) -> bytes:
    """The same bytes with one bit turned."""
    turned = bytearray(data)
    turned[bit // 8] ^= 1 << bit % 8
    return bytes(turned)


# How long a link that closes waits for a peer that takes nothing more; TCP is given a
# limit of its own for this as well.
LINGER_S = 5.0


class End:
    """One end of a wire, as the process that has it sees it.

    Attributes:
        handler: Who is told; set once, before anything is sent.
        out: The lane that leads away, once the wire is whole.
        aborted: This side wants to hear no more, and is not rid of the wire yet.
        closed: The wire touches nothing of this side any more.
        delivered_bytes: Of the frames and halves of frames that were delivered.
        heard_at: When bytes were last delivered.
    """

    handler: Handler
    out: Lane
    into: Lane

    def __init__(self, world: World, node: Node) -> None:
        self.node = node
        self.aborted = False
        self.closed = False
        self.delivered_bytes = 0
        self.heard_at = world.now
        self._closing = False
        self._world = world

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not arrived yet."""
        return self.out.queued_bytes

    @property
    def received_bytes(self) -> int:
        """As :attr:`kvwire.backend.Link.received_bytes`."""
        return self.delivered_bytes + self.into.trickled_bytes

    @property
    def ending(self) -> bool:
        """Whether nothing more can be sent."""
        return self.closed or self.aborted or self._closing

    def send(self, frame: Frame) -> None:
        """Send a frame; does nothing when the link is ending."""
        if not self.ending:
            self.out.put(frame)

    def sent(self, chunk: Chunk) -> None:
        if not self.closed:
            self.handler.frame_sent(chunk)

    def close(self) -> None:
        """Send what is queued, then end."""
        if self.ending:
            return
        self._closing = True
        self.out.close()
        self.node.after(LINGER_S, self._give_up)

    def abort(self) -> None:
        """End now. What was handed over before may go on for a while."""
        if self.closed or self.aborted:
            return
        self.aborted = True
        world = self._world
        late_s = world.latency()
        self.node.after(late_s, self.into.late_access)
        self.node.after(late_s + world.latency(), self.finish, None)
        self.out.target.break_off()

    def break_off(self) -> None:
        """The wire has broken somewhere: tell this side, at once, later or never."""
        if self.closed:
            return
        world = self._world
        if not world.is_silent():
            error = ConnectionLost("the link was reset")
            self.node.after(2 * world.latency(), self.finish, error)

    def finish(self, error: ConnectionLost | None) -> None:
        """From here on the wire touches nothing of this side."""
        if self.closed:
            return
        self.closed = True
        self.into.drop(copies=False)
        self.out.drop(copies=True)
        self.handler.link_closed(error)

    def vanish(self) -> None:
        """The process is gone, and its end of the wire with it."""
        self.closed = True
        self.into.drop(copies=False)
        self.out.drop(copies=True)
        self.out.target.break_off()

    def _give_up(self) -> None:
        self.finish(ConnectionLost("the peer took nothing more"))


class Wire:
    """A link between two processes.

    Attributes:
        ends: Of the side that connected, and of the other.
        disturbed: It was cut, blocked or tampered with.
    """

    def __init__(self, world: World, client: Node, server: Node) -> None:
        self.ends = (End(world, client), End(world, server))
        self.disturbed = False
        self.is_cut = False
        for here, there in (self.ends, self.ends[::-1]):
            here.out = there.into = Lane(world, self, here, there)

    @property
    def healthy(self) -> bool:
        """Whether whatever one side says reaches the other, and without delay."""
        return not self.disturbed and not any(
            end.closed or end.aborted or end.node.dead or end.node.was_late
            for end in self.ends
        )

    @property
    def still(self) -> bool:
        """Whether all that was ever sent has arrived, and more would."""
        return not self.is_cut and not any(
            end.ending or end.out.frames or end.out.tampered or end.node.dead
            for end in self.ends
        )

    def cut(self) -> None:
        """Lose everything under way; each side may or may not be told."""
        self.is_cut = True
        for end in self.ends:
            end.out.drop(copies=False)
            end.out.block(float("inf"))
            end.break_off()
