"""A peer named by address or selector, and the choice of the process to dial.

A peer has one connection at a time. The connection is dialled on first use, and again
after it has ended. Attempts are bounded: they are made only while a caller waits, at
most ``PEER_ATTEMPTS_MAX`` in a round, and the pause after each round doubles. A forged
record costs no more than these attempts, because the process that answers has to
authenticate, and has to be the incarnation that the record names.

Changes in the directory affect only the choice of the next member to dial. If the
connected member has left or moved, new work goes to another member as soon as there is
one, and the old connection is closed when it is idle.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Final, Unpack, overload

from kvwire.aio import (
    Closing,
    LoopThread,
    Upkeep,
    absolute,
    running_loop,
    start_task,
    yields_before_raising,
)
from kvwire.backend import Payload
from kvwire.directory import Change, ChangeKind, Record, Selector
from kvwire.endpoint.arguments import check_size, checked_tag
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.links import Links
from kvwire.endpoint.membership import Membership
from kvwire.endpoint.reconnect import REDIAL_S, Reconnector
from kvwire.endpoint.remote_window import RemoteWindow
from kvwire.endpoint.request import Request
from kvwire.endpoint.windows.opened import OpenedWindow
from kvwire.errors import (
    AuthenticationFailed,
    BackendUnavailable,
    ClosedOK,
    ConnectError,
    DeadlineExceeded,
    HandshakeError,
    KVWireError,
    RequestCancelled,
    UsageError,
    shown,
    wrong_type,
)
from kvwire.kv.blocks import Blocks
from kvwire.kv.fragments import Fragments
from kvwire.kv.paged import PagedCache
from kvwire.memory.buffers import Memory, as_payload
from kvwire.proto.state import RequestKind
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.options import ReceiveOptions, SendOptions, check_options
from kvwire.transfers.outgoing import Outgoing
from kvwire.types import Address, Deadline, Grant

# The most members tried in one round, and the longest pause between two rounds. So a
# directory full of forged records costs at most 16 attempts a second.
PEER_ATTEMPTS_MAX: Final = 16
PEER_REDIAL_S_MAX: Final = 1.0

logger: logging.Logger = logging.getLogger("kvwire.connections")

# Waiting does not help with these errors, but trying another member may.
_FINAL: Final = (BackendUnavailable, HandshakeError, UsageError)
_ONE_SIDED: Final = frozenset({RequestKind.PUT, RequestKind.GET})
# If a candidate does not answer, there is still time to try this many others.
_SHARES_MAX: Final = 4


class Peer(Closing):
    """Represents the process at an address, or a member that a selector matches.

    Created by :meth:`Communicator.peer <kvwire.Communicator.peer>`. It is dialled on
    first use, and again, with pauses, after its connection has ended. A selector picks
    the member that is least busy at the time of dialling, and another member only after
    the first has left; later changes of load have no effect. Verbs return at once. A
    request waits at most ``handshake_timeout_s`` for a connection, and then fails with
    :exc:`~kvwire.ConnectError`; a transfer ends with that reason in its outcome. Once a
    request has waited in vain, later ones fail after one attempt, until an attempt
    succeeds or a member joins: a process that has ended costs its time once. A new
    connection keeps no state from the previous one: a message goes to the process that
    answers now, which may differ from the process that received the last message.
    """

    def __init__(
        self,
        links: Links,
        membership: Membership,
        recovery: Reconnector,
        peers: dict[str, Peer],
        where: str,
    ) -> None:
        self._links = links
        self._services = links.services
        self._thread: LoopThread = links.services.thread
        self._membership = membership
        self._recovery = recovery
        # The communicator's peers that are not closed, by address or selector.
        self._peers = peers
        self._where = where
        self._selector = Selector.parse(where) if "=" in where else None
        try:
            self._address = None if self._selector else Address.parse(where)
        except UsageError as exc:
            remedy = 'a peer is "host:port", or a selector such as "role=decode"'
            raise UsageError(f"{exc}; {remedy}") from None
        self._own_key = links.identity.incarnation.hex()
        self._closed = False
        self._last: Connection | None = None
        # The connected member; None once it has left.
        self._record: Record | None = None
        self._failures: dict[str, int] = {}
        # The last warning for each of them.
        self._warnings: dict[str, str] = {}
        self._upkeep = Upkeep(REDIAL_S, PEER_REDIAL_S_MAX)
        # Whether a request has waited in vain since the last connection or new member.
        self._waited = False
        self._dialling: asyncio.Task[None] | None = None
        self._found: asyncio.Future[Connection] | None = None
        self._waiting = 0
        self._joined = asyncio.Event()
        # Requests that wait for a connection.
        self._unposted: dict[Request[Any], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        if self._selector is not None:
            membership.listen(self._changed)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.connection or 'not connected'}"
        return f"<Peer {self._where!r}, {state}>"

    @property
    def where(self) -> str:
        """Return the peer's address or selector."""
        return self._where

    @property
    def connection(self) -> Connection | None:
        """Return the connection for the next request; None if there is none."""
        last = self._last
        return None if last is None or last._core.closed else last

    async def connect(self) -> Connection:
        """Dial it now if it is not connected, and return the connection.

        Once the peer is another process, the old connection may be closed when it is
        idle.

        Raises:
            ConnectError: No matching process could be reached within
                ``handshake_timeout_s``; the text says why the last attempt failed.
            HandshakeError, UsageError, BackendUnavailable: The process at the address
                cannot be used. With a selector, other members are tried first.
            ClosedOK: The peer, or the communicator, is closed.

        Cancel safety: safe, dialling ends when no caller waits for it.
        """
        self._thread.check("Peer.connect")
        return await self._connect()

    # --- verbs ------------------------------------------------------------------------

    def send(
        self, tag: int, buffer: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Send a message; see :meth:`Connection.send <kvwire.Connection.send>`.

        Cancel safety: as for that method.
        """
        connection = self._usable("send")
        if connection is not None:
            return connection.send(tag, buffer, deadline=deadline)
        payload = as_payload(buffer, writable=False)
        check_size(payload.nbytes)
        return self._defer(RequestKind.SEND, checked_tag(tag), payload, deadline)

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

        Cancel safety: as for that method.
        """
        connection = self._usable("recv")
        if connection is not None:
            return connection.recv(tag, into, deadline=deadline)
        payload = None
        if into is not None:
            payload = as_payload(into, writable=True, what="into")
        return self._defer(RequestKind.RECV, checked_tag(tag), payload, deadline)

    def put(
        self, buffer: Memory, grant: Grant, *, deadline: Deadline = None
    ) -> Request[int]:
        """Write to granted memory; see :meth:`Connection.put <kvwire.Connection.put>`.

        A grant for an earlier connection raises UsageError.

        Cancel safety: as for that method.
        """
        connection = self._usable("put")
        if connection is not None:
            return connection.put(buffer, grant, deadline=deadline)
        payload = as_payload(buffer, writable=False)
        return self._defer(RequestKind.PUT, grant, payload, deadline)

    def get(
        self, grant: Grant, into: Memory, *, deadline: Deadline = None
    ) -> Request[int]:
        """Read granted memory; see :meth:`Connection.get <kvwire.Connection.get>`.

        A grant for an earlier connection raises UsageError.

        Cancel safety: as for that method.
        """
        connection = self._usable("get")
        if connection is not None:
            return connection.get(grant, into, deadline=deadline)
        payload = as_payload(into, writable=True, what="into")
        return self._defer(RequestKind.GET, grant, payload, deadline)

    @yields_before_raising
    async def window(self, name: str) -> RemoteWindow:
        """Open a window; see :meth:`Connection.window <kvwire.Connection.window>`.

        The peer is dialled if it is not connected. After the connection has ended, the
        next ``get`` dials again and reopens the window. If another process answers,
        blocks that the first process offered are missing.

        Raises:
            AccessDenied: The peer exposes no window of this name.
            ConnectError, HandshakeError, ClosedOK: As for :meth:`connect`.

        Cancel safety: safe, nothing stays open.
        """
        self._thread.check("Peer.window")

        async def opened() -> OpenedWindow:
            connection = await self._connect()
            return await connection._opened.open(name, None)

        return RemoteWindow(name, self._thread, await opened(), opened)

    def pull(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> Incoming:
        """Request a transfer; see :meth:`Connection.pull <kvwire.Connection.pull>`.

        If no connection can be made, the transfer ends with an outcome.

        Raises:
            UsageError: As for that method.
            ClosedOK: The communicator is closed.
        """
        self._thread.check("Peer.pull")
        check_options("pull", options)
        incoming = Incoming(self._services, id, cache, blocks, options)
        self._start(incoming)
        return incoming

    def push(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[SendOptions],
    ) -> Outgoing:
        """Send a transfer; see :meth:`Connection.push <kvwire.Connection.push>`.

        If no connection can be made, the transfer ends with an outcome.

        Raises:
            UsageError: As for that method.
            ClosedOK: The communicator is closed.
        """
        self._thread.check("Peer.push")
        check_options("push", options)
        outgoing = Outgoing(self._services, id, cache, blocks, options)
        self._start(outgoing)
        return outgoing

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Stop dialling, and close the connection; requests waiting for it fail.

        Cancel safety: safe. The connection continues to close; call it again to wait.
        """
        self._thread.check("Peer.close")
        self._stop()
        if self._last is not None:
            await self._last.close()

    def _stop(self) -> None:
        """Stop dialling; requests and transfers waiting for a connection fail."""
        if self._closed:
            return
        self._closed = True
        if self._selector is not None:
            self._membership.forget(self._changed)
        self._peers.pop(self._where, None)
        if self._found is not None and not self._found.done():
            self._found.set_exception(ClosedOK(f"peer {self._where!r} was closed"))
        if self._dialling is not None:
            self._dialling.cancel()

    # --- what waits for a connection --------------------------------------------------

    def _usable(self, verb: str) -> Connection | None:
        """Return the connection on which a request can begin now, if there is one."""
        if running_loop() is not self._thread.loop:
            self._thread.check(f"Peer.{verb}")
        return None if self._closed else self.connection

    def _defer(
        self,
        kind: RequestKind,
        what: int | Grant,
        payload: Payload | None,
        deadline: Deadline,
    ) -> Request[Any]:
        """Make a request that is posted as soon as there is a connection."""
        self._thread.check(f"Peer.{kind.value}")
        if kind in _ONE_SIDED and not isinstance(what, Grant):
            raise wrong_type("grant", what, "a kvwire.Grant of the peer")
        return self._post(Request(self, kind, what, payload, absolute(deadline)))

    def _start(self, end: Incoming | Outgoing) -> None:
        """Request a transfer from the peer, now or as soon as there is a connection."""
        self._links.check_open()
        connection = None if self._closed else self.connection
        if connection is not None:
            self._services.registry.ask(end, connection._driver)
            return
        self._services.registry.defer(
            end, lambda: f"there is no connection to {self._unconnected()}"
        )
        task = start_task(self._ask(end))
        self._tasks.add(task)  # bounded: REQUESTS_MAX, each is a transfer of the caller
        task.add_done_callback(self._tasks.discard)
        self._services.registry.connecting(end, task)

    async def _ask(self, end: Incoming | Outgoing) -> None:
        try:
            connection = await self._connect()
            self._services.registry.ask_deferred(end, connection._driver)
        except KVWireError as exc:
            self._services.registry.give_up(end, exc)

    async def _post_on_connection(self, request: Request[Any]) -> None:
        """Post a request as soon as there is a connection; an error completes it."""
        error: KVWireError
        try:
            connection = await self._connect_by(request._deadline)
            del self._unposted[request]
            connection._adopt(request)
        except KVWireError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001 - it is raised where the request is awaited
            error = KVWireError(f"the request to a peer failed: {exc!r}")
            error.__cause__ = exc
        else:
            return
        self._unposted.pop(request, None)
        request._complete(None, error)

    # --- for its requests, as RequestOwner --------------------------------------------

    def _describe(self, request: Request[Any]) -> str:
        if request not in self._unposted:
            return f"recv from peer {self._where!r}, not posted: nobody awaits it"
        return f"waits for a connection to {self._unconnected()}"

    def _cancel(self, request: Request[Any]) -> None:
        self._unpost(request)
        request._complete(None, RequestCancelled("it was cancelled on this side"))

    def _post(self, request: Request[Any]) -> Request[Any]:
        if request not in self._unposted:
            memory = request._memory
            if isinstance(memory, Fragments) and memory.device is not None:
                # Recorded now, on the caller's stream, since a task of this peer posts
                # it later.
                request._after = self._services.devices.queued(memory.device)
            # bounded: REQUESTS_MAX, each is a request of the caller
            self._unposted[request] = start_task(self._post_on_connection(request))
        return request

    def _withdraw(self, request: Request[Any]) -> None:
        if request._kind is RequestKind.RECV:
            self._unpost(request)
            request._watch_memory()

    def _unpost(self, request: Request[Any]) -> None:
        task = self._unposted.pop(request, None)
        if task is not None:
            task.cancel()

    def _when_released(self, request: Request[Any], call: Callable[[], None]) -> None:
        if request in self._unposted:
            request._watchers += (call,)
        else:
            call()

    # --- the connection ---------------------------------------------------------------

    async def _connect_by(self, deadline: float | None) -> Connection:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                return await self._connect()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"no connection in time to {self._unconnected()}"
            ) from None

    async def _connect(self) -> Connection:
        if self._closed:
            raise ClosedOK(f"peer {self._where!r} is closed")
        self._links.check_open()
        if (connection := self.connection) is not None:
            return connection
        if self._found is None:
            self._found = asyncio.get_running_loop().create_future()
            self._upkeep = Upkeep(REDIAL_S, PEER_REDIAL_S_MAX)
            self._dialling = start_task(self._dial(self._found), lasting=True)
        found = self._found
        self._waiting += 1
        patience_s = self._services.config.handshake_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(found)
        except TimeoutError:
            self._waited = True
            raise ConnectError(
                f"peer {self._where!r}: no member to connect to within {patience_s:g} "
                f"s; {self._reason}",
                address=self._where,
            ) from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._end_dialling()

    @property
    def _reason(self) -> str:
        """Return why there is no connection."""
        if self._upkeep.reason or self._selector is None:
            return self._upkeep.reason or "it has not answered"
        return self._membership.reason or "no member matches it"

    def _unconnected(self) -> str:
        return f"peer {self._where!r}: {self._reason}"

    def _end_dialling(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        if self._found is not None and not self._found.done():
            self._found.cancel()
        self._dialling = self._found = None

    async def _dial(self, found: asyncio.Future[Connection]) -> None:
        """Try one candidate after the other until one of them answers."""
        upkeep = self._upkeep
        async for _ in upkeep:
            candidates = self._candidates()
            if not candidates:
                if self._waited:
                    break
                self._joined.clear()
                await self._joined.wait()
                continue
            loop = asyncio.get_running_loop()
            end = loop.time() + self._services.config.handshake_timeout_s
            for record in candidates:
                left_s = end - loop.time()
                try:
                    connection = await self._try(record, len(candidates), left_s)
                except KVWireError as exc:
                    self._note_failure(upkeep, record, exc)
                    final = isinstance(exc, _FINAL) or isinstance(exc.__cause__, _FINAL)
                    if record is None and final:
                        found.set_exception(exc)
                        return
                else:
                    self._last = connection
                    self._record = record
                    self._waited = False
                    found.set_result(connection)
                    return
            if self._waited:
                break
            upkeep.lost(upkeep.reason)
        found.set_exception(
            ConnectError(
                f"peer {self._where!r}: still no member to connect to; {self._reason}",
                address=self._where,
            )
        )

    def _note_failure(
        self, upkeep: Upkeep, record: Record | None, error: KVWireError
    ) -> None:
        """Record and log why a candidate could not be connected to, with its name."""
        who = "" if record is None else f"{shown(record.name)}: "
        upkeep.reason = f"{who}{error}"
        level = logging.INFO
        # Retrying does not help with a wrong key, so a warning is logged once.
        if isinstance(error, AuthenticationFailed):
            key = "" if record is None else record.key
            text = str(error)
            if self._warnings.get(key) != text:
                level = logging.WARNING
                self._warnings[key] = text  # bounded: the members
        logger.log(level, "peer %r: %s", self._where, error)

    def _candidates(self) -> list[Record] | list[None]:
        """Return the members to try, ordered by failures, then by load."""
        if self._selector is None:
            return [None]
        meant = {
            key: record
            for key, record in self._membership.members.items()
            if self._selector.matches(record) and key != self._own_key
        }
        self._failures = {k: n for k, n in self._failures.items() if k in meant}
        self._warnings = {k: t for k, t in self._warnings.items() if k in meant}

        def order(record: Record) -> tuple[int, float, float]:
            failures = self._failures.get(record.key, 0)
            return failures, record.load, random.random()  # noqa: S311 - no secret

        return sorted(meant.values(), key=order)[:PEER_ATTEMPTS_MAX]

    async def _try(
        self, record: Record | None, candidates: int, left_s: float
    ) -> Connection:
        """Connect to one candidate.

        It has a share of the time to answer, so that others can be tried. Once it has
        answered, it has what is left of the round, ``left_s``, for its lanes.

        Raises:
            KVWireError: The candidate cannot be reached, or another process answers.
        """
        patience_s = self._services.config.handshake_timeout_s
        if record is None:
            assert self._address is not None
            connection = await self._links.connect(self._address, None, patience_s)
            self._warnings.clear()
            return connection
        answer_s = patience_s / min(candidates, _SHARES_MAX)
        timeout_s = max(left_s, answer_s)
        self._failures[record.key] = self._failures.get(record.key, 0) + 1
        connection = await self._links.connect(
            record.address, None, timeout_s, answer_s=answer_s
        )
        who = connection.peer.incarnation.hex()
        if record.incarnation not in ("", who):
            connection.abort("the directory names another start of the peer")
            raise ConnectError(
                f"{record.address} now belongs to {who[:8]}, no longer to "
                f"{record.incarnation[:8]}",
                address=record.address,
            )
        del self._failures[record.key]
        self._warnings.pop(record.key, None)
        return connection

    def _changed(self, change: Change) -> None:
        """Handle a change of a member."""
        assert self._selector is not None
        record = change.record
        mine = self._record
        meant = change.kind is not ChangeKind.LEFT and self._selector.matches(record)
        if meant:
            self._joined.set()
            self._waited = False
        live = self.connection
        if live is None:
            return
        if mine is not None and record.key == mine.key:
            same = meant and record.address == mine.address
            self._record = record if same else None
        elif mine is None and meant and record.key == live.peer.incarnation.hex():
            self._record = record  # it was unreachable for a while
        if self._record is None and self._candidates():
            self._last = None
            self._recovery.retire(live)
