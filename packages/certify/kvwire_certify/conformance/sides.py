"""The sides of a link or lane under test: they call it and check its callbacks.

A side checks every callback against the rules that both contracts share: on the loop's
thread; not from inside a call unless that call may call back; never before the start;
nothing after the end; each token given back once; no wrong byte, and no byte written
beside its destination. A link's frames arrive in the order in which they were sent,
each once. Violations go to :attr:`Verdicts.found` and fail the running check.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from kvwire.backend import Landing, Link, LinkHandler
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_certify.conformance.content import Cut, Head, Memory, pattern, poison


class Verdicts:
    """Broken promises found outside of the check's own coroutine; wakes the check.

    Attributes:
        found: The violations, oldest first.
        inside: The running calls and callbacks of all sides on this loop, the innermost
            last; a call from one link into another counts as nested too.
        changed: Called after every callback.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.inside: list[tuple[object, str]] = []
        self.changed: Callable[[], None] = lambda: None

    def add(self, text: str) -> None:
        """Record a broken promise."""
        self.found.append(text)
        self.changed()


class Token:
    """Accompanies a payload; a backend returns it without looking into it."""

    def __init__(self, number: int, memory: Memory | None) -> None:
        self.number = number
        self.memory = memory

    def __repr__(self) -> str:
        return f"the token of payload {self.number}"

    def __eq__(self, other: object) -> bool:
        raise TypeError("a backend must not look into a token; compare it with `is`")

    def __hash__(self) -> int:
        raise TypeError("a backend must not look into a token; it has no hash")


@dataclass(frozen=True, slots=True)
class Parcel:
    """The descriptor of one payload, as the control link carries it."""

    number: int
    length: int
    descriptor: bytes


class KitLanding(Landing):
    """A landing that knows the number of its payload."""

    __slots__ = ("memory", "number")

    def __init__(self, item: Head | Parcel, memory: Memory | None) -> None:
        super().__init__(item.length, memory.payload if memory else None)
        self.number: int = item.number
        self.memory: Memory | None = memory


def _memory_of(item: Head | Parcel) -> Memory | None:
    return Memory(item.length) if item.length else None


def _nothing(*_: object) -> None:
    """Do nothing: the callback of a check that needs none."""


class Side:
    """One side of the link or lane under test.

    Attributes:
        arrived: Numbers of the payloads that arrived whole.
        sent: Tokens that were given back.
        closed: The error, or None, of each closing callback.
        holding: For a lane: the other side's payloads wait for :meth:`release`.
        land: Returns the memory for an incoming payload; None drops it.
        trusting: Whether arrivals are compared with the content that an honest peer
            sends.
    """

    kind: ClassVar[str]
    """The kind of the subject: "link" or "lane"."""
    begins_with: ClassVar[str]
    """The call before which no callback may come."""
    within_flush: ClassVar[frozenset[str]]
    """The callbacks that may run inside a flush of the same side."""

    def __init__(self, name: str, subject: Any, verdicts: Verdicts) -> None:
        self.name = name
        self.begun = self.holding = False
        self.trusting = True
        self.arrived: list[int] = []
        self.sent: list[Token] = []
        self.writable: int = 0
        self.closed: list[Exception | None] = []
        self.land: Callable[[Any], Memory | None] = _memory_of
        self.on_arrival: Callable[[KitLanding], None] = _nothing
        self.on_sent: Callable[[Token], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        self.on_closed: Callable[[], None] = _nothing
        self._subject = subject
        self._verdicts = verdicts
        self._thread = threading.get_ident()
        self._next_number = 0
        self._lent: list[Token] = []
        self._closing = self._aborted = False

    @property
    def lent(self) -> int:
        """Count the tokens that have not been given back."""
        return len(self._lent)

    @property
    def queued_bytes(self) -> int:
        """Return the queued bytes, as the link or the lane reports them."""
        count: int = self._subject.queued_bytes
        return count

    @property
    def received_bytes(self) -> int:
        """Return the received bytes, as the link or the lane reports them."""
        count: int = self._subject.received_bytes
        return count

    def forget(self) -> None:
        """Drop tokens that will not be given back."""
        self._lent.clear()

    def wrong(self, text: str) -> None:
        """Record a broken promise that this side has seen."""
        self._verdicts.add(f"{self.name}: {text}")

    # --- what a check does ------------------------------------------------------------

    def queue(
        self,
        length: int = 0,
        cut: Cut | None = None,
        *,
        number: int | None = None,
        memory: Memory | None = None,
        token: bool = True,
    ) -> Token:
        """Send ``length`` pseudo-random bytes, without a flush.

        Args:
            length: The number of bytes.
            cut: How their memory is divided; a view by default.
            number: Selects the bytes; by default one more than the last number.
            memory: Memory that already contains the bytes.
            token: Whether the sender waits for its memory to be released.
        """
        number = self._next_number if number is None else number
        self._next_number = number + 1
        if memory is None and length:
            memory = Memory(length, cut)
            memory.fill(pattern(number, length))
        made = Token(number, memory)
        if token and not self._aborted and not self.closed:
            self._lent.append(made)
        with self._calling("send"):
            self._send(made, length, lent=token)
        return made

    def _send(self, token: Token, length: int, *, lent: bool) -> None:
        """Hand a payload to the subject."""
        raise NotImplementedError

    def queue_many(
        self, count: int, length: int, cut: Cut | None = None
    ) -> list[Token]:
        """Call :meth:`queue` ``count`` times."""
        return [self.queue(length, cut) for _ in range(count)]

    def send(self, length: int = 0, cut: Cut | None = None) -> Token:
        """Send ``length`` pseudo-random bytes, and flush."""
        return self.send_many(1, length, cut)[0]

    def send_many(self, count: int, length: int, cut: Cut | None = None) -> list[Token]:
        """Queue ``count`` payloads, and flush once."""
        tokens = self.queue_many(count, length, cut)
        self.flush()
        return tokens

    def flush(self) -> None:
        """Flush the subject."""
        with self._calling("flush"):
            self._subject.flush()

    def close(self) -> None:
        """Close the subject."""
        self._closing = True
        with self._calling("close"):
            self._subject.close()

    def abort(self) -> None:
        """Abort the subject."""
        self._aborted = True
        with self._calling("abort"):
            self._subject.abort()

    def keep_landings(self, cut: Cut | None = None) -> list[Memory]:
        """Let payloads land in new memory; return the list that collects it."""
        landed: list[Memory] = []

        def land(item: Head | Parcel) -> Memory:
            landed.append(Memory(item.length, cut))
            return landed[-1]

        self.land = land
        return landed

    def take(self) -> None:
        """Receive the other side's payloads, if that needs a call."""

    def release(self) -> None:
        """Receive the held payloads; see :meth:`Rig.held_pair`."""
        raise NotImplementedError

    # --- what the subject does --------------------------------------------------------

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Record a call to the subject."""
        self._verdicts.inside.append((self, what))
        try:
            yield
        finally:
            self._verdicts.inside.pop()

    @contextmanager
    def _told(self, what: str, subject: object) -> Iterator[None]:
        """Check a callback of the subject."""
        inside = self._verdicts.inside
        allowed = what in self.within_flush and inside[-1:] == [(self, "flush")]
        if inside and not allowed:
            self.wrong(f"{what} was called from inside {inside[-1][1]}")
        if threading.get_ident() != self._thread:
            self.wrong(f"{what} was called on another thread than the loop's")
        if subject is not self._subject:
            self.wrong(f"{what} was called with another {self.kind}")
        if not self.begun:
            self.wrong(f"{what} was called before {self.begins_with}")
        if self.closed:
            self.wrong(f"{what} was called after {self.kind}_closed")
        inside.append((self, what))
        try:
            yield
        finally:
            inside.pop()
            self._verdicts.changed()

    def _told_sent(self, what: str, subject: object, token: object) -> None:
        with self._told(what, subject):
            index = next((i for i, t in enumerate(self._lent) if t is token), None)
            if index is None or not isinstance(token, Token):
                self.wrong(f"{what} for {token!r}, which is not lent, or not any more")
                return
            del self._lent[index]
            self.sent.append(token)
            self.on_sent(token)
            token.memory = None

    def _arrive(self, what: str, landing: KitLanding) -> None:
        """Check a payload that has arrived completely, within the named callback."""
        if self._aborted:
            self.wrong(f"{what} after abort")
        number = landing.number
        memory = landing.memory
        if memory is not None:
            nbytes = memory.nbytes
            if nbytes != landing.length:
                self.wrong(f"{what} for a destination of {nbytes} bytes")
            elif self.trusting:
                at = memory.differs_at(pattern(number, nbytes))
                if at is not None:
                    where = f"wrong at {what}, first at byte {at}"
                    self.wrong(f"payload {number} of {nbytes} bytes is {where}")
            if not memory.gaps_are_whole():
                self.wrong(f"payload {number}: memory beside it was written")
        self.arrived.append(number)
        self.on_arrival(landing)

    def _told_writable(self, what: str, subject: object) -> None:
        with self._told(what, subject):
            self.writable += 1
            if self.queued_bytes:
                self.wrong(f"{what} with {self.queued_bytes} bytes queued")
            self.on_writable()

    def _told_closed(self, what: str, subject: object, error: Exception | None) -> None:
        with self._told(what, subject):
            self.closed.append(error)
            self.on_closed()


class LinkSide(Side, LinkHandler):
    """One side of a link: its handler and its caller.

    Attributes:
        across: The other side, if it is in this process and its frames are known.
        due: Numbers of the frames that it has sent and that have not arrived.
    """

    kind = "link"
    begins_with = "start"
    within_flush: ClassVar[frozenset[str]] = frozenset({"frame_sent"})

    def __init__(self, name: str, link: Link, verdicts: Verdicts) -> None:
        super().__init__(name, link, verdicts)
        self.link = link
        self.across: LinkSide | None = None
        self.on_header: Callable[[Head], None] = _nothing
        self.due: deque[int] = deque()
        self._landing: KitLanding | None = None
        # Whether the next frame is sent in one call; after it, whether the link took
        # all of it.
        self._now = False

    def start(self) -> None:
        """Start the link."""
        self.begun = True
        with self._calling("start"):
            self.link.start(self)

    def release(self) -> None:
        self.start()

    def send_now(self, length: int = 0, cut: Cut | None = None) -> None:
        """Send a payload in this call, and overwrite it if the link took all of it."""
        self._now = True
        made = self.queue(length, cut)
        if self._now:
            self._lent.remove(made)
            poison(made)
        else:
            self.flush()
        self._now = False

    def _send(self, token: Token, length: int, *, lent: bool) -> None:
        header = Head(token.number, length).encode()
        payload = token.memory.payload if token.memory else None
        if self.across is not None and not self._closing and not self._aborted:
            self.across.due.append(token.number)
        if self._now:
            self._now = self.link.send_now(header, payload, token)
        else:
            self.link.send(header, payload, token if lent else None)

    # --- what the link does -----------------------------------------------------------

    def header_received(self, link: Link, header: memoryview) -> Landing:
        with self._told("header_received", link):
            if self._landing is not None:
                self.wrong("header_received before the body of the previous frame")
            if self._aborted:
                self.wrong("header_received after abort")
            head = Head.decode(header)
            if head is None:
                self.wrong(f"a header that was never sent: {bytes(header)!r}")
                head = Head(0, 0)
            self._judge_order(head.number)
            self._landing = KitLanding(head, self.land(head))
            self.on_header(head)
            return self._landing

    def body_received(self, link: Link, landing: Landing) -> None:
        with self._told("body_received", link):
            expected = self._landing
            self._landing = None
            if landing is not expected or expected is None:
                self.wrong(
                    f"body_received for {landing!r}, not for the landing that was "
                    "returned"
                )
                return
            self._arrive("body_received", expected)

    def frame_sent(self, link: Link, token: object) -> None:
        self._told_sent("frame_sent", link, token)

    def link_writable(self, link: Link) -> None:
        self._told_writable("link_writable", link)

    def link_closed(self, link: Link, error: Exception | None) -> None:
        self._told_closed("link_closed", link, error)

    def _judge_order(self, number: int) -> None:
        if self.across is None:
            return
        due = self.due.popleft() if self.due else None
        if number != due:
            self.wrong(f"frame {number} arrived, but {due} was due")


class LaneSide(Side, LaneHandler):
    """One side of a lane: its handler and its caller.

    Attributes:
        across: The other side.
        inbox: Descriptors from the control link that this side has not used yet.
    """

    kind = "lane"
    begins_with = "join returned"
    within_flush: ClassVar[frozenset[str]] = frozenset(
        {"payload_sent", "payload_received", "lane_writable", "lane_closed"}
    )

    across: LaneSide

    def __init__(self, name: str, lane: Lane, verdicts: Verdicts) -> None:
        super().__init__(name, lane, verdicts)
        self.lane = lane
        self.inbox: deque[Parcel] = deque()
        self._landings: list[KitLanding] = []

    async def join(self, bootstrap: bytes) -> None:
        """Join the lane, with the other side's bootstrap."""
        await self.lane.join(bootstrap, self)
        self.begun = True

    def _send(self, token: Token, length: int, *, lent: bool) -> None:
        assert token.memory is not None, "a payload on a lane is not empty"
        assert lent, "a payload on a lane has a token"
        descriptor = self.lane.send(token.memory.payload, token)
        if len(descriptor) > DESCRIPTOR_BYTES_MAX:
            self.wrong(f"send returned a descriptor of {len(descriptor)} bytes")
        if self.closed and descriptor:
            self.wrong("send returned a descriptor after lane_closed")
        self.across.inbox.append(Parcel(token.number, length, descriptor))

    def send_many(self, count: int, length: int, cut: Cut | None = None) -> list[Token]:
        """Queue ``count`` payloads, flush, and let the other side receive them."""
        tokens = super().send_many(count, length, cut)
        if not self.across.holding:
            self.across.take()
        return tokens

    def take(self) -> None:
        """Receive the payloads of the inbox, and flush."""
        for _ in range(len(self.inbox)):
            self.receive()
        self.flush()

    def release(self) -> None:
        self.holding = False
        self.take()

    def receive(self, parcel: Parcel | None = None) -> None:
        """Queue one arrival: the given descriptor, or the inbox's first."""
        if parcel is None:
            parcel = self.inbox.popleft()
        ended = self.closed or self._aborted
        landing = KitLanding(parcel, None if ended else self.land(parcel))
        if not ended:
            self._landings.append(landing)
        try:
            with self._calling("receive"):
                self.lane.receive(parcel.descriptor, landing)
        except Exception:
            if landing in self._landings:
                self._landings.remove(landing)
            raise

    def forget(self) -> None:
        """Drop all lent memory that will not be released."""
        super().forget()
        self._landings.clear()
        self.inbox.clear()

    @property
    def expected(self) -> int:
        """Count the payloads that were queued for arrival and have not arrived."""
        return len(self._landings)

    # --- what the lane does -----------------------------------------------------------

    def payload_sent(self, lane: Lane, token: object) -> None:
        self._told_sent("payload_sent", lane, token)

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        with self._told("payload_received", lane):
            if not isinstance(landing, KitLanding) or landing not in self._landings:
                self.wrong(f"payload_received for {landing!r}, which is not expected")
                return
            self._landings.remove(landing)
            self._arrive("payload_received", landing)

    def lane_writable(self, lane: Lane) -> None:
        self._told_writable("lane_writable", lane)

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        self._told_closed("lane_closed", lane, error)
