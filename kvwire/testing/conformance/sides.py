"""What judges a side under test, be it of a link or of a lane, and plays its caller.

A witness holds every callback against what both contracts share: on the loop's thread,
not from inside a call unless that call may call back, never before the beginning, and
nothing after the end; each token given back once; no byte wrong, and none written
beside its destination. What is wrong goes to :attr:`Verdicts.found` and fails the check
that runs.
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
from kvwire.testing.conformance.content import Cut, Head, Memory, pattern


class Verdicts:
    """Broken promises found outside the check's own coroutine, and a wake-up for it.

    Attributes:
        found: What was wrong, first things first.
        inside: Calls and callbacks of all sides on this loop under way, the innermost
            last: what one link calls from inside a call to another re-enters as well.
        changed: Called after every callback.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.inside: list[tuple[object, str]] = []
        self.changed: Callable[[], None] = lambda: None

    def add(self, text: str) -> None:
        """Note a broken promise."""
        self.found.append(text)
        self.changed()


class Token:
    """What a payload is sent with. Backends must give it back and not look at it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int, memory: Memory | None) -> None:
        self.number = number
        self.memory = memory

    def __repr__(self) -> str:
        return f"the token of payload {self.number}"

    def __eq__(self, other: object) -> bool:
        raise TypeError("a token belongs to the handler; compare it with `is`")


class Witness:
    """One side of what is under test."""

    kind: ClassVar[str]
    """What is under test: "link" or "lane"."""
    begins_with: ClassVar[str]
    """The call before which there are no callbacks."""
    within_flush: ClassVar[frozenset[str]]
    """The callbacks that may come from inside a flush of the same side."""

    def __init__(self, name: str, subject: Any, verdicts: Verdicts) -> None:
        self.name = name
        self.begun = False
        self.arrived: list[int] = []
        self.sent: list[Token] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.on_sent: Callable[[Token], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        self.on_closed: Callable[[], None] = _nothing
        self._subject = subject
        self._verdicts = verdicts
        self._thread = threading.get_ident()
        self._next_number = 0
        self._lent: list[Token] = []
        self._aborted = False

    @property
    def lent(self) -> int:
        """Tokens that have not been given back."""
        return len(self._lent)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait here, as the link or the lane says."""
        count: int = self._subject.queued_bytes
        return count

    @property
    def received_bytes(self) -> int:
        """Bytes that have come in, as the link or the lane says."""
        count: int = self._subject.received_bytes
        return count

    def forget(self) -> None:
        """Let go of what was lent and will not be given back."""
        self._lent.clear()

    def wrong(self, text: str) -> None:
        """Note a promise that this side saw broken."""
        self._verdicts.add(f"{self.name}: {text}")

    # --- what a check does ------------------------------------------------------------

    def queue(self, length: int, cut: Cut | None = None) -> Token:
        """Send ``length`` pseudo-random bytes, without a flush."""
        raise NotImplementedError

    def send(self, length: int, cut: Cut | None = None) -> Token:
        """Send ``length`` pseudo-random bytes, and flush."""
        raise NotImplementedError

    def queue_many(
        self, count: int, length: int, cut: Cut | None = None
    ) -> list[Token]:
        """Call :meth:`queue` so many times."""
        return [self.queue(length, cut) for _ in range(count)]

    def send_many(self, count: int, length: int, cut: Cut | None = None) -> list[Token]:
        """Call :meth:`send` so many times."""
        return [self.send(length, cut) for _ in range(count)]

    def flush(self) -> None:
        """Flush the subject."""
        with self._calling("flush"):
            self._subject.flush()

    def close(self) -> None:
        """Close the subject."""
        with self._calling("close"):
            self._subject.close()

    def abort(self) -> None:
        """Abort the subject."""
        self._aborted = True
        with self._calling("abort"):
            self._subject.abort()

    # --- for the side -----------------------------------------------------------------

    def _token(
        self, length: int, cut: Cut | None, number: int | None, memory: Memory | None
    ) -> Token:
        """Return the next payload; its number is by default one more than the last."""
        number = self._next_number if number is None else number
        self._next_number = number + 1
        if memory is None and length:
            memory = Memory(length, cut)
            memory.fill(pattern(number, length))
        return Token(number, memory)

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Note a call to the subject."""
        self._verdicts.inside.append((self, what))
        try:
            yield
        finally:
            self._verdicts.inside.pop()

    @contextmanager
    def _told(self, what: str, subject: object) -> Iterator[None]:
        """Judge a callback of the subject."""
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

    def _given_back(self, what: str, token: object) -> None:
        """Take back a token, with the callback named."""
        index = next((i for i, t in enumerate(self._lent) if t is token), None)
        if index is None or not isinstance(token, Token):
            self.wrong(f"{what} for {token!r}, which is not lent (any more)")
            return
        del self._lent[index]
        self.sent.append(token)
        self.on_sent(token)
        token.memory = None

    def _judge(
        self, what: str, number: int, memory: Memory, *, bytes_too: bool = True
    ) -> None:
        """Look at a payload that has just arrived, as the callback named says."""
        nbytes = memory.nbytes
        if bytes_too and (at := memory.differs_at(pattern(number, nbytes))) is not None:
            self.wrong(
                f"payload {number} of {nbytes} bytes is wrong at {what}, first at byte "
                f"{at}"
            )
        if not memory.gaps_are_whole():
            self.wrong(f"payload {number}: memory beside its destination was written")


def _nothing(*_: object) -> None:
    """Do nothing, where a check does not listen to a callback."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What the control link says of one payload."""

    number: int
    length: int
    descriptor: bytes


def _memory_of(item: Head | Parcel) -> Memory | None:
    return Memory(item.length) if item.length else None


class KitLanding(Landing):
    """A landing that knows the number of its payload."""

    __slots__ = ("memory", "number")

    def __init__(self, item: Head | Parcel, memory: Memory | None) -> None:
        super().__init__(item.length, memory.payload if memory else None)
        self.number: int = item.number
        self.memory: Memory | None = memory


class LinkSide(Witness, LinkHandler):
    """One side of a link, its handler and its caller."""

    kind = "link"
    begins_with = "start"
    within_flush: ClassVar[frozenset[str]] = frozenset({"frame_sent"})

    def __init__(self, name: str, link: Link, verdicts: Verdicts) -> None:
        super().__init__(name, link, verdicts)
        self.link = link
        self.land: Callable[[Head], Memory | None] = _memory_of
        self.on_header: Callable[[Head], None] = _nothing
        self.on_arrival: Callable[[KitLanding], None] = _nothing
        self._landing: KitLanding | None = None

    # --- what a check does ------------------------------------------------------------

    def start(self) -> None:
        """Start the link."""
        self.begun = True
        with self._calling("start"):
            self.link.start(self)

    def queue(
        self,
        length: int = 0,
        cut: Cut | None = None,
        *,
        number: int | None = None,
        memory: Memory | None = None,
        token: bool = True,
    ) -> Token:
        """Send a frame of ``length`` pseudo-random bytes, without a flush."""
        made = self._token(length, cut, number, memory)
        header = Head(made.number, length).encode()
        payload = made.memory.payload if made.memory else None
        if token and not self._aborted:
            self._lent.append(made)
        with self._calling("send"):
            self.link.send(header, payload, made if token else None)
        return made

    def send(self, length: int = 0, cut: Cut | None = None) -> Token:
        """Send one frame, and flush."""
        made = self.queue(length, cut)
        self.flush()
        return made

    def take(self) -> None:
        """Do nothing: what comes over a link is received by itself."""

    def release(self) -> None:
        """Receive what has waited; see :meth:`Rig.held_pair`."""
        self.start()

    def lend(self, number: int) -> Token:
        """Make a token for a frame that the check sends past this side."""
        token = Token(number, None)
        self._lent.append(token)
        return token

    # --- what the link does -----------------------------------------------------------

    def header_received(self, link: Link, header: memoryview) -> Landing:
        with self._told("header_received", link):
            if self._landing is not None:
                self.wrong("header_received before the body of the frame before")
            if self._aborted:
                self.wrong("header_received after abort")
            head = Head.decode(header)
            if head is None:
                self.wrong(f"a header that nobody sent: {bytes(header)!r}")
                head = Head(0, 0)
            self._landing = KitLanding(head, self.land(head))
            self.on_header(head)
            return self._landing

    def body_received(self, link: Link, landing: Landing) -> None:
        with self._told("body_received", link):
            expected, self._landing = self._landing, None
            if landing is not expected or expected is None:
                self.wrong(f"body_received for {landing!r}, not for the landing asked")
                return
            if self._aborted:
                self.wrong("body_received after abort")
            self._judge_body(expected)
            self.arrived.append(expected.number)
            self.on_arrival(expected)

    def frame_sent(self, link: Link, token: object) -> None:
        with self._told("frame_sent", link):
            self._given_back("frame_sent", token)

    def link_writable(self, link: Link) -> None:
        with self._told("link_writable", link):
            self.writable += 1
            self.on_writable()

    def link_closed(self, link: Link, error: Exception | None) -> None:
        with self._told("link_closed", link):
            self.closed.append(error)
            self.on_closed()

    def _judge_body(self, landing: KitLanding) -> None:
        memory = landing.memory
        if memory is None:
            return
        if memory.nbytes != landing.length:
            self.wrong(f"body_received for a destination of {memory.nbytes} bytes")
            return
        self._judge("body_received", landing.number, memory)


class LaneSide(Witness, LaneHandler):
    """One side of a lane, its handler and its caller."""

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
        self.holding: bool = False
        self.trusting = True
        self.land: Callable[[Parcel], Memory | None] = _memory_of
        self.on_arrival: Callable[[KitLanding], None] = _nothing
        self._landings: list[KitLanding] = []

    # --- what a check does ------------------------------------------------------------

    async def join(self, bootstrap: bytes) -> None:
        """Join the lane across, of which these bytes are the bootstrap."""
        await self.lane.join(bootstrap, self)
        self.begun = True

    def queue(
        self,
        length: int,
        cut: Cut | None = None,
        *,
        memory: Memory | None = None,
        number: int | None = None,
    ) -> Token:
        """Send ``length`` pseudo-random bytes, without a flush on either side."""
        token = self._token(length, cut, number, memory)
        assert token.memory is not None, "a payload of a lane is not empty"
        ended = bool(self.closed)
        if not ended and not self._aborted:
            self._lent.append(token)
        with self._calling("send"):
            descriptor = self.lane.send(token.memory.payload, token)
        if len(descriptor) > DESCRIPTOR_BYTES_MAX:
            self.wrong(f"send returned a descriptor of {len(descriptor)} bytes")
        if ended and descriptor:
            self.wrong("send returned a descriptor after lane_closed")
        self.across.inbox.append(Parcel(token.number, length, descriptor))
        return token

    def send(self, length: int, cut: Cut | None = None) -> Token:
        """Send a payload, flush, and let the side across receive what it has."""
        token = self.queue(length, cut)
        self.flush()
        if not self.across.holding:
            self.across.take()
        return token

    def take(self, count: int | None = None) -> None:
        """Receive the first ``count`` payloads of the inbox, or all, and flush."""
        for _ in range(len(self.inbox) if count is None else count):
            self.receive(self.inbox.popleft())
        self.flush()

    def release(self) -> None:
        """Receive what has waited; see :meth:`LaneRig.held_pair`."""
        self.holding = False
        self.take()

    def receive(self, parcel: Parcel) -> None:
        """Queue one arrival, as the control link said it."""
        if self.closed or self._aborted:
            landing = KitLanding(parcel, None)
        else:
            landing = KitLanding(parcel, self.land(parcel))
            self._landings.append(landing)
        try:
            with self._calling("receive"):
                self.lane.receive(parcel.descriptor, landing)
        except Exception:
            if landing in self._landings:
                self._landings.remove(landing)
            raise

    def forget(self) -> None:
        """Let go of everything lent that will not be given back."""
        super().forget()
        self._landings.clear()
        self.inbox.clear()

    @property
    def expected(self) -> int:
        """Payloads that were received and have not arrived."""
        return len(self._landings)

    # --- what the lane does -----------------------------------------------------------

    def payload_sent(self, lane: Lane, token: object) -> None:
        with self._told("payload_sent", lane):
            self._given_back("payload_sent", token)

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        with self._told("payload_received", lane):
            if not isinstance(landing, KitLanding) or landing not in self._landings:
                self.wrong(f"payload_received for {landing!r}, which is not awaited")
                return
            self._landings.remove(landing)
            if self._aborted:
                self.wrong("payload_received after abort")
            if landing.memory is not None:
                self._judge(
                    "payload_received",
                    landing.number,
                    landing.memory,
                    bytes_too=self.trusting,
                )
            self.arrived.append(landing.number)
            self.on_arrival(landing)

    def lane_writable(self, lane: Lane) -> None:
        with self._told("lane_writable", lane):
            self.writable += 1
            if lane.queued_bytes:
                self.wrong(f"lane_writable with {lane.queued_bytes} bytes queued")
            self.on_writable()

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        with self._told("lane_closed", lane):
            self.closed.append(error)
            self.on_closed()
