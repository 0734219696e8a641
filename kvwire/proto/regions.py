"""Registered memory, its generations, and a peer's grants to reach it.

Addresses are never sent. A peer sends the number of a grant, a generation, an offset, a
length, and the grant's token. A grant belongs to one connection, covers one byte range
of one region, allows one direction or both, and ends with its connection, its region,
or the region's generation. The token is an HMAC with a key of the connection, so a
forged grant (for example in an API client's request) is refused. Unknown grants, grants
for other peers and wrong tokens all get the same answer, and the token is compared in
constant time.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import Final

from kvwire.errors import AccessDenied, StaleRegion, UsageError
from kvwire.types import Access, BufferId, Generation, GrantId, RegionId, whole

# A program with more grants or regions has forgotten to close some.
GRANTS_MAX: Final = 65_536
REGIONS_MAX: Final = 65_536

TOKEN_BYTES: Final = 16
# Operators on enum flags cost several Python calls each.
_BOTH: Final = Access.READWRITE
_NO_TOKEN: Final = bytes(TOKEN_BYTES)
_TOKEN_FIELDS: Final = struct.Struct("<QQQQQB")


@dataclass(slots=True, kw_only=True)
class RegionRecord:
    """Registered memory, which peers may reach through grants.

    Attributes:
        generation: Counts revocations; grants from an earlier generation are stale.
        open: Whether it is open; a closed region never opens again.
    """

    id: RegionId
    buffer: BufferId
    nbytes: int
    access: Access
    generation: Generation
    open: bool = True


class RegionTable:
    """Holds the regions of a communicator."""

    def __init__(self, most: int = REGIONS_MAX) -> None:
        self._most = most
        self._open: dict[RegionId, RegionRecord] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def register(self, buffer: BufferId, nbytes: int, access: Access) -> RegionRecord:
        """Create a region from a buffer."""
        if len(self._open) >= self._most:
            raise UsageError(
                f"{self._most} regions are open, which is the limit; close some of them"
            )
        self._last += 1
        region = RegionRecord(
            id=RegionId(self._last),
            buffer=buffer,
            nbytes=nbytes,
            access=access,
            generation=Generation(1),
        )
        self._open[region.id] = region  # bounded: REGIONS_MAX
        return region

    def revoke(self, region: RegionRecord) -> None:
        """End every grant made so far; the region stays open."""
        region.generation = Generation(region.generation + 1)

    def close(self, region: RegionRecord) -> None:
        """Close the region, which ends every grant."""
        self.revoke(region)
        region.open = False
        self._open.pop(region.id, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRow:
    """One grant, on the side that made it."""

    id: GrantId
    region: RegionRecord
    generation: Generation
    offset: int
    nbytes: int
    access: Access
    token: bytes = field(repr=False)


class Grants:
    """Holds the grants made for one connection's peer."""

    def __init__(self, key: bytes, most: int | None = None) -> None:
        self._key = key
        self._most: int = GRANTS_MAX if most is None else most
        self._rows: dict[int, GrantRow] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._rows)

    def give(
        self, region: RegionRecord, offset: int, nbytes: int | None, access: Access
    ) -> GrantRow:
        """Grant a range of a region, up to its end if ``nbytes`` is None."""
        if not region.open:
            raise UsageError(f"region {region.id} is closed")
        offset, nbytes = _range_of(region, offset, nbytes)
        if access & ~region.access:
            raise UsageError(
                f"grant: access={access}, but the region is registered for "
                f"{region.access}"
            )
        self._drop_dead()
        if len(self._rows) >= self._most:
            raise UsageError(
                f"{self._most} grants are open on this connection, which is the "
                "limit; revoke some regions"
            )
        self._last += 1
        row = GrantRow(
            id=GrantId(self._last),
            region=region,
            generation=region.generation,
            offset=offset,
            nbytes=nbytes,
            access=access,
            token=self._token(self._last, region, offset, nbytes, access),
        )
        self._rows[row.id] = row  # bounded: GRANTS_MAX
        return row

    def check(
        self,
        *,
        grant: int,
        generation: int,
        token: bytes,
        offset: int,
        nbytes: int,
        access: Access,
    ) -> GrantRow:
        """Return the grant that allows an access by the peer.

        Raises:
            AccessDenied: No such grant, wrong token, wrong direction, or out of range
                (KVW-OS-03).
            StaleRegion: The region was closed or revoked since (KVW-OS-04).
        """
        row = self._rows.get(grant)
        proven = hmac.compare_digest(token, row.token if row else _NO_TOKEN)
        if row is None or not proven:
            raise AccessDenied("no such grant on this connection")
        if row.access is not access and row.access is not _BOTH:
            raise AccessDenied(f"the grant does not allow {access}")
        if not 0 <= offset <= row.nbytes or not 0 <= nbytes <= row.nbytes - offset:
            raise AccessDenied(
                f"{nbytes} bytes at offset {offset} are outside the grant of "
                f"{row.nbytes} bytes"
            )
        region = row.region
        if not region.open or not generation == row.generation == region.generation:
            raise StaleRegion("the region was closed or reused since the grant")
        return row

    def _drop_dead(self) -> None:
        """Drop stale grants, if there is no room for a new one."""
        if len(self._rows) < self._most:
            return
        self._rows = {
            row.id: row
            for row in self._rows.values()
            if row.region.open and row.generation == row.region.generation
        }

    def _token(
        self, grant: int, region: RegionRecord, offset: int, nbytes: int, access: Access
    ) -> bytes:
        fields = _TOKEN_FIELDS.pack(
            grant, region.id, region.generation, offset, nbytes, access.value
        )
        return hmac.digest(self._key, fields, "sha256")[:TOKEN_BYTES]


def _range_of(region: RegionRecord, offset: int, nbytes: int | None) -> tuple[int, int]:
    """Return the range to grant, after checking that it is in the region."""
    first = whole(offset)
    length = whole(region.nbytes - (first or 0) if nbytes is None else nbytes)
    if (
        first is None
        or length is None
        or not (0 <= first <= region.nbytes - length <= region.nbytes)
    ):
        length_asked = "" if nbytes is None else f", nbytes={nbytes!r}"
        raise UsageError(
            f"grant: offset={offset!r}{length_asked} is outside the region of "
            f"{region.nbytes} bytes"
        )
    return first, length
