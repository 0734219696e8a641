"""A connection: messages, puts and gets, KV transfers, and closing.

A verb creates a request, lends its memory to the protocol core and lets the driver send
the frames; an event from the core completes the request or informs the transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, Unpack, overload

from kvwire.aio import FORKED, AsyncWith, LoopThread, absolute, running_loop
from kvwire.backend import Link, Payload
from kvwire.driver.connection_driver import ConnectionDriver, EventActs
from kvwire.driver.lanes.state import LaneSet
from kvwire.endpoint.arguments import TAG_MAX, check_grant, check_size, checked_tag
from kvwire.endpoint.device_requests import DeviceRequests
from kvwire.endpoint.message_sink import MessageSink
from kvwire.endpoint.remote_window import RemoteWindow
from kvwire.endpoint.request import Request
from kvwire.endpoint.windows.opened import PeerWindows, WindowOpening
from kvwire.endpoint.windows.reading import WindowAsk
from kvwire.endpoint.windows.shown import OwnWindows
from kvwire.errors import (
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    MessageTooLarge,
    ProfileMismatch,
    ProtocolError,
    RequestCancelled,
    WireCode,
    printable,
    shown,
)
from kvwire.kv.blocks import Blocks
from kvwire.kv.fragments import Fragments
from kvwire.kv.paged import PagedCache
from kvwire.limits import EAGER_BYTES_MAX, LINK_QUEUE_BYTES, REQUEST_BYTES_MAX
from kvwire.memory.buffers import Memory, as_payload, slice_payload, uncleared
from kvwire.memory.checksum import LOW_32_BITS, view_digest
from kvwire.memory.copy import copy
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import (
    Ended,
    MemoryWanted,
    MessageArrived,
    MessageDropped,
    MessageKept,
    RequestDone,
    SegmentLanded,
    SegmentMarked,
    SegmentsAcknowledged,
    TransferAgreed,
    TransferOpened,
    TransferSettled,
)
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestKind, RequestStage
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.leg import Leg, segment_event
from kvwire.transfers.offer import TransferOffer
from kvwire.transfers.options import ReceiveOptions, SendOptions, check_options
from kvwire.transfers.outgoing import Outgoing
from kvwire.types import (
    Address,
    BufferId,
    Deadline,
    Device,
    Grant,
    PeerInfo,
    TransportReport,
)
from kvwire.wire.control import AccessBody

if TYPE_CHECKING:
    from kvwire.endpoint.windows.window import WindowTable
    from kvwire.transfers.registry import TransferServices

_new: Final = object.__new__
_SEND: Final = RequestKind.SEND
_RECV: Final = RequestKind.RECV
_PUT: Final = RequestKind.PUT
_GET: Final = RequestKind.GET
_SERVE_READ: Final = RequestKind.SERVE_READ
# Of messages that are sent while an event is handled; others are announced.
_FRAMES_MAX: Final = 32
_FRAMES_BYTES_MAX: Final = LINK_QUEUE_BYTES - EAGER_BYTES_MAX
# The reason for waiting, until bytes move.
_MESSAGES: Final = {_SEND: "the peer to receive it", _RECV: "a message"}
_TRANSFERS: Final = frozenset({RequestKind.OUTGOING, RequestKind.INCOMING})


class Dialled(NamedTuple):
    """Records how a connection was dialled, to dial its replacement.

    Attributes:
        name: The address that the caller gave.
        where: The numeric address that answered.
        transport: The transports that the caller asked for.
    """

    name: Address
    where: Address
    transport: str | Iterable[str] | None


class Connection(AsyncWith):
    """Connects two authenticated sides; made by ``connect``, or from ``connections``.

    A connection belongs to the loop that it was made on: a call from another thread, or
    after a fork, raises :exc:`~kvwire.UsageError`. The verbs return a
    :class:`~kvwire.Request` that has started already; await it for its result.
    """

    def __init__(
        self,
        services: TransferServices,
        link: Link,
        core: ConnectionCore,
        *,
        peer: PeerInfo,
        lanes: LaneSet,
        windows: WindowTable,
        ended: Callable[[Connection, ConnectionClosed], None],
    ) -> None:
        self._services = services
        self._thread: LoopThread = services.thread
        self._buffers = services.buffers
        self._check = services.config.checksum != "off"
        self._message_bytes = services.config.message_bytes
        self._core = core
        self._outbox = core.outbox
        self._digest: bytes = core.agreement.digest[:16]  # the same on both sides
        self._dialled: Dialled | None = None  # on the side that connected
        self._driver = ConnectionDriver(link, core, services, lanes, peer)
        self._shown = OwnWindows(self._driver, windows)
        self._opened = PeerWindows(self._driver)
        self._on_device: DeviceRequests | None = None  # made when first needed
        self._on_ended = ended
        self._driver.serve(self, self._acts())
        self._driver.lane_setup.on_open = self._shown.lane_opened

    def __repr__(self) -> str:
        driver = self._driver
        text = f"{self._core.phase.value} for {driver.age_s:.1f} s"
        if not self.closed:
            text += f", {self._core.open_requests} requests"
            text += f", last frame {driver.silent_s:.1f} s ago"
        return f"<Connection to {driver.peer} over {self.transport}, {text}>"

    @property
    def peer(self) -> PeerInfo:
        """Return the peer's name, address and identity."""
        return self._driver.peer

    @property
    def transport(self) -> str:
        """Return the name of the transport that carries its data, such as ``"tcp"``."""
        return self._driver.active.name

    @property
    def transport_report(self) -> TransportReport:
        """Return the considered transports, and why each was or was not chosen."""
        return self._driver.active.report

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent: it is closing, closed or lost."""
        return self._core.closed

    # --- messages ---------------------------------------------------------------------

    def send(
        self, tag: int, buffer: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Send a message to the receiver of a tag; the result is its length in bytes.

        Completes when ``buffer`` may be reused, whether or not the message has arrived.
        A small message completes at once; a large one is sent once the peer has posted
        memory for it. Messages of one tag arrive in the order they were sent.

        Args:
            tag: 0 to 2**64 - 1.
            buffer: Contiguous memory, also a tensor on a GPU; then the send first waits
                for the work queued on the thread's current stream.
            deadline: Seconds from now, a timedelta, or an instant of the loop's clock,
                ``kvwire.Instant(loop.time() + 5)``; None for as long as it takes.

        Raises:
            UsageError: The buffer or tag cannot be used.
            BackendUnavailable: A GPU does not work, or the connection cannot move its
                memory. From the await: the work queued on the stream has failed.
            ConnectionClosed: From the await: the connection is closing or closed.
            MessageTooLarge: From the await: the message exceeds the receiver's limit.
            DeadlineExceeded: From the await.

        Cancel safety:
            Cancelling the await does not stop the message. ``buffer`` must stay
            unchanged until ``await request.released()`` returns.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Connection.send")
        payload = as_payload(buffer, writable=False)
        if type(tag) is not int or not 0 <= tag <= TAG_MAX:
            tag = checked_tag(tag)
        at = None if deadline is None else absolute(deadline)
        nbytes = payload.nbytes
        if nbytes <= EAGER_BYTES_MAX and self._sent_at_once(tag, payload):
            # Its memory is free already. Made without an ``__init__``, for speed.
            request: Request[int] = _new(Request)
            request._over = True
            request._value = nbytes
            return request
        if nbytes > REQUEST_BYTES_MAX:
            check_size(nbytes)
        return self._post(Request(self, _SEND, tag, payload, at))

    @overload
    def recv(
        self, tag: int, into: None = None, *, deadline: Deadline = None
    ) -> Request[bytearray]: ...

    @overload
    def recv(
        self, tag: int, into: Memory, *, deadline: Deadline = None
    ) -> Request[int]: ...

    def recv(
        self, tag: int, into: Memory | None = None, *, deadline: Deadline = None
    ) -> Request[int] | Request[bytearray]:
        """Receive the next message of a tag.

        Args:
            tag: 0 to 2**64 - 1.
            into: Writable contiguous memory, also a tensor on a GPU, as for
                :meth:`send`; the result is the number of bytes received. Without it,
                the result is a new ``bytearray``, of at most ``message_bytes``.
            deadline: As for :meth:`send`.

        Raises:
            UsageError: The memory or tag cannot be used.
            BackendUnavailable: As for :meth:`send`.
            ConnectionClosed: From the await: no message of this tag is left, and none
                can arrive.
            MessageTooLarge: From the await. With ``into``, the message waits for a
                larger buffer. Without, it exceeded ``message_bytes`` or free memory and
                was refused: its send fails; the next receive gets the next message.
            IntegrityError: From the await: the message arrived damaged.
            DeadlineExceeded: From the await.

        Cancel safety:
            Safe as long as no message was matched: a receive is posted only while it is
            awaited, and takes no message otherwise; awaiting it again posts it again.
            After a match it continues without the waiter, and ``into`` is in use until
            ``await request.released()`` returns.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Connection.recv")
        if type(tag) is not int or not 0 <= tag <= TAG_MAX:
            tag = checked_tag(tag)
        at = None if deadline is None else absolute(deadline)
        payload = None
        if into is not None:
            payload = as_payload(into, writable=True, what="into")
        return self._post(Request(self, _RECV, tag, payload, at))

    @property
    def unreceived(self) -> dict[int, int]:
        """Return the number of unreceived messages per tag, including announced ones.

        The number is bounded by the receive window (``window_messages``,
        ``window_bytes``) and by the number of requests; beyond that, senders wait.
        """
        return self._core.messages.unreceived

    def discard(self, tag: int) -> int:
        """Drop a tag's messages, present and future, until its next ``recv``.

        Use it for answers that are no longer needed. The sender gets its credit back.
        If a message was only announced, its send fails with
        :exc:`~kvwire.PeerCancelled`. The latest 4,096 tags are remembered.

        Returns:
            The number of messages that had arrived or were on their way.

        Raises:
            UsageError: The tag cannot be used, or a receive is waiting for it.
        """
        self._thread.check("Connection.discard")
        if type(tag) is not int or not 0 <= tag <= TAG_MAX:
            tag = checked_tag(tag)
        dropped = self._core.messages.discard(tag)
        self._driver.run()
        return dropped

    # --- one-sided --------------------------------------------------------------------

    def put(
        self, buffer: Memory, grant: Grant, *, deadline: Deadline = None
    ) -> Request[int]:
        """Write a buffer into memory that the peer has granted.

        The result, once every byte is in the peer's memory, is the number of bytes.

        Args:
            buffer: As many bytes as the grant, or as its part ``grant[a:b]``, covers;
                also a tensor on a GPU, as for :meth:`send`.
            grant: A grant that the peer made for this connection.
            deadline: As for :meth:`send`.

        Raises:
            UsageError: The sizes differ, or the grant is for another connection.
            BackendUnavailable: As for :meth:`send`.
            ConnectionClosed: From the await: the connection is closing or closed.
            AccessDenied, StaleRegion, DeadlineExceeded: From the await. Part of the
                bytes may have been written.

        Cancel safety:
            Cancelling the await does not stop the write. ``buffer`` must stay unchanged
            until ``await request.released()`` returns.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Connection.put")
        payload = as_payload(buffer, writable=False)
        return self._one_sided(Request(self, _PUT, grant, payload, absolute(deadline)))

    def get(
        self, grant: Grant, into: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Read memory that the peer has granted.

        Completes when every byte is in ``into``. The result is their number.

        Args:
            grant: Made by the peer for this connection, or a part ``grant[a:b]``.
            into: Writable memory of as many bytes, also a tensor on a GPU, as for
                :meth:`send`.
            deadline: As for :meth:`send`.

        Raises:
            UsageError: The sizes differ, or the grant is for another connection.
            BackendUnavailable: As for :meth:`send`.
            ConnectionClosed: From the await: the connection is closing or closed.
            AccessDenied, StaleRegion, IntegrityError, DeadlineExceeded: From the await;
                the contents of ``into`` are then undefined.

        Cancel safety:
            Cancelling the await does not stop the read. ``into`` is busy until
            ``await request.released()`` returns.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Connection.get")
        payload = as_payload(into, writable=True, what="into")
        return self._one_sided(Request(self, _GET, grant, payload, absolute(deadline)))

    async def window(self, name: str, *, deadline: Deadline = None) -> RemoteWindow:
        """Open a window of the peer, to read blocks that it offers.

        Args:
            name: The name that the peer has given to ``expose``.
            deadline: As for :meth:`send`.

        Raises:
            AccessDenied: The peer exposes no window of this name.
            ConnectionClosed: The connection is closing or closed.
            DeadlineExceeded: There was no answer in time.

        Cancel safety: safe, nothing stays open.
        """
        self._thread.check("Connection.window")
        opened = await self._opened.open(name, absolute(deadline))
        return RemoteWindow(name, self._thread, opened)

    # --- KV transfers -----------------------------------------------------------------

    def pull(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> Incoming:
        """Request a transfer that the peer publishes, now or later.

        Args:
            id: The name that both applications use for the transfer.
            cache: The cache to fill.
            blocks: Block ids in token order, or ``{group: ids}``.
            deadline: As for ``send``; the outcome has the blocks that landed until
                then.
            priority: 0 to 255; chunks of a transfer with a higher priority go first.
            tokens: The number of valid tokens, if the last block is not full.
            hashes: One per block; ``have`` can then name blocks already here.
            content: A name for the whole token sequence. Both sides compare it instead
                of the hashes, which works even if their block sizes differ.
            have: Hashes of blocks not to send because this side has them; or a
                predicate.
            lease_s: Seconds to wait for a new link after a link was lost.
            codec: A lossy encoding of the payload, the same at the peer: ``"fp8"``,
                ``"int8"`` or ``"int4"``. See docs/topics/codecs.md.
            free: A callback without arguments. It runs once, on the loop, when kvwire
                can no longer touch the blocks, however the transfer ends.

        Returns:
            The transfer. Await it for its outcome. Leaving ``async with
            connection.pull(...) as incoming:`` aborts an unfinished transfer, and waits
            until it has drained.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent, and
                ``free`` is not called. If the connection is closed or lost, the
                transfer has an outcome instead.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Connection.pull")
        check_options("pull", options)
        services = self._services
        incoming = Incoming(services, id, cache, blocks, options)
        services.registry.ask(incoming, self._driver)
        return incoming

    def push(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[SendOptions],
    ) -> Outgoing:
        """Send the peer a transfer that it expects, now or later.

        Args:
            id: The name that both applications use for the transfer.
            cache: The cache that holds the blocks.
            blocks: Block ids in token order, or ``{group: ids}``.
            deadline, priority, tokens, hashes, content, lease_s, codec, free: As for
                :meth:`pull`.
            group_bytes: Consecutive layers are sent together until they have this many
                bytes; None for the default, 1 for layer by layer.
            growing: Whether some blocks for ``tokens`` are not known yet, as in chunked
                prefill; ``extend`` names them later.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent. If
                the connection is closed or lost, the transfer has an outcome instead.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("Connection.push")
        check_options("push", options)
        services = self._services
        outgoing = Outgoing(services, id, cache, blocks, options)
        services.registry.ask(outgoing, self._driver)
        return outgoing

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Finish the open requests, send CLOSE, and end, within ``close_timeout_s``.

        Unmatched receives fail with :exc:`~kvwire.ClosedOK`, on both sides. Returns
        when this connection no longer touches any memory.

        Cancel safety: safe. The connection continues to close; call it again to wait.
        """
        self._thread.check("Connection.close")
        if not self._core.closed:
            services = self._services
            driver = self._driver
            services.registry.closing(driver)
            self._core.close(services.loop.time(), services.config.close_timeout_s)
            driver.set_timer()
            driver.run()
        await self.wait_closed()

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the connection now; every open request fails. Never raises."""
        self._thread.check("Connection.abort")
        if not self._core.closed:
            self._core.fail(ConnectionLost(printable(str(reason))))
            self._driver.run()
        self._driver.link.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, for whatever reason.

        Cancel safety: safe, it only watches.
        """
        self._thread.check("Connection.wait_closed")
        await asyncio.shield(self._driver.ended)

    async def __aenter__(self) -> Self:
        """Return the connection; it is closed at the end of the block."""
        self._thread.check("async with Connection")
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close, or abort if an exception left the block."""
        if error is not None and self._thread.ident != FORKED:
            self.abort(f"aborted by {type(error).__name__}")
        await self._thread.leave(self.close)

    # --- for its requests, as RequestOwner --------------------------------------------

    def _describe(self, request: Request[Any]) -> str:
        record = request._record
        peer = shown(self.peer.name)
        if record is None:
            return f"recv from {peer}, not posted: nobody awaits it"
        if self._on_device is not None and record in self._on_device.unready:
            return (
                f"{record.kind.value} with {peer}, waits for work queued on its device"
            )
        if record.kind in _MESSAGES:
            what = f"{record.kind.value} of tag {record.tag}, with {peer}"
            if record.state is RequestStage.POSTED:
                return f"{what}, waits for {_MESSAGES[record.kind]}"
        else:
            what = f"{record.kind.value} with {peer}"
        return f"{what}, {record.moved} of {record.nbytes} bytes moved"

    def _cancel(self, request: Request[Any]) -> None:
        if request._record is None:
            error = RequestCancelled("the receive was cancelled on this side")
            request._complete(None, error)
            return
        self._core.cancel(request._record)
        self._driver.run()

    def _withdraw(self, request: Request[Any]) -> None:
        record = request._record
        if record is None or record.kind is not _RECV:
            return
        record.context = None
        if self._core.withdraw(record):
            request._record = None
            self._driver.run()
        else:
            record.context = request

    def _when_released(self, request: Request[Any], call: Callable[[], None]) -> None:
        record = request._record
        if record is None or record.buffer is None:
            call()
        else:
            self._buffers.on_drained(record.buffer, call)

    def _post(self, request: Request[Any]) -> Request[Any]:
        """Start a request in the core, and run the driver."""
        core = self._core
        kind = request._kind
        what = request._what
        memory = request._memory
        nbytes = self._message_bytes
        at = request._deadline
        lent: BufferId | None = None
        if memory is not None:
            nbytes = memory.nbytes
            lent = self._buffers.lend(memory)
        try:
            if type(memory) is Fragments and memory.device is not None:
                assert lent is not None
                record = self._posted_on_device(request, memory.device, lent)
            elif kind is _RECV:
                record = core.recv(what, lent, nbytes, deadline=at)
            else:
                assert lent is not None, "only a receive may come without memory"
                if kind is _SEND:
                    record = core.send(what, lent, nbytes, deadline=at)
                else:
                    where = AccessBody(
                        what.grant, what.generation, what.token, what.offset, nbytes
                    )
                    verb = core.put if kind is _PUT else core.get
                    record = verb(lent, nbytes, where=where, deadline=at)
        except KVWireError as exc:
            if lent is not None:
                self._buffers.take_back(lent)
            if not isinstance(exc, ConnectionClosed):
                raise
            request._complete(None, exc)
            return request
        request._record = record
        record.context = request
        # An unmatched receive sends nothing.
        if self._outbox.frames or self._outbox.events:
            self._driver.run()
        if at is not None and not request._over:
            self._driver.set_timer()
        return request

    # --- inside -----------------------------------------------------------------------

    def _post_sink(self, sink: MessageSink, tag: int) -> None:
        """Post the receive of a sink's next message."""
        record = self._core.recv(tag, None, self._message_bytes, None, stays=True)
        record.context = sink
        sink.posted = record
        if not self._driver.running and self._outbox.events:
            self._driver.run()  # it may post the receive after this one

    def _withdraw_sink(self, record: RequestRecord) -> None:
        if not self._core.withdraw(record) and not record.over:
            record.context = None  # a large message is arriving, and is dropped
        self._driver.run()

    def _posted_on_device(
        self, request: Request[Any], device: Device, lent: BufferId
    ) -> RequestRecord:
        if self._on_device is None:
            self._on_device = DeviceRequests(self._driver)
        return self._on_device.post(request, device, lent)

    def _adopt(self, request: Request[Any]) -> None:
        """Start a request that waited for this connection; an error completes it."""
        request._owner = self
        what = request._what
        memory = request._memory
        if request._kind not in _MESSAGES:
            self._one_sided(request)
        elif (
            request._kind is _SEND
            and memory is not None
            and memory.nbytes <= EAGER_BYTES_MAX
            and self._sent_at_once(what, memory)
        ):
            request._complete(memory.nbytes, None)
        else:
            self._post(request)
        if request._watchers:
            request._watch_memory()

    def _sent_at_once(self, tag: int, payload: Payload) -> bool:
        """Send a small message if credit and link allow; return whether it was sent."""
        link = self._driver.link
        # Not while the link is full, nor behind as many frames as may fill it.
        if link.queued_bytes >= LINK_QUEUE_BYTES or not isinstance(payload, memoryview):
            return False
        nbytes = payload.nbytes
        if frames := self._outbox.frames:
            if len(frames) >= _FRAMES_MAX:
                return False
            if sum(len(body) for _, body in frames) > _FRAMES_BYTES_MAX:
                return False
        check = view_digest(payload) & LOW_32_BITS if self._check else None
        header = self._core.eager_header(tag, nbytes, check)
        if header is None:
            return False
        if frames:
            # They have the numbers before this one, and the driver sends them next.
            whole = payload.obj
            if type(whole) is bytes and len(whole) == nbytes:
                body = whole  # it cannot change
            else:
                body = payload.tobytes()
            frames.append((header, body))  # bounded: LINK_QUEUE_BYTES
        elif not link.send_now(header, payload if nbytes else None):
            link.flush()
        return True

    def _one_sided(self, request: Request[Any]) -> Request[Any]:
        """Start a put or get, after checking the connection and size of its grant."""
        memory = request._memory
        assert memory is not None
        check_grant(request._what, memory.nbytes, self._digest)
        if memory.nbytes:
            return self._post(request)
        request._complete(0, None)
        return request

    def _acts(self) -> EventActs:
        """Return the handler for each type of the core's events."""
        return {
            RequestDone: self._request_done,
            SegmentMarked: partial(segment_event, self._core),
            SegmentLanded: partial(segment_event, self._core),
            SegmentsAcknowledged: self._of_transfer,
            TransferSettled: self._of_transfer,
            TransferAgreed: self._of_transfer,
            TransferOpened: partial(self._services.registry.opened, self._driver),
            MessageArrived: _act_on,
            MessageKept: self._keep,
            MessageDropped: lambda event: self._driver.held.pop(event.buffer),
            MemoryWanted: self._provide,
            **self._shown.acts(),
            **self._opened.acts(),
            Ended: self._ended,
        }

    def _ended(self, event: Ended) -> None:
        self._shown.end()
        self._opened.end(event.error)
        self._on_ended(self, event.error)

    def _of_transfer(
        self, event: SegmentsAcknowledged | TransferSettled | TransferAgreed
    ) -> None:
        leg = event.request.context
        if not isinstance(leg, Leg):
            return
        try:
            if isinstance(event, TransferAgreed):
                leg.agreed(TransferOffer.decode(event.description))
            else:
                leg.event(event)
        except ProtocolError as exc:
            self._core.fail(exc)
        except ProfileMismatch as exc:
            leg.refuse(exc, WireCode.PROFILE)

    def _keep(self, event: MessageKept) -> None:
        """Hold the bytes of a message whose sink has ended while it arrived."""
        held = memoryview(bytearray(event.body))
        self._driver.held[event.buffer] = held  # bounded: EAGER_WINDOW_BYTES

    def _provide(self, event: MemoryWanted) -> None:
        """Allocate memory for a message that matches a receive without ``into``."""
        if event.request.on_device:
            assert self._on_device is not None
            self._on_device.wanted(event)
            return
        try:
            memory = uncleared(event.nbytes)
        except MemoryError:
            error = MessageTooLarge(
                f"the receiver has no memory for a message of {event.nbytes} bytes; "
                "it was refused"
            )
            self._core.refuse(event.request, error, WireCode.TOO_LARGE)
        else:
            lent = self._buffers.lend(memoryview(memory))
            self._core.messages.provide(event.request, lent)
        self._driver.run()

    def _request_done(self, event: RequestDone) -> None:
        record = event.request
        request = record.context
        if record.kind in _TRANSFERS:
            if isinstance(request, Leg):
                request.ended(event.error)
            else:
                self._services.registry.request_over(record, self._driver)
            return
        # Break the reference cycle, or only the garbage collector would free both.
        record.context = None
        held = None
        if event.held is not None:
            held = self._driver.held.pop(event.held)
        if not isinstance(request, Request | MessageSink):
            if isinstance(request, WindowAsk | WindowOpening):
                request.done(event)
            elif record.kind is _SERVE_READ:
                self._shown.served.pop(record, None)
            return
        if event.error is not None:
            request._complete(None, event.error)
        elif record.kind is not _RECV or (request._memory is not None and held is None):
            request._complete(event.nbytes, None)
        else:
            result = self._received(request._memory, record, event.nbytes, held)
            request._complete(result, None)

    def _received(
        self,
        memory: Payload | None,
        record: RequestRecord,
        nbytes: int,
        held: memoryview | Fragments | None,
    ) -> int | bytearray:
        """Return the result of a receive: the number of bytes, or the bytes."""
        if memory is not None:
            assert held is not None
            if nbytes:
                copy(held, slice_payload(memory, 0, nbytes))
            return nbytes
        if held is None:
            assert record.buffer is not None
            held = self._buffers.take(record.buffer)
        assert isinstance(held, memoryview)
        assert isinstance(held.obj, bytearray)
        return held.obj


def send_now(connection: Connection, tag: int, body: bytes) -> bool:
    """Send a message if it needs no waiting; return whether it was sent.

    If not, use :meth:`Connection.send`. It is for upper rooms, which send many small
    messages on the connection's own loop.
    """
    return len(body) <= EAGER_BYTES_MAX and connection._sent_at_once(
        tag, memoryview(body)
    )


def _act_on(event: MessageArrived) -> None:
    """Pass a message to the sink that stays posted for it."""
    sink = event.request.context
    assert isinstance(sink, MessageSink)
    sink._arrived(memoryview(event.body))
