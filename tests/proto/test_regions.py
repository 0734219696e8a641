"""No access outside a grant: every edge of every number, in every state (goal S5).

The simulator uses grants of other connections, and old ones, in any order.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvwire.errors import AccessDenied, KVWireError, StaleRegion, UsageError
from kvwire.proto.regions import (
    GRANTS_MAX,
    REGIONS_MAX,
    GrantRow,
    Grants,
    RegionRecord,
    RegionTable,
)
from kvwire.types import Access, BufferId

KEY = b"g" * 32
BUFFER = BufferId(1)
SIZE, AT, LENGTH = 1000, 300, 200
# One answer, or who guesses would learn which grants there are.
NO_SUCH = "^no such grant on this connection$"
DIRECTIONS = (Access.READ, Access.WRITE, Access.READWRITE)


def region_of(
    regions: RegionTable, access: Access = Access.READWRITE, nbytes: int = SIZE
) -> RegionRecord:
    return regions.register(BUFFER, nbytes, access)


def ask(
    grants: Grants,
    row: GrantRow,
    offset: int = 0,
    nbytes: int = 1,
    access: Access = Access.READ,
    **changed: Any,
) -> GrantRow:
    shown = {"grant": row.id, "generation": row.generation, "token": row.token}
    return grants.check(
        offset=offset, nbytes=nbytes, access=access, **{**shown, **changed}
    )


def edges(size: int) -> list[int]:
    """0, 1, the size and its neighbours, and those of every power of two."""
    powers = {2**n + d for n in range(65) for d in (-1, 0, 1)}
    near = {size + d for d in (-2, -1, 0, 1, 2)}
    return sorted(powers | near | {-(2**n) for n in range(65)} | {0, 1})


@pytest.mark.rule("KVW-OS-03", "keeps")
@pytest.mark.rule("KVW-OS-03", "breaks")
@pytest.mark.parametrize("size", [0, 1, 200])
def test_every_edge_of_every_range(size: int) -> None:
    """Offset and length over all edges up to 2**64 and below 0, against plain sums."""
    grants = Grants(KEY)
    row = grants.give(region_of(RegionTable()), AT, size, Access.READWRITE)
    numbers = edges(size)
    accepted = 0
    for offset, nbytes in itertools.product(numbers, numbers):
        inside = min(offset, nbytes) >= 0 and offset + nbytes <= size
        try:
            assert ask(grants, row, offset, nbytes) is row
        except AccessDenied:
            assert not inside, f"{offset}+{nbytes} of {size} was refused"
        else:
            assert inside, f"{offset}+{nbytes} of {size} was accepted"
            accepted += 1
    assert accepted > 0


@pytest.mark.rule("KVW-OS-03", "KVW-OS-04", "keeps")
@pytest.mark.rule("KVW-OS-03", "KVW-OS-04", "breaks")
@pytest.mark.parametrize("state", ["open", "revoked", "granted anew", "closed"])
def test_every_direction_in_every_state(state: str) -> None:
    """A grant allows what it says, until its region is revoked or closed."""
    for asked in DIRECTIONS:
        for granted in DIRECTIONS:
            regions, grants = RegionTable(), Grants(KEY)
            region = region_of(regions)
            row = grants.give(region, AT, LENGTH, granted)
            match state:
                case "revoked":
                    regions.revoke(region)
                case "granted anew":
                    regions.revoke(region)
                    row = grants.give(region, AT, LENGTH, granted)
                case "closed":
                    regions.close(region)
            expected: type[KVWireError] | None = None
            if state in ("revoked", "closed"):
                expected = StaleRegion
            if asked & ~granted:
                expected = AccessDenied
            if expected is None:
                assert ask(grants, row, 0, LENGTH, asked) is row
            else:
                with pytest.raises(expected):
                    ask(grants, row, 0, LENGTH, asked)


@pytest.mark.rule("KVW-OS-03", "breaks")
def test_every_forged_field() -> None:
    """Goal S11: each field of a grant changed alone, and each bit of its token."""
    regions, grants = RegionTable(), Grants(KEY)
    region, other = region_of(regions), region_of(regions)
    row = grants.give(region, AT, LENGTH, Access.READ)
    second = grants.give(other, 0, LENGTH, Access.READ)
    for wrong in (second.id, 0, row.id + 2, 2**63 - 1):
        with pytest.raises(AccessDenied, match=NO_SUCH):
            ask(grants, row, grant=wrong)
    for bit in range(8 * len(row.token)):
        token = bytearray(row.token)
        token[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AccessDenied, match=NO_SUCH):
            ask(grants, row, token=bytes(token))
    for forged in (b"", bytes(16), row.token[:-1], second.token):
        with pytest.raises(AccessDenied, match=NO_SUCH):
            ask(grants, row, token=forged)
    for generation in (0, row.generation + 1, 2**63 - 1):
        with pytest.raises(StaleRegion):
            ask(grants, row, generation=generation)
    assert ask(grants, row) is row


def test_a_token_depends_on_everything_it_stands_for() -> None:
    """Connection, number, region, generation, range and direction."""

    def token(key: bytes = KEY, before: int = 0, **changed: Any) -> bytes:
        regions, grants = RegionTable(), Grants(key)
        for _ in range(changed.pop("regions", 0)):
            region_of(regions)
        region = region_of(regions)
        if changed.pop("revoked", False):
            regions.revoke(region)
        for _ in range(before):
            grants.give(region, 0, 1, Access.READ)
        row = {"offset": AT, "nbytes": LENGTH, "access": Access.READ, **changed}
        return grants.give(region, **row).token

    tokens = [
        token(),
        token(key=b"h" * 32),
        token(before=1),
        token(regions=1),
        token(revoked=True),
        token(offset=AT + 1),
        token(nbytes=LENGTH - 1),
        token(access=Access.READWRITE),
    ]
    assert len(set(tokens)) == len(tokens)
    assert token() == tokens[0]
    assert {len(made) for made in tokens} == {16}


@pytest.mark.parametrize("offset", [0, 1, AT, SIZE])
def test_a_grant_without_a_length_is_the_rest(offset: int) -> None:
    row = Grants(KEY).give(region_of(RegionTable()), offset, None, Access.READ)
    assert (row.offset, row.nbytes) == (offset, SIZE - offset)


def test_no_grant_beyond_its_region() -> None:
    """Our own user's mistake: an error that says the numbers."""
    whole: list[tuple[Any, Any]] = [(-1, 1), (0, -1), (0, SIZE + 1), (1, SIZE)]
    for offset, nbytes in [*whole, (SIZE + 1, 0), (2**64, 1), (1.5, 1), (0, "1")]:
        with pytest.raises(UsageError, match=f"{SIZE} bytes"):
            Grants(KEY).give(region_of(RegionTable()), offset, nbytes, Access.READ)


def test_no_grant_of_more_than_was_registered() -> None:
    """Read for read, write for write."""
    for registered in DIRECTIONS:
        for wanted in DIRECTIONS:
            grants, region = Grants(KEY), region_of(RegionTable(), registered)
            if wanted & ~registered:
                with pytest.raises(UsageError, match="registered for"):
                    grants.give(region, 0, 1, wanted)
            else:
                assert grants.give(region, 0, 1, wanted).access == wanted


def test_no_grant_of_a_closed_region() -> None:
    """It never opens again, and closing it twice is closing it once."""
    regions, grants = RegionTable(), Grants(KEY)
    region = region_of(regions)
    regions.close(region)
    generation = region.generation
    with pytest.raises(UsageError, match="closed"):
        grants.give(region, 0, 1, Access.READ)
    assert len(regions) == 0
    regions.close(region)
    assert region.generation > generation


def test_tables_are_bounded() -> None:
    """The last one that fits, and the first that does not; dead grants make room."""
    assert min(GRANTS_MAX, REGIONS_MAX) > 3
    regions, grants = RegionTable(2), Grants(KEY, 3)
    one, two = region_of(regions), region_of(regions)
    with pytest.raises(UsageError, match="2 regions"):
        region_of(regions)
    rows = [grants.give(region, 0, 1, Access.READ) for region in (one, two, two)]
    with pytest.raises(UsageError, match="3 grants"):
        grants.give(one, 0, 1, Access.READ)
    regions.revoke(two)
    assert grants.give(one, 0, 1, Access.READ).id > rows[-1].id
    assert len(grants) == 2
    regions.close(one)
    assert len(regions) == 1
    assert region_of(regions).id not in (one.id, two.id)
