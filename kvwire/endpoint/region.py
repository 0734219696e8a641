"""Registered memory: peers with a grant may reach it until it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from kvwire.aio import Closing
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.links import Links
from kvwire.errors import UsageError, wrong_type
from kvwire.kv.fragments import Fragments
from kvwire.memory.buffers import as_payload
from kvwire.proto.regions import RegionRecord
from kvwire.types import Access, AccessName, Grant


class Region(Closing):
    """Lends memory to peers with a grant until it is closed.

    kvwire uses the memory from ``register`` until :meth:`close` has returned. The
    application may read and write the memory meanwhile; a peer's ``get`` receives the
    bytes as they are at the moment of sending.
    """

    def __init__(self, links: Links, record: RegionRecord) -> None:
        self._links = links
        self._thread = links.services.thread
        self._record = record

    def __len__(self) -> int:
        """Return its length in bytes."""
        return self._record.nbytes

    def __repr__(self) -> str:
        record = self._record
        state = "open" if record.open else "closed"
        return f"<Region {record.id}: {record.nbytes} bytes, {record.access}, {state}>"

    @property
    def access(self) -> Access:
        """Return the widest access that its grants may allow."""
        return self._record.access

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
            connection: The only connection whose peer can use the grant.
            offset: The first byte of the range.
            nbytes: Its length in bytes; None for the rest of the region.
            access: ``"read"``, ``"write"`` or ``"readwrite"``; None for all that the
                region allows.

        Raises:
            UsageError: The range is outside the region, or the region does not allow
                the access.
            BackendUnavailable: The region is a device's memory, and the device does not
                work, or the connection cannot move its memory.
            ConnectionClosed: The connection is closing or closed.
        """
        self._thread.check("Region.grant")
        wanted = self._record.access if access is None else Access.parse(access)
        if not isinstance(connection, Connection):
            raise wrong_type("grant", connection, "a kvwire.Connection")
        services = self._links.services
        if connection._services is not services:
            raise UsageError("grant: the connection belongs to another communicator")
        memory = (
            services.buffers.whole(self._record.buffer) if self._record.open else None
        )
        if isinstance(memory, Fragments) and memory.device is not None:
            connection._driver.staging.open(memory.device)
        row = connection._core.grant(self._record, offset, nbytes, wanted)
        return Grant(
            access=wanted,
            connection=connection._digest,
            grant=row.id,
            generation=row.generation,
            token=row.token,
            offset=0,
            nbytes=row.nbytes,
        )

    def revoke(self) -> None:
        """End every grant made so far; new grants remain possible.

        Puts and gets in progress fail with :exc:`~kvwire.StaleRegion`, but may still
        touch the memory; only :meth:`close` waits for that to end.
        """
        self._thread.check("Region.revoke")
        self._links.regions.revoke(self._record)
        self._links.revoked(self._record)

    async def close(self) -> None:
        """End every grant and wait until kvwire no longer touches the memory.

        There is no deadline: a transport finishes its running operations, or the
        liveness check ends the connection.

        Cancel safety: safe. The region is closed either way; call it again to continue
        waiting for its memory.
        """
        self._thread.check("Region.close")
        links = self._links
        record = self._record
        buffers = self._links.services.buffers
        if record.open:
            links.regions.close(record)
            links.revoked(record)
            buffers.holds.retire(record.buffer)
            buffers.collect()
        free = asyncio.Event()
        buffers.on_drained(record.buffer, free.set)
        await free.wait()


def register(links: Links, buffer: Any, access: AccessName | Access) -> Region:
    """Lend memory to peers; see Communicator.register."""
    links.check_open()
    allowed = Access.parse(access)
    payload = as_payload(buffer, writable=bool(allowed & Access.WRITE))
    buffers = links.services.buffers
    lent = buffers.lend(payload)
    try:
        return Region(links, links.regions.register(lent, payload.nbytes, allowed))
    except UsageError:
        buffers.take_back(lent)
        raise
