"""A peer by where it is, or by what it does: the verbs, without a connection first."""

from __future__ import annotations

from typing import Any, Unpack, overload

from kvwire.connection import Connection
from kvwire.endpoint.peer import PeerState
from kvwire.endpoint.request import RequestState
from kvwire.kv.blocks import Blocks
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory
from kvwire.request import Request
from kvwire.transfer import Incoming, Outgoing
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.options import ReceiveOptions, SendOptions, check_options
from kvwire.transfers.outgoing import OutgoingState
from kvwire.types import Deadline, Grant


class Peer:
    """Stands for whoever is at an address, or is meant by a selector.

    Made by :meth:`Communicator.peer <kvwire.Communicator.peer>`. It is dialled when it
    is first used, and dialled again, with pauses, when its connection has ended. With a
    selector it is the least busy member that is meant and answers, and another one once
    that has left. Verbs return at once. What waits for a connection waits for at most
    ``handshake_timeout_s``; then a request fails with :exc:`~kvwire.ConnectError`, and
    a transfer has an outcome that says why. Messages go to whoever is there: a new
    connection knows nothing of the one before.
    """

    __slots__ = ("__weakref__", "_state")

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

    def pull(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> Incoming:
        """Ask for a transfer; see :meth:`Connection.pull <kvwire.Connection.pull>`.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent.
            ClosedOK: The communicator is closed.
        """
        self._state.thread.check("Peer.pull")
        check_options("pull", options)
        state = IncomingState(self._state.communicator, id, cache, blocks, options)
        self._state.start(state)
        return Incoming(state)

    def push(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[SendOptions],
    ) -> Outgoing:
        """Send a transfer; see :meth:`Connection.push <kvwire.Connection.push>`.

        Raises:
            UsageError: The cache or the blocks cannot be used; nothing was sent.
            ClosedOK: The communicator is closed.
        """
        self._state.thread.check("Peer.push")
        check_options("push", options)
        state = OutgoingState(self._state.communicator, id, cache, blocks, options)
        self._state.start(state)
        return Outgoing(state)

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
