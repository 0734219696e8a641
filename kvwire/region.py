"""Registered memory as its owner sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvwire.endpoint.connection import ConnectionState
from kvwire.errors import UsageError, wrong_type
from kvwire.proto.regions import RegionRecord
from kvwire.types import Access, AccessName, Grant

if TYPE_CHECKING:
    from kvwire.connection import Connection
    from kvwire.endpoint.communicator import CommunicatorState


class Region:
    """Lends memory to peers that have a grant, until it is closed.

    The memory is lent to kvwire from ``register`` until :meth:`close` has returned. It
    may be read and written meanwhile; a peer's ``get`` sees what is there when its
    bytes leave.
    """

    def __init__(self, communicator: CommunicatorState, core: RegionRecord) -> None:
        self._communicator = communicator
        self._core = core

    def __len__(self) -> int:
        """Return its length in bytes."""
        return self._core.nbytes

    def __repr__(self) -> str:
        core = self._core
        state = "open" if core.open else "closed"
        return f"<Region {core.id}: {core.nbytes} bytes, {core.access}, {state}>"

    @property
    def access(self) -> Access:
        """Return what grants of it may allow."""
        return self._core.access

    def grant(
        self,
        connection: Connection,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        access: AccessName | Access | None = None,
    ) -> Grant:
        """Allow the peer of one connection to reach a byte range.

        Args:
            connection: Whose peer; nobody else can use the grant.
            offset: Where the range begins.
            nbytes: How long it is; None for the rest of the region.
            access: ``"read"``, ``"write"`` or ``"readwrite"``; None for all the region
                allows.

        Raises:
            UsageError: The range or the access is more than the region has.
            ConnectionClosed: The connection is closing or closed.
        """
        self._communicator.thread.check("Region.grant")
        wanted = self._core.access if access is None else Access.parse(access)
        state = getattr(connection, "_state", None)
        if not isinstance(state, ConnectionState):
            raise wrong_type("grant", connection, "a kvwire.Connection")
        if state.communicator is not self._communicator:
            raise UsageError("grant: the connection is of another communicator")
        return state.make_grant(self._core, offset, nbytes, wanted)

    def revoke(self) -> None:
        """End every grant made so far; the region stays open for new ones.

        What peers have under way fails with :exc:`~kvwire.StaleRegion`. The memory may
        still be touched by it: only :meth:`close` says when it is not.
        """
        self._communicator.thread.check("Region.revoke")
        self._communicator.revoke_region(self._core)

    async def close(self) -> None:
        """End every grant and wait until nothing of kvwire can touch the memory.

        Without deadline: what a transport has begun, it finishes, or the connection's
        liveness ends it.

        Cancel safety: safe. The region is closed either way; call it again to go on
        waiting for its memory.
        """
        self._communicator.thread.check("Region.close")
        self._communicator.close_region(self._core)
        free = asyncio.Event()
        self._communicator.buffers.on_drained(self._core.buffer, free.set)
        await free.wait()
