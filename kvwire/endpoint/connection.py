"""What is behind a :class:`~kvwire.Connection`: the four verbs, and the end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvwire.aio import LoopThread, absolute
from kvwire.backend import Link, Payload
from kvwire.driver.connection_driver import ConnectionDriver, EventActs
from kvwire.driver.lanes.state import LaneSet
from kvwire.endpoint.request import RequestState
from kvwire.errors import (
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    MessageTooLarge,
    ProfileMismatch,
    ProtocolError,
    RequestCancelled,
    UsageError,
    WireCode,
    shown,
    wrong_type,
)
from kvwire.kv.fragments import Fragments
from kvwire.limits import EAGER_BYTES_MAX, LINK_QUEUE_BYTES, REQUEST_BYTES_MAX
from kvwire.memory.buffers import as_payload, slice_payload, uncleared
from kvwire.memory.checksum import LOW_32_BITS, view_digest
from kvwire.memory.copy import copy
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import (
    Ended,
    MemoryWanted,
    MessageDropped,
    RequestDone,
    SegmentLanded,
    SegmentMarked,
    SegmentsAcknowledged,
    TransferAgreed,
    TransferOpened,
    TransferSettled,
)
from kvwire.proto.records import RequestRecord, TransferRecord
from kvwire.proto.regions import RegionRecord
from kvwire.proto.state import RequestKind, RequestStage
from kvwire.proto.transfers import Transfers
from kvwire.transfers.base import Attempt
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.outgoing import OutgoingState
from kvwire.types import (
    Access,
    Address,
    Deadline,
    Grant,
    PeerInfo,
    TransportReport,
    whole,
)
from kvwire.wire.control import AccessBody

if TYPE_CHECKING:
    from kvwire.driver.device_staging import DeviceStaging
    from kvwire.endpoint.communicator import CommunicatorState

_TAG_MAX: Final = 2**64 - 1
# A member of an enum takes several times as long to look up.
_RECV: Final = RequestKind.RECV
# What they wait for until they move.
_MESSAGES: Final = {
    RequestKind.SEND: "the peer to receive it",
    RequestKind.RECV: "a message",
}
_TRANSFERS: Final = frozenset({RequestKind.OUTGOING, RequestKind.INCOMING})


class Dialled(NamedTuple):
    """Says how a connection was made, for the next one in its place.

    Attributes:
        name: The address that was asked for.
        where: Which of its numeric addresses has answered.
        transport: What was asked for.
    """

    name: Address
    where: Address
    transport: str | Iterable[str] | None


class ConnectionState:
    """Holds the state of one connection, on the loop it was made on.

    Attributes:
        communicator: Whose connection it is.
        peer: Who is at the other end.
        driver: Runs its link and its lanes.
        thread: Who may call it.
        transfers: The protocol of its KV transfers.
        chunk_bytes: What one frame of theirs carries at most.
        run: Carries out what the core has to say.
    """

    def __init__(
        self,
        communicator: CommunicatorState,
        link: Link,
        core: ConnectionCore,
        *,
        peer: PeerInfo,
        report: TransportReport,
        scheme: str,
    ) -> None:
        self.communicator = communicator
        self._public: weakref.ref[Any] | None = None
        self.peer = peer
        self.core = core
        self._outbox = core.outbox
        self.transfers: Transfers = core.transfers
        self.chunk_bytes: int = core.agreement.parameters.chunk_bytes
        self._buffers = communicator.buffers
        self.thread: LoopThread = communicator.thread
        self._loop = communicator.loop
        self._made_at = self._loop.time()
        self._check = communicator.config.checksum != "off"
        self._message_bytes = communicator.config.message_bytes
        # Where it went, on the side that had connected.
        self.dialled: Dialled | None = None
        lanes = LaneSet(scheme, report)
        self.driver: ConnectionDriver = ConnectionDriver(
            link, core, communicator, lanes, self._acts()
        )
        self.staging: DeviceStaging = self.driver.staging
        self.run: Callable[[], None] = self.driver.run

    def __repr__(self) -> str:
        said = f"{self.core.phase.value} for {self.age_s:.1f} s"
        if not self.closed:
            said += f", {self.core.open_requests} requests"
            said += f", heard {self.silent_s:.1f} s ago"
        return f"<Connection to {self.peer} over {self.transport}, {said}>"

    @property
    def age_s(self) -> float:
        """Return the seconds since the handshake."""
        return self._loop.time() - self._made_at

    @property
    def silent_s(self) -> float:
        """Return the seconds since the peer last sent anything."""
        return max(0.0, self.core.silence_s(self._loop.time()))

    @property
    def public(self) -> Any:
        """Return the object that users hold; make it anew if nobody holds it."""
        public = self._public and self._public()
        if public is None:
            public = self.communicator.publish_connection(self)
            self._public = weakref.ref(public)
        return public

    @property
    def transport(self) -> str:
        """Name the transport that carries its data, such as ``"tcp"``."""
        return self.driver.active.name

    @property
    def transport_report(self) -> TransportReport:
        """Name every transport considered, and why it was taken or not."""
        return self.driver.active.report

    @property
    def closed(self) -> bool:
        """Tell whether nothing more can be sent."""
        return self.core.closed

    @property
    def link(self) -> Link:
        """Return the backend's link that carries it; for tests of backends."""
        return self.driver.link

    @property
    def digest(self) -> bytes:
        """Return 16 bytes that name this connection to both sides, and to no other."""
        return self.core.agreement.digest[:16]

    # --- messages ---------------------------------------------------------------------

    def send(self, tag: int, buffer: Any, deadline: Deadline) -> RequestState[int]:
        """Send a message to the receiver of a tag."""
        payload = as_payload(buffer, writable=False)
        nbytes = payload.nbytes
        if type(tag) is not int or not 0 <= tag <= _TAG_MAX:
            tag = _tag(tag)
        at = None if deadline is None else absolute(deadline)
        driver = self.driver
        # Not while the link is full: then no message makes its queue too long. Nor from
        # within an event: a frame that another event has caused may wait, and has the
        # number before that of the message.
        if (
            nbytes <= EAGER_BYTES_MAX
            and isinstance(payload, memoryview)
            and not driver.running
            and driver.link.queued_bytes < LINK_QUEUE_BYTES
        ):
            check = view_digest(payload) & LOW_32_BITS if self._check else None
            header = self.core.eager_header(tag, nbytes, check)
            if header is not None:
                # Its memory is free when this returns.
                driver.link.send_now(header, payload if nbytes else None)
                return RequestState(over=True, value=nbytes)
        _check_size(nbytes)
        verb = partial(self.core.send, tag)
        return self._post(RequestState(self, verb, payload, at, monotonic()))

    def recv(
        self, tag: int, into: Any, deadline: Deadline
    ) -> RequestState[int] | RequestState[bytearray]:
        """Receive the next message of a tag."""
        if type(tag) is not int or not 0 <= tag <= _TAG_MAX:
            tag = _tag(tag)
        at = None if deadline is None else absolute(deadline)
        payload = None
        if into is not None:
            payload = as_payload(into, writable=True, what="into")
        verb = partial(self.core.recv, tag)
        return self._post(RequestState(self, verb, payload, at, monotonic()))

    @property
    def unreceived(self) -> dict[int, int]:
        """Show the messages that nobody has received yet."""
        return self.core.messages.unreceived

    def discard(self, tag: int) -> int:
        """Drop the messages of a tag."""
        if type(tag) is not int or not 0 <= tag <= _TAG_MAX:
            tag = _tag(tag)
        dropped = self.core.messages.discard(tag)
        self.driver.run()
        return dropped

    # --- one-sided --------------------------------------------------------------------

    def put(self, buffer: Any, grant: Grant, deadline: Deadline) -> RequestState[int]:
        """Write to memory that the peer has granted."""
        payload = as_payload(buffer, writable=False)
        return self._one_sided(payload, grant, self.core.put, deadline)

    def get(self, grant: Grant, into: Any, deadline: Deadline) -> RequestState[int]:
        """Read memory that the peer has granted."""
        payload = as_payload(into, writable=True, what="into")
        return self._one_sided(payload, grant, self.core.get, deadline)

    # --- KV transfers -----------------------------------------------------------------

    def start(self, end: IncomingState | OutgoingState) -> None:
        """Ask the peer for one end of a transfer."""
        self.communicator.registry.ask(end, self)

    def start_transfer(
        self,
        attempt: Attempt,
        *,
        key: bytes,
        priority: int,
        description: bytes,
        pull: bool,
    ) -> None:
        """Open an attempt of a transfer on this connection."""
        transfer = TransferRecord(id=key, priority=priority)
        attempt.core = self.core.open_transfer(
            transfer, description, pull=pull, deadline=None
        )
        attempt.core.context = attempt
        self.run()

    def refuse(
        self, request: RequestRecord, error: KVWireError, code: WireCode
    ) -> None:
        """Refuse a request of the peer; it gets the error's text and the code."""
        self.core.refuse(request, error, code)

    # --- grants -----------------------------------------------------------------------

    def make_grant(
        self, region: RegionRecord, offset: int, nbytes: int | None, access: Access
    ) -> Grant:
        """Make a grant of a region for the peer."""
        row = self.core.grant(region, offset, nbytes, access)
        return Grant(
            access=access,
            connection=self.digest,
            grant=row.id,
            generation=row.generation,
            token=row.token,
            offset=0,
            nbytes=row.nbytes,
        )

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """End the connection gracefully."""
        if not self.core.closed:
            self.communicator.registry.closing(self)
            timeout_s = self.communicator.config.close_timeout_s
            self.core.close(self._loop.time(), timeout_s)
            self.driver.set_timer()
            self.driver.run()
        await self.wait_closed()

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the connection now; every open request fails. Never raises."""
        if not self.core.closed:
            self.core.fail(ConnectionLost(reason))
            self.driver.run()
        self.driver.link.abort()

    async def wait_closed(self) -> None:
        """Wait until nothing touches the connection's memory any more."""
        await asyncio.shield(self.driver.ended)

    def region_revoked(self, region: RegionRecord) -> None:
        """End the grants of a region that was closed or revoked."""
        self.core.region_revoked(region.id)
        self.driver.run()

    # --- what requests ask for --------------------------------------------------------

    def describe(self, request: RequestState[Any]) -> str:
        """Serve a request, as RequestOwner says."""
        core, peer = request.core, shown(self.peer.name)
        if core is None:
            return f"recv from {peer}, not posted: nobody awaits it"
        if core.kind in _MESSAGES:
            what = f"{core.kind.value} of tag {core.tag}, with {peer}"
            if core.state is RequestStage.POSTED:
                return f"{what}, waits for {_MESSAGES[core.kind]}"
        else:
            what = f"{core.kind.value} with {peer}"
        return f"{what}, {core.moved} of {core.nbytes} bytes moved"

    def cancel_request(self, request: RequestState[Any]) -> None:
        """Serve a request, as RequestOwner says."""
        if request.core is None:
            error = RequestCancelled("the receive was cancelled on this side")
            request.complete(None, error)
            return
        self.core.cancel(request.core)
        self.driver.run()

    def unpost(self, request: RequestState[Any]) -> None:
        """Serve a request, as RequestOwner says."""
        core = request.core
        if core is None or core.kind is not RequestKind.RECV:
            return
        core.context = None
        if self.core.withdraw(core):
            request.core = None
            self.driver.run()
        else:
            core.context = request

    def repost(self, request: RequestState[Any]) -> None:
        """Serve a request, as RequestOwner says."""
        self._post(request)

    def when_released(
        self, request: RequestState[Any], call: Callable[[], None]
    ) -> None:
        """Serve a request, as RequestOwner says."""
        core = request.core
        if core is None or core.buffer is None:
            call()
        else:
            self._buffers.on_drained(core.buffer, call)

    # --- inside -----------------------------------------------------------------------

    def _post(self, request: RequestState[Any]) -> RequestState[Any]:
        """Start a request in the core and carry out what it says."""
        memory, nbytes, lent = request.memory, self._message_bytes, None
        assert request.verb is not None
        if memory is not None:
            nbytes = memory.nbytes
            lent = self._buffers.lend(memory)
        try:
            core = request.verb(lent, nbytes, deadline=request.deadline)
        except KVWireError as exc:
            if lent is not None:
                self._buffers.take_back(lent)
            if not isinstance(exc, ConnectionClosed):
                raise
            request.complete(None, exc)
            return request
        request.core = core
        core.context = request
        # A receive that has met nothing has nothing to say.
        if self._outbox.frames or self._outbox.events:
            self.driver.run()
        if core.deadline is not None and not request.over:
            self.driver.set_timer()
        return request

    def _one_sided(
        self,
        payload: Payload,
        grant: Grant,
        verb: Callable[..., RequestRecord],
        deadline: Deadline,
    ) -> RequestState[int]:
        nbytes = payload.nbytes
        if not isinstance(grant, Grant):
            raise wrong_type("grant", grant, "a kvwire.Grant of the peer")
        if grant.connection != self.digest:
            raise UsageError(
                f"this grant was made for connection {grant.connection.hex()[:8]}, not "
                f"for this one ({self.digest.hex()[:8]}): the peer has to grant anew"
            )
        if nbytes != grant.nbytes:
            raise UsageError(
                f"the buffer has {nbytes} bytes and the grant {grant.nbytes}; pass "
                f"grant[a:b] of the same length"
            )
        _check_size(nbytes)
        if not nbytes:
            return RequestState(over=True, value=0)
        where = AccessBody(
            grant.grant, grant.generation, grant.token, grant.offset, nbytes
        )
        verb, at = partial(verb, where=where), absolute(deadline)
        return self._post(RequestState(self, verb, payload, at, monotonic()))

    def _acts(self) -> EventActs:
        """Return who acts on each event of the core."""
        return {
            RequestDone: self._request_done,
            SegmentMarked: self._of_segment,
            SegmentLanded: self._of_segment,
            SegmentsAcknowledged: self._of_transfer,
            TransferSettled: self._of_transfer,
            TransferAgreed: self._of_transfer,
            TransferOpened: partial(self.communicator.registry.opened, self),
            MessageDropped: lambda event: self.driver.held.pop(event.buffer),
            MemoryWanted: self._provide,
            Ended: lambda event: self.communicator.connection_ended(self, event.error),
        }

    def _of_segment(self, event: SegmentMarked | SegmentLanded) -> None:
        attempt = event.segment.request.context
        if isinstance(attempt, Attempt):
            try:
                attempt.event(event)
            except ProtocolError as exc:
                self.core.fail(exc)

    def _of_transfer(
        self, event: SegmentsAcknowledged | TransferSettled | TransferAgreed
    ) -> None:
        attempt = event.request.context
        if not isinstance(attempt, Attempt):
            return
        try:
            if isinstance(event, TransferAgreed):
                attempt.agreed(TransferOffer.decode(event.description))
            else:
                attempt.event(event)
        except ProtocolError as exc:
            self.core.fail(exc)
        except ProfileMismatch as exc:
            attempt.refuse(exc, WireCode.PROFILE)

    def _provide(self, event: MemoryWanted) -> None:
        """Give a receive without a buffer memory for the message it has met."""
        try:
            memory = uncleared(event.nbytes)
        except MemoryError:
            error = MessageTooLarge(
                f"a message of {event.nbytes} bytes, and its receiver has no memory "
                f"for it; it was refused"
            )
            self.core.refuse(event.request, error, WireCode.TOO_LARGE)
        else:
            lent = self._buffers.lend(memoryview(memory))
            self.core.messages.provide(event.request, lent)
        self.driver.run()

    def _request_done(self, event: RequestDone) -> None:
        core = event.request
        request = core.context
        if core.kind in _TRANSFERS:
            if isinstance(request, Attempt):
                request.ended(event.error)
            else:
                self.communicator.registry.request_over(core, self)
            return
        # Each names the other; without this only the garbage collector would end both.
        core.context = None
        held = None
        if event.held is not None:
            held = self.driver.held.pop(event.held)
        if not isinstance(request, RequestState):
            return
        if event.error is not None:
            request.complete(None, event.error)
        elif core.kind is not _RECV or (request.memory is not None and held is None):
            request.complete(event.nbytes, None)
        else:
            request.complete(self._received(request, core, event.nbytes, held), None)

    def _received(
        self,
        request: RequestState[Any],
        core: RequestRecord,
        nbytes: int,
        held: memoryview | Fragments | None,
    ) -> int | bytearray:
        """Return the result of a receive: how many bytes, or the bytes themselves."""
        if request.memory is not None:
            assert held is not None
            if nbytes:
                copy(held, slice_payload(request.memory, 0, nbytes))
            return nbytes
        if held is None:
            assert core.buffer is not None
            held = self._buffers.take(core.buffer)
        assert isinstance(held, memoryview)
        assert isinstance(held.obj, bytearray)
        return held.obj


def _tag(tag: Any) -> int:
    """Return a tag that is no plain int, or not in range, as one that is."""
    number = whole(tag)
    if number is None or not 0 <= number <= _TAG_MAX:
        raise UsageError(f"tag={tag!r}: an integer from 0 to 2**64 - 1 is needed")
    return number


def _check_size(nbytes: int) -> None:
    if nbytes > REQUEST_BYTES_MAX:
        raise UsageError(
            f"{nbytes} bytes in one request; {REQUEST_BYTES_MAX} are the most"
        )
