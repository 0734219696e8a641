"""A grant as its holder sees it: permission to reach a byte range of a peer's memory.

It is bytes, so it travels by any channel; what it opens is one connection's, and ends
with the region. Slicing narrows it: ``grant[a:b]`` is that part and nothing else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Final

from kvwire.errors import UsageError
from kvwire.limits import REQUEST_BYTES_MAX
from kvwire.types import Access

_LAYOUT: Final = struct.Struct("<4sI16sQQ16sQQ")
_MAGIC: Final = b"kvg1"


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
