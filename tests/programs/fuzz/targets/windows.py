"""What windows read beside frames: tickets, geometries, and the memory of an owner.

The first byte chooses which, the rest are the bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from kvwire.endpoint.windows.fields import (
    decode_memory,
    encode_geometry,
    read_geometry,
)
from kvwire.endpoint.windows.map import geometry_of_pools, view_walks
from kvwire.endpoint.windows.ticket import read_ticket, write_ticket
from kvwire.errors import ProfileMismatch, ProtocolError, UsageError
from kvwire.kv.geometry import Geometry
from tests.programs.fuzz.reader import Reader
from tests.support.caches import Filled

_MINE: Final[Geometry] = geometry_of_pools(Filled().cache)


def run(data: bytes) -> int:
    """Nothing but what is documented is raised."""
    reader = Reader(data)
    read = reader.pick(_READERS)
    with contextlib.suppress(ProfileMismatch, ProtocolError, UsageError):
        read(data[1:])
    return len(data)


def _ticket(said: bytes) -> None:
    ticket = read_ticket(said)
    assert sum(ticket.counts) == ticket.entries.size == ticket.generations.size
    again = write_ticket(
        ticket.serial, ticket.counts, ticket.entries, ticket.generations
    )
    assert len(again) == len(said)


def _geometry(said: bytes) -> None:
    geometry = read_geometry(said)
    assert read_geometry(encode_geometry(geometry)) == geometry
    for owner, reader in ((geometry, _MINE), (_MINE, geometry)):
        with contextlib.suppress(ProfileMismatch, UsageError):
            for walk, pieces in view_walks(owner, reader):
                assert walk.granule_bytes > 0
                assert pieces > 0


def _memory(said: bytes) -> None:
    memory, groups = decode_memory(said, _MINE)
    assert len(groups) == len(_MINE.groups)
    for first, nbytes in memory.spans:
        assert 0 <= first < first + nbytes < 2**63
    table, nbytes = memory.table
    assert 0 <= table < table + nbytes < 2**63


_READERS: Final[tuple[Callable[[bytes], None], ...]] = (_ticket, _geometry, _memory)
