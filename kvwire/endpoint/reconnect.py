"""After a lost connection: redial within the lease, and resume its transfers.

Only the side that dialled can dial again; the other side waits for it. On either side
an interrupted transfer resumes only once the lost link can no longer touch memory, and
only with the same incarnation of the peer (its origin).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Coroutine
from typing import Any, Final

from kvwire.aio import Upkeep, start_task
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.links import Links
from kvwire.errors import (
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    PeerUnresponsive,
    shown,
)
from kvwire.limits import STALL_TOLERANCE_S
from kvwire.proto.state import CloseState

# Pauses between redials after a lost connection: none at first, then doubling with
# jitter.
REDIAL_S: Final = 0.05
REDIAL_S_MAX: Final = 0.5
# If one other process answers so often in a row, it has the peer's place: a balancer of
# two would have reached the peer, but for one time in 256.
_ANSWERS: Final = 8

logger: logging.Logger = logging.getLogger("kvwire.connections")

# The kernel, or this process, has reported that nothing listens there.
_REFUSALS: Final = (ConnectionRefusedError, FileNotFoundError)
# Errors of the kernel for a silent peer; all others come from the peer's host.
_SILENCE: Final = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)


class Reconnector:
    """Resumes the interrupted transfers of one communicator on new links."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._loop = links.services.loop
        self._config = links.services.config
        self._registry = links.services.registry
        links.lost = self.lost
        self._tasks: set[asyncio.Task[None]] = set()
        # One redial for each peer, however many of its connections were lost.
        self._redialling: set[bytes] = set()
        # Peers that were redialled recently.
        self._redialled: set[bytes] = set()
        # Peers that may dial again, by the last connection that they lost.
        self._awaited: dict[bytes, Connection] = {}

    def lost(self, connection: Connection, error: ConnectionClosed) -> None:
        """Recover from a connection that ended without having been closed."""
        received = connection._core.liveness.peer_receives(self._loop.time())
        self._run(self._recover(connection, gone=received and _was_reset(error)))

    def taken_over(self, connection: Connection, resumes: bytes) -> None:
        """Replace a lost connection by the one that its peer has redialled."""
        if not self._links.ended:
            self._run(self._take_over(connection, resumes))

    def retire(self, connection: Connection) -> None:
        """Stop using a connection for new work, and close it once it is idle."""
        self._run(self._close_when_idle(connection))

    async def close(self) -> None:
        """Stop redialling, and stop waiting for peers to redial.

        Cancel safety: safe, call it again.
        """
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take_over(self, connection: Connection, resumes: bytes) -> None:
        for old in tuple(self._links.connections):
            same_peer = old.peer.origin == connection.peer.origin
            if old._digest == resumes and same_peer:
                old.abort("the peer has lost this connection and has come back")
                await old.wait_closed()
                self._registry.connection_lost(old._driver)
        self._registry.reattach(connection._driver)

    async def _recover(self, connection: Connection, *, gone: bool) -> None:
        """Replace a lost link; ``gone`` if the peer's process has probably ended."""
        registry = self._registry
        origin = connection.peer.origin
        # Not wait_closed(): in a forked child it raises, and the error would go unread.
        await asyncio.shield(connection._driver.ended)
        registry.connection_lost(connection._driver)
        for other in tuple(self._links.connections):
            same_peer = other.peer.origin == origin
            if same_peer and other._core.phase is CloseState.OPEN:
                registry.reattach(other._driver)
                return
        if not (
            registry.interrupted(origin) or (connection._dialled and registry.unmet)
        ):
            return  # nothing waits for this peer, so no state is kept
        if not connection._dialled and gone:
            await self._await_return(connection)
        elif connection._dialled and origin not in self._redialling:
            self._redialling.add(origin)
            try:
                await self._redial(connection)
            finally:
                self._redialling.discard(origin)

    async def _await_return(self, lost: Connection) -> None:
        """Wait for a peer to dial again after its link was reset."""
        registry = self._registry
        loop = self._loop
        origin = lost.peer.origin
        grace_s = self._config.restart_grace_s
        self._awaited[origin] = lost  # bounded: CONNECTIONS_MAX, each for a moment
        until = loop.time() + grace_s
        await asyncio.sleep(grace_s)
        if loop.time() > until + STALL_TOLERANCE_S:
            await asyncio.sleep(grace_s)  # this side was late, not the peer
        if self._awaited.get(origin) is not lost:
            return  # it had come back, and was lost again
        del self._awaited[origin]
        if registry.interrupted(origin):
            registry.peer_gone(
                origin,
                f"the connection to {lost.peer} was reset, and it was not back within "
                f"{grace_s:g} s",
            )

    async def _redial(self, lost: Connection) -> None:
        """Redial until it succeeds or nothing waits for the connection.

        If the peer is silent, the transfers' leases bound the wait. If its kernel
        refuses the port, its process has ended or is restarting, and it gets
        ``restart_grace_s``. It also gets that if another process answers: a balancer
        may have led there, so only one that answers several times in a row has
        replaced the peer. Transfers that no peer has joined yet justify one attempt:
        the peer may have requested them on the lost link, and cannot dial itself.
        """
        registry = self._registry
        origin = lost.peer.origin
        loop = self._loop
        grace_s = self._config.restart_grace_s
        gone_at: float | None = None
        stranger = _Stranger()
        upkeep = Upkeep(REDIAL_S, REDIAL_S_MAX)
        if origin in self._redialled:
            # It was redialled recently: pause, in case links break as soon as they are
            # up.
            await asyncio.sleep(REDIAL_S_MAX)
        unmet = bool(registry.unmet)
        async for _ in upkeep:
            if not (unmet or registry.interrupted(origin)):
                return
            unmet = False
            reason = "another process has answered"
            try:
                new = await self._links.redial(lost)
            except KVWireError as exc:
                reason = str(exc)
                logger.info("redialling %s: %s", lost.peer, exc)
                if not isinstance(exc.__cause__, _REFUSALS):
                    gone_at = None
                elif gone_at is None:
                    gone_at = loop.time() + grace_s
                elif loop.time() >= gone_at:
                    registry.peer_gone(
                        origin, f"the peer has ended: {exc}, for {grace_s:g} s"
                    )
                    return
            else:
                if await self._take_answer(new, lost, stranger):
                    return
                gone_at = None
            left_s = math.inf if gone_at is None else max(0.0, gone_at - loop.time())
            upkeep.lost(reason, within_s=left_s)

    async def _take_answer(
        self, new: Connection, lost: Connection, stranger: _Stranger
    ) -> bool:
        """Check which process answered a redial; return whether to stop redialling."""
        origin = lost.peer.origin
        if new.peer.origin == origin:
            self._note_redial(origin)
            self.retire(new)
            return True
        here = new._dialled == lost._dialled
        restarted = here and new.peer.name == lost.peer.name
        stranger.answered(new.peer.origin if here else b"", self._loop.time())
        replaced = stranger.stays(self._loop.time() - self._config.restart_grace_s)
        if restarted:
            why = "the peer has restarted; the peer's side of it is gone"
            self._registry.peer_gone(origin, why)
        elif replaced:
            why = f"the peer has ended: {shown(new.peer.name)} has its address now"
            self._registry.peer_gone(origin, why)
        elif here:
            # Behind a balancer, the next connection may lead to the peer again.
            why = f"another process, {shown(new.peer.name)}, answered for the peer"
            self._registry.peer_missed(origin, why)
        await new.close()
        return restarted or replaced

    def _note_redial(self, origin: bytes) -> None:
        self._redialled.add(origin)
        self._loop.call_later(REDIAL_S_MAX, self._redialled.discard, origin)

    async def _close_when_idle(self, connection: Connection) -> None:
        """Close a connection once it is idle.

        It is checked once per lease: by then every transfer that waited for the
        connection has started or given up.
        """
        registry = self._registry
        origin = connection.peer.origin
        while not connection.closed:
            await asyncio.sleep(self._config.lease_s)
            if not connection._core.open_requests and not registry.interrupted(origin):
                await connection.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = start_task(coroutine, lasting=True)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Stranger:
    """The other process that answers at a peer's address."""

    def __init__(self) -> None:
        self._origin = b""
        self._answers = 0
        self._since = 0.0

    def answered(self, origin: bytes, now: float) -> None:
        """Count an answer; ``origin`` is empty if it came from another address."""
        if origin != self._origin:
            self._origin = origin
            self._answers = 0
            self._since = now
        self._answers += 1

    def stays(self, since: float) -> bool:
        """Return whether it has answered often, and since this instant or longer."""
        often = bool(self._origin) and self._answers >= _ANSWERS
        return often and self._since <= since


def _was_reset(error: ConnectionClosed) -> bool:
    """Return whether a connection was reset, rather than silent on either side."""
    cause = error.__cause__
    silent = isinstance(cause, PeerUnresponsive) or (
        isinstance(cause, OSError) and cause.errno in _SILENCE
    )
    return isinstance(error, ConnectionLost) and not silent
