"""After a lost connection: redial within the lease, and let transfers go on.

Only the side that had connected can connect again; the other one waits for it. Either
way an interrupted transfer asks again only when the lost link has touched memory for
the last time, and only the same start of the peer (its origin) can go on with it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from kvwire.aio import Backoff, start_task
from kvwire.endpoint.limits import REDIAL_S, REDIAL_S_MAX
from kvwire.errors import (
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    PeerUnresponsive,
)
from kvwire.limits import STALL_TOLERANCE_S
from kvwire.proto.state import CloseState

if TYPE_CHECKING:
    from kvwire.endpoint.communicator import CommunicatorState
    from kvwire.endpoint.connection import ConnectionState

logger: logging.Logger = logging.getLogger("kvwire.connections")

# The kernel's, or this process's, word that nobody listens there.
_REFUSALS: Final = (ConnectionRefusedError, FileNotFoundError)
# What the kernel says of a peer that is silent; all else it knows from the peer's host.
_SILENCE: Final = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)


class Reconnector:
    """Brings interrupted transfers of one communicator onto new links."""

    def __init__(self, communicator: CommunicatorState) -> None:
        self._communicator = communicator
        self._tasks: set[asyncio.Task[None]] = set()
        # One redial for each peer, however many of its connections were lost.
        self._redialling: set[bytes] = set()
        # Peers that were redialled a moment ago.
        self._redialled: set[bytes] = set()
        # Peers that may dial again, by the connection that they have lost last.
        self._awaited: dict[bytes, ConnectionState] = {}

    def lost(self, connection: ConnectionState, error: ConnectionClosed) -> None:
        """Recover a connection that has ended without having been closed."""
        heard = connection.core.hears_us(self._communicator.loop.time())
        self._run(self._recover(connection, gone=heard and _was_reset(error)))

    def taken_over(self, connection: ConnectionState, resumes: bytes) -> None:
        """Replace the connection that a peer that has come back says it has lost."""
        if not self._communicator.links_ended:
            self._run(self._take_over(connection, resumes))

    def retire(self, connection: ConnectionState) -> None:
        """Close a connection that nothing new is begun on, once it is idle."""
        self._run(self._close_when_idle(connection))

    async def close(self) -> None:
        """Stop redialling, and waiting for what was lost.

        Cancel safety: safe, call it again.
        """
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take_over(self, connection: ConnectionState, resumes: bytes) -> None:
        for old in self._communicator.live_connections:
            same_peer = old.peer.origin == connection.peer.origin
            if old.digest == resumes and same_peer:
                old.abort("the peer has lost this connection and has come back")
                await old.wait_closed()
                self._communicator.registry.connection_lost(old)
        self._communicator.registry.reattach(connection)

    async def _recover(self, connection: ConnectionState, *, gone: bool) -> None:
        """Let a link be replaced; ``gone`` if its end looks like that of a process."""
        communicator, registry = self._communicator, self._communicator.registry
        origin = connection.peer.origin
        await connection.wait_closed()
        registry.connection_lost(connection)
        for other in communicator.live_connections:
            same_peer = other.peer.origin == origin
            if same_peer and other.core.phase is CloseState.OPEN:
                registry.reattach(other)
                return
        if not (
            registry.interrupted(origin) or (connection.dialled and registry.unmet)
        ):
            return  # nothing waits for this peer, so that nothing is kept of it
        if not connection.dialled and gone:
            await self._await_return(connection)
        elif connection.dialled and origin not in self._redialling:
            self._redialling.add(origin)
            try:
                await self._redial(connection)
            finally:
                self._redialling.discard(origin)

    async def _await_return(self, lost: ConnectionState) -> None:
        """Give a peer that dials us, and whose link was reset, a moment to be back."""
        registry, loop = self._communicator.registry, self._communicator.loop
        origin, grace_s = lost.peer.origin, self._communicator.config.restart_grace_s
        self._awaited[origin] = lost  # bounded: CONNECTIONS_MAX, each for a moment
        until = loop.time() + grace_s
        await asyncio.sleep(grace_s)
        if loop.time() > until + STALL_TOLERANCE_S:
            await asyncio.sleep(grace_s)  # we were late, and not the peer
        if self._awaited.get(origin) is not lost:
            return  # it was back, and lost again
        del self._awaited[origin]
        if registry.interrupted(origin):
            registry.peer_gone(
                origin,
                f"the connection to {lost.peer} was reset, and it was not back within "
                f"{grace_s:g} s",
            )

    async def _redial(self, lost: ConnectionState) -> None:
        """Try again until it works or nothing waits for it.

        Leases end the waiting for a peer that is silent. One whose port the kernel
        refuses has ended, or restarts: it has a moment. For what has met nobody it is
        tried once: the peer may have asked for it on the link that was lost, and cannot
        dial itself.
        """
        registry, origin = self._communicator.registry, lost.peer.origin
        loop, grace_s = (
            self._communicator.loop,
            self._communicator.config.restart_grace_s,
        )
        gone_at: float | None = None
        backoff = Backoff(REDIAL_S, REDIAL_S_MAX)
        if origin in self._redialled:
            # What breaks as soon as it is up is not to be dialled without a pause.
            await asyncio.sleep(REDIAL_S_MAX)
        wanted = registry.interrupted(origin) or registry.unmet
        while wanted:
            try:
                new = await self._communicator.redial(lost)
            except KVWireError as exc:
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
                if await self._met(new, lost):
                    return
                gone_at = None
            pause_s = backoff.pause_s()
            if gone_at is not None:
                pause_s = min(pause_s, max(0.0, gone_at - loop.time()))
            await asyncio.sleep(pause_s)
            wanted = registry.interrupted(origin)

    async def _met(self, new: ConnectionState, lost: ConnectionState) -> bool:
        """Check the process that answered a redial; tell whether redialling is over."""
        origin = lost.peer.origin
        if new.peer.origin == origin:
            self._note_redial(origin)
            self.retire(new)
            return True
        if new.dialled == lost.dialled:
            why = "the peer has restarted; its side of it is gone"
            self._communicator.registry.peer_gone(origin, why)
        await new.close()
        # Else it is another one, for which the peer's name stands as well.
        return new.dialled == lost.dialled

    def _note_redial(self, origin: bytes) -> None:
        self._redialled.add(origin)
        self._communicator.loop.call_later(
            REDIAL_S_MAX, self._redialled.discard, origin
        )

    async def _close_when_idle(self, connection: ConnectionState) -> None:
        """Close a connection once it is idle.

        Within a lease everything that waited for it has come, or has given up.
        """
        registry, origin = self._communicator.registry, connection.peer.origin
        while not connection.closed:
            await asyncio.sleep(self._communicator.config.lease_s)
            if not connection.core.open_requests and not registry.interrupted(origin):
                await connection.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = start_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _was_reset(error: ConnectionClosed) -> bool:
    """Tell whether a connection was ended, and not merely silent on either side."""
    cause = error.__cause__
    silent = isinstance(cause, PeerUnresponsive) or (
        isinstance(cause, OSError) and cause.errno in _SILENCE
    )
    return isinstance(error, ConnectionLost) and not silent
