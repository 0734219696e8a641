"""How a payload becomes messages, and what a descriptor may say of it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import MalformedFrame
from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB
from kvwire.memory.copy import address_of
from kvwire_ucx.bootstrap import MESSAGES
from kvwire_ucx.pieces import (
    KEY_BYTES_MAX,
    PIECE_BYTES,
    PIECES_MAX,
    LentFragment,
    descriptor,
    is_lent,
    lent_descriptor,
    piece_lengths,
    pieces,
    read_descriptor,
    read_lent,
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


@given(number=st.integers(0, MESSAGES - 1))
def test_what_is_sent_is_not_lent(number: int) -> None:
    assert not is_lent(descriptor(number, [1, 2]))
    assert not is_lent(b"")


def test_long_keys_are_not_told_and_the_longest_fit() -> None:
    longest = LentFragment(1, 1, bytes(KEY_BYTES_MAX))
    assert lent_descriptor(2, [LentFragment(1, 1, longest.key + b"\0")]) is None
    said = lent_descriptor(2, [longest] * PIECES_MAX)
    assert said is not None
    assert len(said) <= DESCRIPTOR_BYTES_MAX


def _said(*parts: tuple[int, int, int, bytes], number: int = 2) -> bytes:
    head = struct.pack(">I", number | 1 << 31)
    return head + b"".join(
        struct.pack(">QIH", address, nbytes, key_bytes) + key
        for address, nbytes, key_bytes, key in parts
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80", "1 bytes"),
        (_said(), "0 bytes for a payload of 100"),
        (_said((1, 100, 3, b"key"), number=MESSAGES), "message 8388608"),
        (_said((1, 100, 3, b"key"))[:-1], "a key of 3 bytes"),
        (_said((1, 100, 0, b"")), "a key of 0 bytes"),
        (_said((1, 100, KEY_BYTES_MAX + 1, bytes(KEY_BYTES_MAX + 1))), "a key of 1001"),
        (_said((1, 100, 3, b"key")) + b"rest", "25 bytes, of which 21"),
        (_said((2**63, 100, 3, b"key")), "100 bytes at 0x8000000000000000"),
        (_said((1, 0, 3, b"key")), "0 bytes at 0x1"),
        (_said((1, 99, 3, b"key")), "99 bytes for a payload of 100"),
        (_said(*[(1, 1, 1, b"k")] * (PIECES_MAX + 1)), "are fragments"),
        (bytes([128]) * (DESCRIPTOR_BYTES_MAX + 1), "32769 bytes"),
    ],
)
def test_what_no_lane_makes_is_refused(data: bytes, words: str) -> None:
    assert is_lent(data)
    with pytest.raises(MalformedFrame, match=f"lent memory: .*{words}"):
        read_lent(data, 100)
