"""Grants that somebody else has written, and accesses that nobody has granted."""

from __future__ import annotations

from kvwire.errors import AccessDenied, StaleRegion, UsageError
from kvwire.limits import REQUEST_BYTES_MAX
from kvwire.proto.regions import GrantRow, Grants, RegionRecord, RegionTable
from kvwire.types import Access, BufferId, Grant
from tests.programs.fuzz.reader import Reader

_DIRECTIONS = (Access.READ, Access.WRITE, Access.READWRITE)
_STEPS_MAX = 200


def run(data: bytes) -> int:
    """As the bytes of a grant; and as calls beside a model of what is allowed."""
    _as_bytes(data)
    tables = _Tables()
    reader = Reader(data)
    for _ in range(_STEPS_MAX):
        if not reader:
            break
        tables.step(reader)
    return 2 * len(data)


def _as_bytes(data: bytes) -> None:
    try:
        grant = Grant.from_bytes(data)
    except UsageError:
        return
    assert grant.to_bytes() == data
    assert 0 <= len(grant) <= REQUEST_BYTES_MAX
    part = grant[3:10]
    assert part.offset >= grant.offset
    assert part.offset + len(part) <= max(grant.offset + len(grant), part.offset)


class _Tables:
    """Two connections, their grants, and what each of these allows."""

    def __init__(self) -> None:
        self._regions = RegionTable()
        self._grants = (Grants(b"one" * 10), Grants(b"two" * 10))
        self._made: list[RegionRecord] = []
        self._rows: list[tuple[int, GrantRow]] = []

    def step(self, reader: Reader) -> None:
        """Do what the next byte says."""
        step = reader.byte() % 6
        if step == 0 or not self._made:
            # No more than an address space holds: a region is memory of ours.
            access, nbytes = reader.pick(_DIRECTIONS), reader.number() % 2**62
            self._made.append(self._regions.register(BufferId(1), nbytes, access))
        elif step == 1:
            self._give(reader)
        elif step == 2:
            self._regions.revoke(reader.pick(self._made))
        elif step == 3:
            self._regions.close(reader.pick(self._made))
        elif self._rows:
            self._use(reader, forged=step == 5)

    def _give(self, reader: Reader) -> None:
        whose, region = reader.byte() & 1, reader.pick(self._made)
        offset, nbytes = reader.number(), reader.number()
        access = reader.pick(_DIRECTIONS)
        try:
            row = self._grants[whose].give(region, offset, nbytes, access)
        except UsageError:
            return
        assert region.open
        assert offset + nbytes <= region.nbytes
        assert not access & ~region.access
        self._rows.append((whose, row))

    def _use(self, reader: Reader, *, forged: bool) -> None:
        owner, row = reader.pick(self._rows)
        whose, offset, nbytes = reader.byte() & 1, reader.number(), reader.number()
        access = reader.pick(_DIRECTIONS)
        number, generation, token = int(row.id), int(row.generation), row.token
        if forged:
            number, generation = reader.number(), reader.number()
            token = reader.take(16) or token
        try:
            found = self._grants[whose].check(
                grant=number,
                generation=generation,
                token=token,
                offset=offset,
                nbytes=nbytes,
                access=access,
            )
        except (AccessDenied, StaleRegion):
            assert forged or not _allowed(owner == whose, row, offset, nbytes, access)
            return
        assert _allowed(True, found, offset, nbytes, access)
        assert found.token == token
        assert forged or (owner == whose and found is row)


def _allowed(
    theirs: bool, row: GrantRow, offset: int, nbytes: int, access: Access
) -> bool:
    return (
        theirs
        and offset + nbytes <= row.nbytes
        and not access & ~row.access
        and row.region.open
        and row.generation == row.region.generation
    )
