"""A connection, and a peer that may have none yet: the four verbs, KV transfers."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Self, Unpack, overload

from kvwire.aio import FORKED, AsyncWith, LoopThread
from kvwire.endpoint.connection import ConnectionState
from kvwire.endpoint.peer import PeerState
from kvwire.endpoint.request import RequestState
from kvwire.kv.blocks import Blocks
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory
from kvwire.request import Request
from kvwire.transfer import Incoming, Outgoing
from kvwire.transfers.coded import incoming_kind, outgoing_kind
from kvwire.transfers.options import (
    ReceiveOptions,
    SendOptions,
    check_options,
)
from kvwire.types import Deadline, Grant, PeerInfo, TransportReport


class _TransferVerbs:
    """KV transfers, of a connection and of a peer that may have none yet."""

    __slots__ = ("_state",)

    _state: ConnectionState | PeerState

    def pull(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> Incoming:
        """Ask the peer for a transfer that it publishes, now or later.

        Args:
            id: The name both applications know it by.
            cache: Where it lands.
            blocks: Block ids in token order, or ``{group: ids}``.
            deadline: As for ``send``; the outcome then is what has landed.
            priority: 0 to 255; chunks of a higher one go first.
            tokens: Valid tokens in the list, where the last block is not full.
            hashes: One for each block; lets ``have`` name what is here already.
            content: A name of all the tokens, which both sides compare in place of
                their hashes: for blocks of other sizes.
            have: Hashes this side has, or a predicate: those blocks are not sent.
            lease_s: How long to wait for another link after a lost one.
            codec: Encodes what moves, with loss: ``"fp8"``, ``"int8"`` or ``"int4"``;
                the peer names the same. See docs/topics/codecs.md.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent. What
                a closed or lost connection does to it is its outcome.
            ClosedOK: The communicator of a :class:`~kvwire.Peer` is closed.
        """
        self._state.thread.check(f"{type(self).__name__}.pull")
        check_options("pull", options)
        state = incoming_kind(options)(
            self._state.communicator, id, cache, blocks, options
        )
        self._state.start(state)
        return Incoming(state)

    def push(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[SendOptions],
    ) -> Outgoing:
        """Send the peer a transfer that it expects, now or later.

        Args:
            id: The name both applications know it by.
            cache: Where it lies.
            blocks: Block ids in token order, or ``{group: ids}``.
            deadline: As for ``send``.
            priority: 0 to 255; chunks of a higher one go first.
            tokens: Valid tokens in the list, where the last block is not full.
            hashes: One for each block.
            content: As for :meth:`pull`.
            lease_s: How long to wait for another link after a lost one.
            codec: Encodes what moves, with loss: ``"fp8"``, ``"int8"`` or ``"int4"``;
                the peer names the same. See docs/topics/codecs.md.
            group_bytes: Layers smaller than this together travel together; None for
                the default, 1 for layer by layer.
            growing: Not all blocks that ``tokens`` need are known yet, as in chunked
                prefill; ``extend`` names the rest.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent. What
                a closed or lost connection does to it is its outcome.
            ClosedOK: The communicator of a :class:`~kvwire.Peer` is closed.
        """
        self._state.thread.check(f"{type(self).__name__}.push")
        check_options("push", options)
        state = outgoing_kind(options)(
            self._state.communicator, id, cache, blocks, options
        )
        self._state.start(state)
        return Outgoing(state)


class Connection(_TransferVerbs, AsyncWith):
    """Joins two authenticated sides; made by ``connect``, or from ``connections``.

    All of it belongs to the loop it was made on: a call from another thread, or after a
    fork, is a :exc:`~kvwire.UsageError`. The verbs return a
    :class:`~kvwire.Request` that has started already; await it for its result.
    """

    __slots__ = ("__weakref__", "_thread")

    _state: ConnectionState

    def __init__(self, state: ConnectionState) -> None:
        self._state = state
        self._thread: LoopThread = state.thread

    def __repr__(self) -> str:
        return repr(self._state)

    @property
    def peer(self) -> PeerInfo:
        """Tell who is at the other end."""
        return self._state.peer

    @property
    def transport(self) -> str:
        """Name the transport that carries its data, such as ``"tcp"``."""
        return self._state.transport

    @property
    def transport_report(self) -> TransportReport:
        """Name every transport considered, and why it was taken or not."""
        return self._state.transport_report

    @property
    def closed(self) -> bool:
        """Tell whether nothing more can be sent."""
        return self._state.closed

    # --- messages ---------------------------------------------------------------------

    def send(
        self, tag: int, buffer: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Send a message to the receiver of a tag; the result is its length in bytes.

        Completes when ``buffer`` may be reused, which says nothing about the receiver.
        A small message completes at once; a large one moves when the peer has posted
        memory for it. Messages of one tag are received in the order they were sent.

        Args:
            tag: 0 to 2**64 - 1.
            buffer: Contiguous memory; see :func:`kvwire.memory.buffers.as_payload`.
            deadline: Seconds from now, a timedelta, or an instant of the loop's clock,
                ``kvwire.Instant(loop.time() + 5)``; None for as long as it takes.

        Raises:
            UsageError: The buffer or tag cannot be used.
            ConnectionClosed: From the await: the connection is closing or closed.
            MessageTooLarge: From the await: it is over the receiver's limit.
            DeadlineExceeded: From the await.

        Cancel safety:
            Cancelling the await does not stop the message. ``buffer`` must stay
            unchanged until ``await request.released()`` returns.
        """
        if get_ident() != self._thread.ident:
            self._thread.check("Connection.send")
        return Request(self._state.send(tag, buffer, deadline))

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
            into: Writable contiguous memory; the result is how many bytes came. Without
                it, the result is a new ``bytearray``, of at most ``message_bytes``.
            deadline: As for :meth:`send`.

        Raises:
            UsageError: The buffer or tag cannot be used.
            ConnectionClosed: From the await: nothing of this tag is here and nothing
                can come.
            MessageTooLarge: From the await. With ``into``, the message waits for a
                larger buffer. Without, it was over ``message_bytes``, or there is no
                memory for it, and it was refused: its sender is told, and the next
                receive gets the next message.
            IntegrityError: From the await: it arrived damaged.
            DeadlineExceeded: From the await.

        Cancel safety:
            Safe while no message has been met: a receive that nobody waits for is not
            posted, so it takes no message, and awaiting the request posts it again.
            Once a message is on its way the receive goes on without the waiter;
            ``into`` is busy until ``await request.released()`` returns.
        """
        if get_ident() != self._thread.ident:
            self._thread.check("Connection.recv")
        state: RequestState[Any] = self._state.recv(tag, into, deadline)
        return Request(state)

    @property
    def unreceived(self) -> dict[int, int]:
        """Return how many messages of each tag are here, or announced, and unreceived.

        Bounded by the receive window (``window_messages``, ``window_bytes``) and by
        the number of requests: beyond it senders wait.
        """
        return self._state.unreceived

    def discard(self, tag: int) -> int:
        """Drop the messages of a tag, now and until the next ``recv`` of that tag.

        Use it for answers that nobody waits for any more. Their sender has its credit
        back; the send of a message that was only announced fails with
        :exc:`~kvwire.PeerCancelled`. The latest 4,096 tags are remembered.

        Returns:
            How many messages were here or on their way.

        Raises:
            UsageError: The tag cannot be used, or a receive waits for it.
        """
        if get_ident() != self._thread.ident:
            self._thread.check("Connection.discard")
        return self._state.discard(tag)

    # --- one-sided --------------------------------------------------------------------

    def put(
        self, buffer: Memory, grant: Grant, *, deadline: Deadline = None
    ) -> Request[int]:
        """Write a buffer into memory that the peer has granted.

        Completes when every byte is where it belongs. The result is their number.

        Args:
            buffer: As many bytes as the grant, or the part ``grant[a:b]`` of it.
            grant: Made by the peer for this connection.
            deadline: As for :meth:`send`.

        Raises:
            UsageError: The sizes differ, or the grant is of another connection.
            ConnectionClosed: From the await: the connection is closing or closed.
            AccessDenied, StaleRegion, DeadlineExceeded: From the await. Part of the
                bytes may have been written.

        Cancel safety:
            Cancelling the await does not stop the write. ``buffer`` must stay unchanged
            until ``await request.released()`` returns.
        """
        if get_ident() != self._thread.ident:
            self._thread.check("Connection.put")
        return Request(self._state.put(buffer, grant, deadline))

    def get(
        self, grant: Grant, into: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Read memory that the peer has granted.

        Completes when every byte is in ``into``. The result is their number.

        Args:
            grant: Made by the peer for this connection, or a part ``grant[a:b]``.
            into: Writable memory of as many bytes.
            deadline: As for :meth:`send`.

        Raises:
            UsageError: The sizes differ, or the grant is of another connection.
            ConnectionClosed: From the await: the connection is closing or closed.
            AccessDenied, StaleRegion, IntegrityError, DeadlineExceeded: From the await;
                ``into`` then holds nothing that can be used.

        Cancel safety:
            Cancelling the await does not stop the read. ``into`` is busy until
            ``await request.released()`` returns.
        """
        if get_ident() != self._thread.ident:
            self._thread.check("Connection.get")
        return Request(self._state.get(grant, into, deadline))

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Deliver what was begun, tell the peer, and end; at most ``close_timeout_s``.

        Receives that have met no message fail with :exc:`~kvwire.ClosedOK`, on both
        sides. Returns when nothing of this connection touches memory any more.

        Cancel safety: safe. The connection goes on closing; call it again to wait.
        """
        self._thread.check("Connection.close")
        await self._state.close()

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the connection now; every open request fails. Never raises."""
        self._thread.check("Connection.abort")
        self._state.abort(reason)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, for whatever reason.

        Cancel safety: safe, it only watches.
        """
        self._thread.check("Connection.wait_closed")
        await self._state.wait_closed()

    async def __aenter__(self) -> Self:
        """Return the connection; it is closed at the end of the block."""
        self._thread.check("async with Connection")
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close, or abort if the block was left by an exception."""
        if error is not None and self._thread.ident != FORKED:
            self.abort(f"aborted by {type(error).__name__}")
        await self._thread.leave(self.close)


class Peer(_TransferVerbs):
    """Stands for the process at an address, or for a member that a selector matches.

    Made by :meth:`Communicator.peer <kvwire.Communicator.peer>`. It is dialled when it
    is first used, and dialled again, with pauses, when its connection has ended. With a
    selector it is the member that was least busy when it was dialled, and another one
    once that has left: later loads change nothing. Verbs return at once. What waits for
    a connection waits for at most ``handshake_timeout_s``; then a request fails with
    :exc:`~kvwire.ConnectError`, and a transfer has an outcome that says why. Messages
    go to whoever is there: a new connection knows nothing of the one before.
    """

    __slots__ = ("__weakref__",)

    _state: PeerState

    def __init__(self, state: PeerState) -> None:
        self._state = state

    def __repr__(self) -> str:
        return repr(self._state)

    @property
    def where(self) -> str:
        """Return the address or the selector that names it."""
        return self._state.where

    @property
    def connection(self) -> Connection | None:
        """Return the connection that is used for what comes next; None without one."""
        live = self._state.live
        connection: Connection | None = None if live is None else live.public
        return connection

    async def connect(self) -> Connection:
        """Dial it now if it is not connected, and return the connection.

        The connection may be closed when it is idle, once the peer is somebody else.

        Raises:
            ConnectError: Nobody who is meant could be reached in
                ``handshake_timeout_s``; says why the last attempt failed.
            HandshakeError, UsageError, BackendUnavailable: Who is at the address cannot
                be used; with a selector others are tried.
            ClosedOK: The peer, or the communicator, is closed.

        Cancel safety: safe, dialling ends when nobody waits for it.
        """
        self._state.thread.check("Peer.connect")
        connection: Connection = (await self._state.connect()).public
        return connection

    # --- verbs ------------------------------------------------------------------------

    def send(
        self, tag: int, buffer: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Send a message; see :meth:`Connection.send <kvwire.Connection.send>`.

        Cancel safety: as there.
        """
        return self._request(lambda c, at: c.send(tag, buffer, at), deadline)

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
        """Receive a message; see :meth:`Connection.recv <kvwire.Connection.recv>`.

        Cancel safety: as there.
        """
        return self._request(lambda c, at: c.recv(tag, into, at), deadline, True)

    def put(
        self, buffer: Memory, grant: Grant, *, deadline: Deadline = None
    ) -> Request[int]:
        """Write into memory that the peer has granted to this connection.

        See :meth:`Connection.put <kvwire.Connection.put>`. A grant of an earlier
        connection is a UsageError.

        Cancel safety: as there.
        """
        return self._request(lambda c, at: c.put(buffer, grant, at), deadline)

    def get(
        self, grant: Grant, into: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Read memory that the peer has granted to this connection.

        See :meth:`Connection.get <kvwire.Connection.get>`. A grant of an earlier
        connection is a UsageError.

        Cancel safety: as there.
        """
        return self._request(lambda c, at: c.get(grant, into, at), deadline)

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Dial no more, and close the connection; what waits for one fails.

        Cancel safety: safe. The connection goes on closing; call it again to wait.
        """
        self._state.thread.check("Peer.close")
        await self._state.close()

    def _request(
        self, call: Any, deadline: Deadline, receives: bool = False
    ) -> Request[Any]:
        self._state.thread.check("a verb of Peer")
        state: RequestState[Any]
        state = self._state.request(call, deadline, receives=receives)
        return Request(state)
