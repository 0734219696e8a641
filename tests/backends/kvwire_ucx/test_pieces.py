"""How a payload becomes messages, and what a descriptor may say of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB
from kvwire.memory.copy import address_of
from kvwire_ucx.pieces import (
    PIECE_BYTES,
    PIECES_MAX,
    descriptor,
    piece_lengths,
    pieces,
    read_descriptor,
)

numbers = st.integers(0, 2**24 - 1)


def fragments(lengths: list[int]) -> Fragments:
    """Pieces of one arena, last one first."""
    arena = bytearray(sum(lengths))
    ends = len(arena) - np.cumsum(lengths)
    addresses = np.uint64(address_of(arena)) + ends.astype(np.uint64)
    sizes = np.array(lengths, np.uint64)
    return Fragments(addresses, sizes, owner=arena, writable=True)


@pytest.mark.parametrize(
    ("count", "nbytes", "messages"),
    [
        (1, 4 * PIECE_BYTES, 1),
        (2, PIECE_BYTES, 2),
        (2, PIECE_BYTES - 1, 1),
        (PIECES_MAX, PIECE_BYTES, PIECES_MAX),
        (PIECES_MAX + 1, PIECE_BYTES, 1),
        (256, 4 * KIB, 1),
    ],
)
def test_large_fragments_are_messages_of_their_own(
    count: int, nbytes: int, messages: int
) -> None:
    lengths = piece_lengths(fragments([nbytes] * count))
    assert lengths == ([nbytes] * messages if messages > 1 else [])


def test_what_is_in_one_piece_is_one_message() -> None:
    payload = memoryview(bytearray(4 * PIECE_BYTES))
    assert piece_lengths(payload) == []
    assert list(pieces(payload, [])) == [payload]


@given(lengths=st.lists(st.integers(1, 100), min_size=2, max_size=8))
def test_the_pieces_are_the_payload(lengths: list[int]) -> None:
    data = bytes(i % 251 for i in range(sum(lengths)))
    cut = list(pieces(memoryview(data), lengths))
    assert [piece.nbytes for piece in cut] == lengths
    assert b"".join(bytes(piece) for piece in cut if isinstance(piece, memoryview)) == (
        data
    )


@given(first=numbers, nbytes=st.integers(0, 2**32))
def test_of_one_message_only_the_number_is_said(first: int, nbytes: int) -> None:
    said = descriptor(first, [])
    assert len(said) == 4
    assert read_descriptor(said, nbytes) == (first, [])


def test_the_longest_descriptor_is_one_that_the_core_takes() -> None:
    assert len(descriptor(0, [PIECE_BYTES] * PIECES_MAX)) <= DESCRIPTOR_BYTES_MAX
