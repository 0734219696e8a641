"""What is behind a :class:`~kvwire.Peer`: whom to dial, when, and when to change.

A peer has one connection at a time. It is made when something needs it, and again when
it has ended. Attempts are bounded: they are made only while somebody waits, at most
``PEER_ATTEMPTS_MAX`` in a round, with a pause after each round that doubles. So a
forged record costs its attempts and no more: who answers has to prove a key or a
certificate, and has to be the start that the record names.

What becomes of a member in the directory decides who is dialled next, and nothing else.
A connection whose member has left, or has moved, is used for nothing new as soon as
somebody else is there, and is closed when it is idle.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire.aio import Backoff, LoopThread, absolute, start_task
from kvwire.directory import Change, ChangeKind, Record, Selector
from kvwire.endpoint.connection import ConnectionState
from kvwire.endpoint.deferred import DeferredRequest
from kvwire.endpoint.limits import PEER_ATTEMPTS_MAX, PEER_REDIAL_S_MAX, REDIAL_S
from kvwire.endpoint.request import RequestState
from kvwire.errors import (
    AuthenticationFailed,
    BackendUnavailable,
    ClosedOK,
    ConnectError,
    HandshakeError,
    KVWireError,
    UsageError,
    WireCode,
)
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.outgoing import OutgoingState
from kvwire.types import Address, Deadline, Instant

if TYPE_CHECKING:
    from kvwire.endpoint.communicator import CommunicatorState

logger: logging.Logger = logging.getLogger("kvwire.connections")

# Waiting does not mend these; only where another member may be meant instead.
_FINAL = (BackendUnavailable, HandshakeError, UsageError)
# One that does not answer leaves time to try as many others.
_SHARES_MAX = 4


class PeerState:
    """Holds the state of one peer, on the loop of its communicator.

    Args:
        communicator: Whose peer it is.
        where: An address, or a selector.

    Raises:
        UsageError: The text is neither, or there is no directory.

    Attributes:
        communicator: Whose peer it is.
        where: The text by which it is named.
        thread: Who may call it.
        closed: Nothing is dialled any more.
    """

    def __init__(self, communicator: CommunicatorState, where: str) -> None:
        self.communicator = communicator
        self.where = where
        self.thread: LoopThread = communicator.thread
        self.closed: bool = False
        self._selector = Selector.parse(where) if "=" in where else None
        self._address = None if self._selector else Address.parse(where)
        self._own_key = communicator.incarnation.hex()
        self._connection: ConnectionState | None = None
        # Whose connection it is; None once that member has left.
        self._record: Record | None = None
        self._failures: dict[str, int] = {}
        self._reason = ""
        self._dialling: asyncio.Task[None] | None = None
        self._found: asyncio.Future[ConnectionState] | None = None
        self._waiting = 0
        self._joined = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        if self._selector is not None:
            communicator.membership.listen(self.changed)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.live or 'not connected'}"
        return f"<Peer {self.where!r}, {state}>"

    @property
    def live(self) -> ConnectionState | None:
        """Return the connection that is used for what comes next, if there is one."""
        connection = self._connection
        return None if connection is None or connection.closed else connection

    # --- verbs ------------------------------------------------------------------------

    def request(
        self,
        call: Callable[[ConnectionState, Deadline], RequestState[Any]],
        deadline: Deadline,
        *,
        receives: bool = False,
    ) -> RequestState[Any]:
        """Start a request now, or as soon as there is a connection."""
        live = self.live
        if live is not None and not self.closed:
            return call(live, deadline)
        at = absolute(deadline)
        deferred = DeferredRequest(
            self.thread,
            self.connect,
            partial(_flipped, call, None if at is None else Instant(at)),
            waits_for=lambda: f"peer {self.where!r}: {self._trouble}",
            deadline=at,
            receives=receives,
        )
        return deferred.outer

    def start(self, end: IncomingState | OutgoingState) -> None:
        """Ask the peer for one end of a transfer, now or when there is a connection."""
        self.communicator.check_open()
        live = self.live
        if live is not None and not self.closed:
            live.start(end)
            return
        self.communicator.registry.defer(end)
        self._run(self._ask(end))

    async def _ask(self, end: IncomingState | OutgoingState) -> None:
        try:
            connection = await self.connect()
            if end.outcome is None:
                end.ask(connection)
        except KVWireError as exc:
            if end.outcome is None:
                end.stop(exc, WireCode.GOING_AWAY)

    # --- the connection ---------------------------------------------------------------

    async def connect(self) -> ConnectionState:
        """Return the connection; dial if there is none.

        Raises:
            KVWireError: See :meth:`kvwire.Peer.connect`.

        Cancel safety: safe, dialling ends when nobody waits for it.
        """
        if self.closed:
            raise ClosedOK(f"peer {self.where!r} is closed")
        self.communicator.check_open()
        if self.live is not None:
            return self.live
        if self._found is None:
            self._reason = ""
            self._found = asyncio.get_running_loop().create_future()
            self._dialling = start_task(self._dial(self._found))
        found, self._waiting = self._found, self._waiting + 1
        patience_s = self.communicator.config.handshake_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(found)
        except TimeoutError:
            raise ConnectError(
                f"peer {self.where!r}: none in {patience_s:g} s; {self._trouble}",
                address=self.where,
            ) from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._end_dialling()

    @property
    def _trouble(self) -> str:
        """Return why there is no connection."""
        if self._reason or self._selector is None:
            return self._reason or "it has not answered"
        return self.communicator.membership.trouble or "no member is meant by that"

    def _end_dialling(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        if self._found is not None and not self._found.done():
            self._found.cancel()
        self._dialling = self._found = None

    async def _dial(self, found: asyncio.Future[ConnectionState]) -> None:
        """Try one candidate after the other until one of them answers."""
        backoff = Backoff(REDIAL_S, PEER_REDIAL_S_MAX)
        while True:
            candidates = self._candidates()
            for record in candidates:
                try:
                    connection = await self._try(record, len(candidates))
                except KVWireError as exc:
                    before, self._reason = self._reason, str(exc)
                    # Retrying does not mend a wrong key, so it is logged once.
                    refused = isinstance(exc, AuthenticationFailed)
                    loud = refused and self._reason != before
                    level = logging.WARNING if loud else logging.INFO
                    logger.log(level, "peer %r: %s", self.where, exc)
                    final = isinstance(exc, _FINAL) or isinstance(exc.__cause__, _FINAL)
                    if record is None and final:
                        found.set_exception(exc)
                        return
                else:
                    self._connection, self._record = connection, record
                    found.set_result(connection)
                    return
            if candidates:
                await asyncio.sleep(backoff.pause_s())
            else:
                self._joined.clear()
                await self._joined.wait()

    def _candidates(self) -> list[Record] | list[None]:
        """Return whom to try: who has not failed first, then the least busy."""
        if self._selector is None:
            return [None]
        meant = {
            key: record
            for key, record in self.communicator.membership.members.items()
            if self._selector.matches(record) and key != self._own_key
        }
        self._failures = {k: n for k, n in self._failures.items() if k in meant}

        def order(record: Record) -> tuple[int, float, float]:
            failures = self._failures.get(record.key, 0)
            return failures, record.load, random.random()  # noqa: S311 - no secret

        return sorted(meant.values(), key=order)[:PEER_ATTEMPTS_MAX]

    async def _try(self, record: Record | None, candidates: int) -> ConnectionState:
        """Connect to one candidate.

        Raises:
            KVWireError: It cannot be reached, or is somebody else.
        """
        patience_s = self.communicator.config.handshake_timeout_s
        if record is None:
            assert self._address is not None
            return await self.communicator.connect(self._address, None, patience_s)
        timeout_s = patience_s / min(candidates, _SHARES_MAX)
        self._failures[record.key] = self._failures.get(record.key, 0) + 1
        connection = await self.communicator.connect(record.address, None, timeout_s)
        who = connection.peer.incarnation.hex()
        if record.incarnation not in ("", who):
            connection.abort("the directory names another start of the peer")
            raise ConnectError(
                f"{record.address} is {who[:8]} now, and no longer "
                f"{record.incarnation[:8]}",
                address=record.address,
            )
        del self._failures[record.key]
        return connection

    def changed(self, change: Change) -> None:
        """Take in what has become of a member."""
        assert self._selector is not None
        record, mine = change.record, self._record
        meant = change.kind is not ChangeKind.LEFT and self._selector.matches(record)
        if meant:
            self._joined.set()
        live = self.live
        if live is None:
            return
        if mine is not None and record.key == mine.key:
            same = meant and record.address == mine.address
            self._record = record if same else None
        elif mine is None and meant and record.key == live.peer.incarnation.hex():
            self._record = record  # it was away for a while
        if self._record is None and self._candidates():
            self._connection = None
            self.communicator.recovery.retire(live)

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """End the peer; its connection ends with it.

        Cancel safety: safe, call it again.
        """
        self.stop()
        if self._connection is not None:
            await self._connection.close()

    def stop(self) -> None:
        """Dial no more; what waits for a connection fails."""
        if self.closed:
            return
        self.closed = True
        if self._selector is not None:
            self.communicator.membership.forget(self.changed)
        self.communicator.peers.pop(self.where, None)
        if self._found is not None and not self._found.done():
            self._found.set_exception(ClosedOK(f"peer {self.where!r} was closed"))
        if self._dialling is not None:
            self._dialling.cancel()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = start_task(coroutine)
        self._tasks.add(task)  # bounded: REQUESTS_MAX, each is a transfer of the caller
        task.add_done_callback(self._tasks.discard)


def _flipped(
    call: Callable[[ConnectionState, Deadline], RequestState[Any]],
    deadline: Deadline,
    connection: ConnectionState,
) -> RequestState[Any]:
    return call(connection, deadline)
