"""One side of a link under test: it sends, records what it is told, and judges it.

Whatever a check is about, every callback of every link is held against the contract:
on the loop's thread, never from inside a call, never re-entered, in the right order,
with the right arguments, and nothing after ``link_closed``. What is wrong goes to
:attr:`Verdicts.found` and fails the check that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvwire.backend import Landing, Link, LinkHandler
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
    """What a frame is sent with. Backends must give it back and not look at it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int, memory: Memory | None) -> None:
        self.number = number
        self.memory = memory

    def __repr__(self) -> str:
        return f"the token of frame {self.number}"

    def __eq__(self, other: object) -> bool:
        raise TypeError("a token belongs to the handler; compare it with `is`")


class KitLanding(Landing):
    """A landing that knows its frame."""

    __slots__ = ("head", "memory")

    def __init__(self, head: Head, memory: Memory | None) -> None:
        super().__init__(head.length, memory.payload if memory else None)
        self.head = head
        self.memory = memory


class Side(LinkHandler):
    """One side of a link, its handler and its caller.

    Args:
        name: For messages.
        link: Not yet started.
        verdicts: Where broken promises go.

    Attributes:
        arrived: Numbers of the frames whose body arrived as it was sent, in order.
        queued: How many frames were sent.
        sent: Tokens given back, in order.
        writable: How often the link said that it is writable.
        closed: What ``link_closed`` was told; one entry in the end.
        land: Chooses the memory for a payload; None drops it.
        on_header: Called within ``header_received``, before the landing is returned.
        on_body: Called within ``body_received``.
        on_sent: Called within ``frame_sent``.
        on_writable: Called within ``link_writable``.
        on_closed: Called within ``link_closed``.
    """

    def __init__(self, name: str, link: Link, verdicts: Verdicts) -> None:
        self.name = name
        self.link = link
        self.arrived: list[int] = []
        self.sent: list[Token] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.started = False
        self.land: Callable[[Head], Memory | None] = _new_view
        self.on_header: Callable[[Head], None] = _nothing
        self.on_body: Callable[[KitLanding], None] = _nothing
        self.on_sent: Callable[[Token], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        self.on_closed: Callable[[], None] = _nothing
        self._verdicts = verdicts
        self._thread = threading.get_ident()
        self.queued = 0
        self._next_number = 0
        self._lent: list[Token] = []
        self._landing: KitLanding | None = None
        self._aborted = False

    # --- what a check does ------------------------------------------------------------

    def start(self) -> None:
        """Start the link."""
        self.started = True
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
        """Send a frame of ``length`` pseudo-random bytes, without a flush.

        Args:
            length: Of the payload.
            cut: How its memory is cut.
            number: Of the frame; by default one more than of the frame before.
            memory: Use this and do not fill it.
            token: Whether the link shall say that the frame was sent.
        """
        number = self._next_number if number is None else number
        self._next_number = number + 1
        self.queued += 1
        if memory is None and length:
            memory = Memory(length, cut)
            memory.fill(pattern(number, length))
        made = Token(number, memory)
        payload = memory.payload if memory else None
        if token and not self._aborted:
            self._lent.append(made)
        with self._calling("send"):
            self.link.send(
                Head(number, length).encode(), payload, made if token else None
            )
        return made

    def send(self, length: int = 0, cut: Cut | None = None) -> Token:
        """Send one frame, and flush."""
        made = self.queue(length, cut)
        self.flush()
        return made

    def flush(self) -> None:
        """Flush the link."""
        with self._calling("flush"):
            self.link.flush()

    def close(self) -> None:
        """Close the link."""
        with self._calling("close"):
            self.link.close()

    def abort(self) -> None:
        """Abort the link."""
        self._aborted = True
        with self._calling("abort"):
            self.link.abort()

    def lend(self, number: int) -> Token:
        """A token for a frame that the check sends past this side."""
        token = Token(number, None)
        self._lent.append(token)
        return token

    def forget(self) -> None:
        """Let go of what was lent and will not be given back."""
        self._lent.clear()

    @property
    def sent_count(self) -> int:
        """Tokens that have been given back."""
        return len(self.sent)

    @property
    def lent(self) -> int:
        """Tokens that have not been given back."""
        return len(self._lent)

    def wrong(self, text: str) -> None:
        """Note a promise that this side saw broken."""
        self._verdicts.add(f"{self.name}: {text}")

    # --- what the link does -----------------------------------------------------------

    def header_received(self, link: Link, header: memoryview) -> Landing:
        """See :class:`~kvwire.backend.LinkHandler`."""
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
        """See :class:`~kvwire.backend.LinkHandler`."""
        with self._told("body_received", link):
            expected, self._landing = self._landing, None
            if landing is not expected or expected is None:
                self.wrong(f"body_received for {landing!r}, not for the landing asked")
                return
            if self._aborted:
                self.wrong("body_received after abort")
            self._judge(expected)
            self.arrived.append(expected.head.number)
            self.on_body(expected)

    def frame_sent(self, link: Link, token: object) -> None:
        """See :class:`~kvwire.backend.LinkHandler`."""
        with self._told("frame_sent", link):
            index = next((i for i, t in enumerate(self._lent) if t is token), None)
            if index is None or not isinstance(token, Token):
                self.wrong(f"frame_sent for {token!r}, which is not lent (any more)")
                return
            del self._lent[index]
            self.sent.append(token)
            self.on_sent(token)
            token.memory = None

    def link_writable(self, link: Link) -> None:
        """See :class:`~kvwire.backend.LinkHandler`."""
        with self._told("link_writable", link):
            self.writable += 1
            self.on_writable()

    def link_closed(self, link: Link, error: Exception | None) -> None:
        """See :class:`~kvwire.backend.LinkHandler`."""
        with self._told("link_closed", link):
            self.closed.append(error)
            self.on_closed()

    # --- judging ----------------------------------------------------------------------

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        self._verdicts.inside.append((self, what))
        try:
            yield
        finally:
            self._verdicts.inside.pop()

    @contextmanager
    def _told(self, what: str, link: Link) -> Iterator[None]:
        inside = self._verdicts.inside
        allowed = what == "frame_sent" and inside[-1:] == [(self, "flush")]
        if inside and not allowed:
            self.wrong(f"{what} was called from inside {inside[-1][1]}")
        if threading.get_ident() != self._thread:
            self.wrong(f"{what} was called on another thread than the loop's")
        if link is not self.link:
            self.wrong(f"{what} was called with another link")
        if not self.started:
            self.wrong(f"{what} was called before start")
        if self.closed:
            self.wrong(f"{what} was called after link_closed")
        inside.append((self, what))
        try:
            yield
        finally:
            inside.pop()
            self._verdicts.changed()

    def _judge(self, landing: KitLanding) -> None:
        memory, head = landing.memory, landing.head
        if memory is None:
            return
        if memory.nbytes != head.length:
            self.wrong(f"body_received for a destination of {memory.nbytes} bytes")
            return
        place = memory.differs_at(pattern(head.number, head.length))
        if place is not None:
            self.wrong(
                f"frame {head.number} of {head.length} bytes is wrong at "
                f"body_received, first at byte {place}"
            )
        if not memory.gaps_are_whole():
            self.wrong(
                f"frame {head.number}: memory beside its destination was written"
            )


def _new_view(head: Head) -> Memory | None:
    return Memory(head.length) if head.length else None


def _nothing(*_: object) -> None:
    return
