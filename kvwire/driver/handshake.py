"""The driver of a handshake: it moves the frames and negotiates the transport.

The connection is created within the call that delivers the handshake's last frame,
since the next bytes may be the peer's first frame on the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Generic, TypeVar, cast

from kvwire.backend import Landing, LaneArrived, Link, LinkHandler
from kvwire.backend.selection import Selection
from kvwire.errors import (
    AuthenticationFailed,
    ConnectionLost,
    HandshakeError,
    HandshakeTimeout,
    KVWireError,
    ProtocolError,
    WireCode,
    printable,
)
from kvwire.limits import HEADER_BYTES, REASON_CHARS_MAX
from kvwire.proto.handshake import Agreement, Handshake, HandshakeState, ServerHandshake
from kvwire.types import Candidate, TransportReport, TrustMode
from kvwire.wire.control import HandshakeVerdict, TransportChoice
from kvwire.wire.header import FrameType

T = TypeVar("T")

# The first bytes of a ClientHello, and of a TLS server's alert (RFC 8446 5.1). No
# kvwire frame has these types.
_TLS: Final = (b"\x16\x03", b"\x15\x03")
# The alert `protocol_version`, which lets a peer that speaks TLS name the reason. Links
# send headers of a fixed length, and a TLS peer ignores bytes after an alert.
_NO_TLS: Final = b"\x15\x03\x03\x00\x02\x02\x46".ljust(HEADER_BYTES, b"\0")
_TYPES: Final = frozenset(FrameType)


class HandlerSwitch:
    """Passes a link's calls to its current handler.

    So a link can change its handler between two frames, without extra cost per call.
    """

    __slots__ = (
        "body_received",
        "frame_sent",
        "header_received",
        "link_closed",
        "link_writable",
    )

    def __init__(self, handler: LinkHandler) -> None:
        self.switch(handler)

    def switch(self, handler: LinkHandler) -> None:
        """Call the methods of this handler from now on."""
        for method in self.__slots__:
            setattr(self, method, getattr(handler, method))


class HandshakeDriver(LinkHandler, Generic[T]):
    """Runs one handshake on one link, until the connection's driver takes over.

    Attributes:
        done: The resulting connection, or the error that ended the handshake.
        ended: Set when the link has closed, or another handler has taken it over.
        identity: The peer's proved identity, in ``mtls`` mode.
    """

    def __init__(
        self,
        link: Link,
        handshake: Handshake,
        selection: Selection,
        loop: asyncio.AbstractEventLoop,
        *,
        agreed: Callable[[HandshakeDriver[T], Agreement], T],
        busy: str = "",
    ) -> None:
        """Prepare a handshake.

        Args:
            link: The link, which is not started yet.
            handshake: The protocol's state machine for it.
            selection: This side's choice of transports for such links.
            loop: The running loop.
            agreed: Creates the connection, and calls :meth:`hand_over`.
            busy: Returns the reason why no more connections are accepted, or "".
        """
        self.link = link
        self.handshake = handshake
        self.selection = selection
        self.done: asyncio.Future[T] = loop.create_future()
        # If its waiter was cancelled, asyncio would log an error without this.
        self.done.add_done_callback(lambda d: d.cancelled() or d.exception())
        self.ended: asyncio.Future[None] = loop.create_future()
        self.identity: str = ""
        self._agreed = agreed
        self._busy = busy
        self._switch = HandlerSwitch(self)

    def begin(self) -> None:
        """Start the link, and send the first message of the handshake."""
        self.link.start(cast("LinkHandler", self._switch))
        self._flush(self.link)

    def hand_over(self, handler: LinkHandler) -> None:
        """Let the link call another handler from the next frame on."""
        self._switch.switch(handler)
        self.ended.set_result(None)

    async def wait_established(self) -> T:
        """Wait for the connection.

        Raises:
            HandshakeError, ProtocolError, ConnectionLost: The handshake failed.

        Cancel safety: safe, the link is aborted.
        """
        try:
            return await asyncio.shield(self.done)
        except KVWireError:
            # The last frame is queued; the link ends after it.
            raise
        except BaseException:
            self.link.abort()
            self.done.cancel()
            raise

    def header_received(self, link: Link, header: memoryview) -> Landing:
        if self.done.done():
            return Landing(0, None)
        try:
            if not self.handshake.framing.received:
                _check_first(bytes(header))
            length = self.handshake.header_received(header)
        except (HandshakeError, ProtocolError) as exc:
            if bytes(header[:2]) == _TLS[0]:
                link.send(_NO_TLS)
            self._failed(link, exc)
            return Landing(0, None)
        return Landing(length, memoryview(bytearray(length)))

    def body_received(self, link: Link, landing: Landing) -> None:
        if self.done.done():
            return  # the link is closing: the peer's bytes are not read any more
        body = landing.payload
        assert isinstance(body, memoryview)
        try:
            if self._busy:
                self.handshake.refuse(WireCode.BUSY)
                raise HandshakeError(self._busy)
            if self.handshake.state in (HandshakeState.HELLO, HandshakeState.ACCEPT):
                self._know_peer(link)
            self.handshake.body_received(bytes(body))
            self._decide()
        except (HandshakeError, ProtocolError) as exc:
            self._failed(link, exc)
            return
        self._flush(link)
        if self.handshake.agreement is not None and not self.done.done():
            self.done.set_result(self._agreed(self, self.handshake.agreement))

    def frame_sent(self, link: Link, token: object) -> None:
        """Do nothing: a handshake's frames have no token."""

    def link_writable(self, link: Link) -> None:
        """Do nothing: a handshake never waits for room."""

    def link_closed(self, link: Link, error: Exception | None) -> None:
        self.ended.set_result(None)
        stranger = self._stranger()
        known = isinstance(error, HandshakeError | LaneArrived)
        if not self.done.done() and error is not None and known:
            self.done.set_exception(error)
        elif not self.done.done() and stranger is not None:
            self.done.set_exception(stranger)
        if not self.done.done():
            mtls = self.handshake.identity.trust is TrustMode.MTLS
            hint = "; is its trust mtls as well?" if mtls else ""
            lost = ConnectionLost(
                f"the connection ended while the handshake waited for "
                f"{self.handshake.state.name}"
                + (f": {error}" if error else f", and the peer sent no reason{hint}")
            )
            lost.__cause__ = error
            self.done.set_exception(lost)

    def timeout(self, timeout_s: float) -> HandshakeError:
        """Return the error for a peer that was too slow, or does not speak kvwire."""
        return self._stranger() or HandshakeTimeout(
            f"no handshake within {timeout_s:g} s; it waited for "
            f"{self.handshake.state.name} from the peer"
        )

    def _stranger(self) -> HandshakeError | None:
        """Return the error for a peer whose first bytes are not kvwire's, or None."""
        if not self.handshake.framing.received:
            try:
                _check_first(self.link.beginning)
            except HandshakeError as exc:
                return exc
        return None

    def _know_peer(self, link: Link) -> None:
        """In ``mtls`` mode, bind the handshake to the identity that TLS has proved."""
        handshake = self.handshake
        if handshake.identity.trust is not TrustMode.MTLS:
            return
        try:
            proven = link.proven()
            if proven is None:
                raise AuthenticationFailed('trust is "mtls", and this link has no TLS')
        except AuthenticationFailed:
            handshake.refuse(WireCode.AUTHENTICATION)
            raise
        handshake.bind(proven.binding)
        self.identity = proven.identity

    def _decide(self) -> None:
        handshake = self.handshake
        if not isinstance(handshake, ServerHandshake) or handshake.offer is None:
            return
        offers = handshake.offer.backends
        theirs = tuple([(one.name, one.api_version) for one in offers])
        report = self.selection.negotiate(theirs)
        config = self.selection.config
        handshake.choose(
            TransportChoice(
                name=config.name,
                verdicts=tuple(
                    [
                        HandshakeVerdict(
                            c.name, c.taken, c.reason[:REASON_CHARS_MAX], c.possible
                        )
                        for c in report.candidates
                    ]
                ),
                profile=tuple(sorted(config.profile.items())),
            )
        )

    def _failed(self, link: Link, error: KVWireError) -> None:
        """Send the last frame, if there is one, and end the link after it."""
        self._flush(link)
        link.close()
        if not self.done.done():
            self.done.set_exception(error)

    def _flush(self, link: Link) -> None:
        outgoing = self.handshake.outgoing
        for header, body in outgoing:
            link.send(header, memoryview(body))
        outgoing.clear()
        link.flush()


def _check_first(header: bytes) -> None:
    """Refuse a peer whose first bytes are not a frame of kvwire."""
    if header[:2] in _TLS:
        raise AuthenticationFailed(
            'the peer speaks TLS, as trust "mtls" does, and this side does not: set '
            "the same `trust` on both",
            fields=("trust",),
        )
    if header and header[0] not in _TYPES:
        raise HandshakeError(
            f"the peer does not speak kvwire: its first bytes are {header!r}; check "
            "the host and the port"
        )


# Connections with equal verdicts share a report. A peer may send any verdicts, so only
# a few reports are kept.
@lru_cache(maxsize=16)
def report_of(verdicts: tuple[HandshakeVerdict, ...]) -> TransportReport:
    """Return the server's verdicts as the report for both sides."""
    return TransportReport(
        tuple(
            Candidate(printable(v.name), v.taken, printable(v.reason), v.possible)
            for v in verdicts
        )
    )
