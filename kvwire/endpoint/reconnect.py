"""After a lost connection: redial within the lease, and let transfers go on.

Only the side that had connected can connect again; the other one waits for it. Either
way an interrupted transfer asks again only when the lost link has touched memory for
the last time, and only the same start of the peer (its origin) can go on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from kvwire.clock import Backoff
from kvwire.errors import KVWireError
from kvwire.limits import REDIAL_S, REDIAL_S_MAX
from kvwire.proto.state import CloseState

if TYPE_CHECKING:
    from kvwire.endpoint.communicator import CommunicatorState
    from kvwire.endpoint.connection import ConnectionState

logger: logging.Logger = logging.getLogger("kvwire")


class Reconnector:
    """Brings interrupted transfers of one communicator onto new links."""

    def __init__(self, communicator: CommunicatorState) -> None:
        self._communicator = communicator
        self._tasks: set[asyncio.Task[None]] = set()
        # One redial for each peer, however many of its connections were lost.
        self._redialling: set[bytes] = set()
        # Peers that were redialled a moment ago.
        self._redialled: set[bytes] = set()

    def lost(self, connection: ConnectionState) -> None:
        """Recover a connection that has ended without having been closed."""
        self._run(self._recover(connection))

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

    async def _recover(self, connection: ConnectionState) -> None:
        communicator, registry = self._communicator, self._communicator.registry
        origin = connection.peer.origin
        await connection.wait_closed()
        registry.connection_lost(connection)
        for other in communicator.live_connections:
            same_peer = other.peer.origin == origin
            if same_peer and other.core.phase is CloseState.OPEN:
                registry.reattach(other)
                return
        if connection.dialled and origin not in self._redialling:
            self._redialling.add(origin)
            try:
                await self._redial(connection)
            finally:
                self._redialling.discard(origin)

    async def _redial(self, lost: ConnectionState) -> None:
        """Try again until it works or nothing waits for it; leases end the waiting."""
        registry, origin = self._communicator.registry, lost.peer.origin
        backoff = Backoff(REDIAL_S, REDIAL_S_MAX)
        if origin in self._redialled:
            # What breaks as soon as it is up is not to be dialled without a pause.
            await asyncio.sleep(REDIAL_S_MAX)
        while registry.interrupted(origin):
            try:
                new = await self._communicator.redial(lost)
            except KVWireError as exc:
                logger.info("redialling %s: %s", lost.peer, exc)
            else:
                if new.peer.origin == origin:
                    self._note_redial(origin)
                    self.retire(new)
                else:
                    registry.peer_restarted(origin)
                    await new.close()
                return
            await asyncio.sleep(backoff.pause_s())

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
            if connection.core.idle and not registry.interrupted(origin):
                await connection.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._communicator.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
