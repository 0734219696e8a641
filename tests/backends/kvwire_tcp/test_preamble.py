"""The first bytes on a lane's socket."""

from __future__ import annotations

import hmac

from hypothesis import given
from hypothesis import strategies as st

from kvwire_tcp import preamble

SECRET, NONCE = bytes(range(32)), bytes(range(100, 100 + preamble.NONCE_BYTES))
PREAMBLE = preamble.make_preamble(SECRET, 3, NONCE)


@given(st.binary(min_size=8, max_size=32))
def test_other_bytes_are_none(header: bytes) -> None:
    assert preamble.is_preamble(memoryview(header)) == (header[:8] == preamble.MAGIC)


def test_it_proves_one_lane_only() -> None:
    assert preamble.is_proof(PREAMBLE, SECRET, 3)
    assert not preamble.is_proof(PREAMBLE, SECRET, 4)
    assert not preamble.is_proof(PREAMBLE, bytes(32), 3)


@given(st.integers(0, preamble.PREAMBLE_BYTES * 8 - 1))
def test_every_bit_of_it_is_covered(bit: int) -> None:
    changed = bytearray(PREAMBLE)
    changed[bit // 8] ^= 1 << bit % 8
    assert not preamble.is_proof(bytes(changed), SECRET, 3)


def test_the_layout_is_that_of_the_protocol_page() -> None:
    def prove(purpose: bytes, data: bytes) -> bytes:
        text = b"kvwire tcp lane " + purpose + b"\0" + data
        return hmac.digest(SECRET, text, "sha256")

    fields = b"KVWIRE+L" + (3).to_bytes(8, "little") + prove(b"token", b"")[:16]
    fields += NONCE + bytes(160)
    assert fields + prove(b"client", fields) == PREAMBLE
    assert prove(b"server", PREAMBLE) == preamble.answer_to(PREAMBLE, SECRET)
