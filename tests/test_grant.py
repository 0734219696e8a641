"""Grants as their holders have them: bytes, and slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import Access, Grant, UsageError

GRANT = Grant(
    access=Access.READWRITE,
    connection=bytes(range(16)),
    grant=7,
    generation=2,
    token=b"secret token 16b",
    offset=100,
    nbytes=50,
)
_U63 = st.integers(0, 2**63 - 1)
_SIZES = st.integers(0, 64 << 30)

grants = st.builds(
    Grant,
    access=st.sampled_from([Access.READ, Access.WRITE, Access.READWRITE]),
    connection=st.binary(min_size=16, max_size=16),
    grant=_U63,
    generation=_U63,
    token=st.binary(min_size=16, max_size=16),
    offset=_SIZES,
    nbytes=_SIZES,
)


@given(grant=grants)
def test_bytes_and_back(grant: Grant) -> None:
    raw = grant.to_bytes()
    assert Grant.from_bytes(raw) == grant
    assert Grant.from_bytes(memoryview(bytearray(raw))) == grant
    assert len(raw) <= 160


@given(raw=st.binary(max_size=100))
def test_other_bytes_are_no_grant(raw: bytes) -> None:
    with pytest.raises(UsageError, match="grant"):
        Grant.from_bytes(raw)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((0, b"kvg2"), (4, b"\0"), (4, b"\4"), (5, b"\1"), (7, b"\1")),
        *((24, b"\xff" * 8), (56, b"\xff" * 8)),
    ],
    ids=[
        *("magic", "no access", "unknown access", "beside access", "behind access"),
        *("grant", "offset"),
    ],
)
def test_each_field_is_checked(at: int, value: bytes) -> None:
    raw = bytearray(GRANT.to_bytes())
    raw[at : at + len(value)] = value
    with pytest.raises(UsageError, match="no grant of this version"):
        Grant.from_bytes(raw)


_INDEX = st.none() | st.integers(-60, 60)


@given(start=_INDEX, stop=_INDEX)
def test_slices_are_those_of_bytes(start: int | None, stop: int | None) -> None:
    whole = range(GRANT.offset, GRANT.offset + GRANT.nbytes)
    expected, part = whole[start:stop], GRANT[start:stop]
    assert len(part) == part.nbytes == len(expected)
    if expected:
        assert part.offset == expected.start
    assert part[:].token == GRANT.token


def test_a_slice_of_a_slice() -> None:
    assert GRANT[10:40][5:10] == GRANT[15:20]


def test_a_grant_is_not_indexed_and_not_stepped_through() -> None:
    with pytest.raises(UsageError, match="step must be 1"):
        GRANT[::2]
    with pytest.raises(UsageError, match="no single bytes"):
        GRANT[3]  # type: ignore[index]


def test_the_token_is_never_shown() -> None:
    shown = f"{GRANT!r} {GRANT}"
    for spelling in (GRANT.token.decode(), GRANT.token.hex()):
        assert spelling not in shown
    assert "nbytes=50" in shown
