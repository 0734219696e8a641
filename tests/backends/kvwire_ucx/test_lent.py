"""Descriptors of memory that is lent: what one side writes the other reads, no more."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import MalformedFrame
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_ucx.bootstrap import MESSAGES
from kvwire_ucx.lent import (
    KEY_BYTES_MAX,
    LentFragment,
    is_lent,
    lent_descriptor,
    read_lent,
)
from kvwire_ucx.pieces import PIECES_MAX, descriptor

fragments = st.lists(
    st.builds(
        LentFragment,
        address=st.integers(0, 2**63 - 1),
        nbytes=st.integers(1, 2**32 - 1),
        key=st.binary(min_size=1, max_size=60),
    ),
    min_size=1,
    max_size=PIECES_MAX,
)
ONE = LentFragment(address=4096, nbytes=100, key=b"key")


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


def _said(*pieces: tuple[int, int, int, bytes], number: int = 2) -> bytes:
    head = struct.pack(">I", number | 1 << 31)
    return head + b"".join(
        struct.pack(">QIH", address, nbytes, key_bytes) + key
        for address, nbytes, key_bytes, key in pieces
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
