"""One side of a link under test: it sends, records what it is told, and judges it.

Whatever a check is about, every callback of every link is held against the contract:
on the loop's thread, never from inside a call, never re-entered, in the right order,
with the right arguments, and nothing after ``link_closed``. What is wrong goes to
:attr:`Verdicts.found` and fails the check that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvwire.backend import Landing, Link, LinkHandler
from kvwire.testing.conformance.content import Cut, Head, Memory, pattern
from kvwire.testing.conformance.witness import Token, Verdicts, Witness, nothing


class KitLanding(Landing):
    """A landing that knows its frame."""

    __slots__ = ("head", "memory")

    def __init__(self, head: Head, memory: Memory | None) -> None:
        super().__init__(head.length, memory.payload if memory else None)
        self.head: Head = head
        self.memory: Memory | None = memory


class LinkSide(Witness, LinkHandler):
    """One side of a link, its handler and its caller.

    Args:
        name: For messages.
        link: Not yet started.
        verdicts: Where broken promises go.

    Attributes:
        link: The link.
        queued: How many frames were sent.
        land: Chooses the memory for a payload; None drops it.
        on_header: Called within ``header_received``, before the landing is returned.
        on_arrival: Called within ``body_received``.
    """

    kind = "link"
    begins_with = "start"
    within_flush: ClassVar[frozenset[str]] = frozenset({"frame_sent"})

    def __init__(self, name: str, link: Link, verdicts: Verdicts) -> None:
        super().__init__(name, link, verdicts)
        self.link = link
        self.queued: int = 0
        self.land: Callable[[Head], Memory | None] = _new_view
        self.on_header: Callable[[Head], None] = nothing
        self.on_arrival: Callable[[KitLanding], None] = nothing
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
        """Send a frame of ``length`` pseudo-random bytes, without a flush.

        Args:
            length: Of the payload.
            cut: How its memory is cut.
            number: Of the frame; by default one more than of the frame before.
            memory: Use this and do not fill it.
            token: Whether the link shall say that the frame was sent.
        """
        number = self._number(number)
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
            self._judge_body(expected)
            self.arrived.append(expected.head.number)
            self.on_arrival(expected)

    def frame_sent(self, link: Link, token: object) -> None:
        """See :class:`~kvwire.backend.LinkHandler`."""
        with self._told("frame_sent", link):
            self._given_back("frame_sent", token)

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

    def _judge_body(self, landing: KitLanding) -> None:
        memory, head = landing.memory, landing.head
        if memory is None:
            return
        if memory.nbytes != head.length:
            self.wrong(f"body_received for a destination of {memory.nbytes} bytes")
            return
        self._judge("body_received", head.number, memory)


def _new_view(head: Head) -> Memory | None:
    return Memory(head.length) if head.length else None
