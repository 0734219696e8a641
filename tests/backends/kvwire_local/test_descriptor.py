"""Descriptors: short, exact, and read with suspicion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_local.descriptor import PlaceKind, decode, encode, encode_piece


def fragments(addresses: list[int], lengths: list[int]) -> Fragments:
    return Fragments(
        np.array(addresses, np.uint64),
        np.array(lengths, np.uint64),
        owner=None,
        writable=False,
    )


lists = st.lists(
    st.tuples(st.integers(0, 2**46), st.integers(1, 2**20)), min_size=1, max_size=50
)
# As of a KV cache: one length but for the ends, distances of one unit.
regular = st.tuples(
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=100),
    st.integers(1, 2**16),
    st.integers(1, 2**16),
    st.integers(1, 2**16),
    st.integers(0, 16),
)


def assert_is_read_back(kind: PlaceKind, arena: int, said: Fragments) -> bytes | None:
    descriptor = encode(kind, arena, said)
    if descriptor is not None:
        place = decode(descriptor, said.nbytes)
        assert (place.kind, place.arena) == (kind, arena)
        assert place.fragments is not None
        assert place.fragments.addresses.tolist() == said.addresses.tolist()
        assert place.fragments.lengths.tolist() == said.lengths.tolist()
    return descriptor


@given(lists)
def test_any_list_that_fits_is_read_back(pieces: list[tuple[int, int]]) -> None:
    said = fragments(*map(list, zip(*pieces, strict=True)))
    descriptor = assert_is_read_back(PlaceKind.MEMORY, 0, said)
    span = max(a for a, _ in pieces) - min(a for a, _ in pieces)
    assert descriptor is not None or span >= 2**32


@given(regular)
def test_lists_of_a_cache_take_4_bytes_a_fragment(
    cache: tuple[int, list[int], int, int, int, int],
) -> None:
    base, places, first, middle, last, shift = cache
    lengths = [middle] * len(places)
    lengths[0], lengths[-1] = first, last
    said = fragments([base + (place << shift) for place in places], lengths)
    descriptor = assert_is_read_back(PlaceKind.ARENA, 3, said)
    assert descriptor is not None
    assert len(descriptor) == 32 + 4 * len(places)


def test_what_does_not_fit_has_no_descriptor() -> None:
    many = DESCRIPTOR_BYTES_MAX // 4
    assert (
        encode(PlaceKind.MEMORY, 0, fragments([2 * i for i in range(many)], [1] * many))
        is None
    )
    half = DESCRIPTOR_BYTES_MAX // 8
    mixed = fragments([4 * i for i in range(half)], [1 + i % 2 for i in range(half)])
    assert encode(PlaceKind.MEMORY, 0, mixed) is None
    assert encode(PlaceKind.MEMORY, 0, fragments([1, 1 << 45], [1, 1])) is None
    assert encode(PlaceKind.MEMORY, 0, fragments([1], [1 << 32])) is None


def test_what_adds_up_to_something_else_is_refused() -> None:
    descriptor = bytearray(
        encode(PlaceKind.MEMORY, 0, fragments([0, 100], [5, 5])) or b""
    )
    with pytest.raises(ProtocolError, match="fragments with 10 bytes instead of 11"):
        decode(bytes(descriptor), 11)
    with pytest.raises(ProtocolError, match="50 bytes instead of 51"):
        decode(encode_piece(PlaceKind.MEMORY, 0, 4096, 50), 51)
    descriptor[20], descriptor[28] = 0, 10
    with pytest.raises(ProtocolError, match="or an empty fragment"):
        decode(bytes(descriptor), 10)


def test_a_piece_is_told_as_a_list_of_one() -> None:
    said = fragments([1 << 45], [1 << 20])
    descriptor = encode(PlaceKind.ARENA, 5, said)
    assert descriptor == encode_piece(PlaceKind.ARENA, 5, 1 << 45, 1 << 20)
    assert assert_is_read_back(PlaceKind.ARENA, 5, said) == descriptor


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, 3, "kind 3"),
        (1, 2, "form 2"),
        (2, 64, "shift 64"),
        (3, 1, "must be 0"),
        (4, 1, "must be 0"),
        (16, 2, "for 2 fragments"),
        (16, 0, "for 0 fragments"),
        (15, 0x80, "beyond the end"),
        (28, 99, "in the form for several"),
        (20, 99, "in the form for several"),
        (32, 1, "in the form for several"),
    ],
)
def test_each_field_is_checked(place: int, value: int, said: str) -> None:
    descriptor = bytearray(encode(PlaceKind.MEMORY, 0, fragments([4096], [100])) or b"")
    descriptor[place] = value
    with pytest.raises(ProtocolError, match=said) as caught:
        decode(bytes(descriptor), 100)
    assert caught.value.rule == "KVW-LN-07"
