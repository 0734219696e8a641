"""Registered memory as its owner sees it, and a grant as its holder sees it.

A grant is permission to reach a byte range of a peer's memory. It is bytes, so it
travels by any channel; what it opens is one connection's, and ends with the region.
Slicing narrows it: ``grant[a:b]`` is that part and nothing else.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvwire.errors import UsageError
from kvwire.limits import REQUEST_BYTES_MAX
from kvwire.proto.regions import RegionRecord
from kvwire.types import Access

if TYPE_CHECKING:
    from kvwire.communicator import Communicator
    from kvwire.connection import Connection

_LAYOUT: Final = struct.Struct("<4sI16sQQ16sQQ")
_MAGIC: Final = b"kvg1"


class Region:
    """Memory that peers may reach with a grant, until it is closed.

    The memory is lent to kvwire from ``register`` until :meth:`close` has returned. It
    may be read and written meanwhile; a peer's ``get`` sees what is there when its
    bytes leave.
    """

    def __init__(self, communicator: Communicator, core: RegionRecord) -> None:
        self._communicator = communicator
        self._core = core

    def __len__(self) -> int:
        """Its bytes."""
        return self._core.nbytes

    def __repr__(self) -> str:
        core = self._core
        state = "open" if core.open else "closed"
        return f"<Region {core.id}: {core.nbytes} bytes, {core.access}, {state}>"

    @property
    def access(self) -> Access:
        """What grants of it may allow."""
        return self._core.access

    def grant(
        self,
        connection: Connection,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        access: str | Access | None = None,
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
        if nbytes is None:
            nbytes = self._core.nbytes - offset
        wanted = self._core.access if access is None else Access.parse(access)
        if connection.communicator is not self._communicator:
            raise UsageError("grant: the connection is of another communicator")
        return connection.make_grant(self._core, offset, nbytes, wanted)

    def revoke(self) -> None:
        """End every grant made so far; the region stays open for new ones.

        What peers have under way fails with :exc:`~kvwire.StaleRegion`. The memory may
        still be touched by it: only :meth:`close` says when it is not.
        """
        self._communicator.revoke_region(self._core)

    async def close(self) -> None:
        """End every grant and wait until nothing of kvwire can touch the memory.

        Without deadline: what a transport has begun, it finishes, or the connection's
        liveness ends it.

        Cancel safety: safe. The region is closed either way; call it again to go on
        waiting for its memory.
        """
        self._communicator.close_region(self._core)
        free = asyncio.Event()
        self._communicator.buffers.on_drained(self._core.buffer, free.set)
        await free.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Permission to ``get`` from, or ``put`` into, memory of one peer.

    Attributes:
        access: Which of the two, or both.
        connection: The connection it was made for, 16 bytes.
        grant: Its number there.
        generation: The generation of the region it was made for.
        token: Proves that the peer made it; never shown.
        offset: Where this part begins in what was granted.
        nbytes: How long it is; also ``len(grant)``.
    """

    access: Access
    connection: bytes
    grant: int
    generation: int
    token: bytes = field(repr=False)
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Grant:
        """A part of the grant, by byte positions as of a ``bytes`` object.

        Raises:
            UsageError: A step other than 1, or an index instead of a slice.
        """
        if not isinstance(part, slice):
            raise UsageError("a grant is sliced, grant[a:b]; it has no single bytes")
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise UsageError(f"grant[{start}:{stop}:{step}]: the step must be 1")
        return replace(self, offset=self.offset + start, nbytes=max(0, stop - start))

    def to_bytes(self) -> bytes:
        """The bytes that :meth:`from_bytes` reads."""
        return _LAYOUT.pack(
            _MAGIC,
            self.access.value,
            self.connection,
            self.grant,
            self.generation,
            self.token,
            self.offset,
            self.nbytes,
        )

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> Grant:
        """Read a grant that came by some channel.

        Raises:
            UsageError: These bytes are no grant. Whether the peer honours it shows only
                when it is used.
        """
        if len(raw) != _LAYOUT.size:
            raise UsageError(f"a grant has {_LAYOUT.size} bytes, these are {len(raw)}")
        magic, access, connection, grant, generation, token, offset, nbytes = (
            _LAYOUT.unpack(raw)
        )
        in_range = (
            max(offset, nbytes) <= REQUEST_BYTES_MAX and max(grant, generation) < 2**63
        )
        if magic != _MAGIC or not 1 <= access <= 3 or not in_range:
            raise UsageError("these bytes are no grant of this version")
        return cls(
            access=Access(access),
            connection=connection,
            grant=grant,
            generation=generation,
            token=token,
            offset=offset,
            nbytes=nbytes,
        )
