"""The 32 bytes: what is read back is what was written, and nothing else is read."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import (
    FrameTooLarge,
    MalformedFrame,
    ProtocolError,
    UnexpectedFrame,
)
from kvwire.limits import (
    CHUNK_BYTES_MAX,
    CONTROL_BODY_BYTES_MAX,
    EAGER_BYTES_MAX,
    HANDSHAKE_BODY_BYTES,
    HEADER_BYTES,
    SEAL_BYTES,
)
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    HANDSHAKE_TYPES,
    Flag,
    FrameType,
    Header,
    decode_header,
    encode_header,
)

BITS = range(HEADER_BYTES * 8)
every_type = pytest.mark.parametrize("frame_type", list(FrameType))

# Written out here once more, from the document and not from the code.
LARGEST = {
    FrameType.HELLO: HANDSHAKE_BODY_BYTES,
    FrameType.ACCEPT: HANDSHAKE_BODY_BYTES,
    FrameType.CONFIRM: HANDSHAKE_BODY_BYTES,
    FrameType.REFUSE: HANDSHAKE_BODY_BYTES + SEAL_BYTES,
    FrameType.OFFER: CONTROL_BODY_BYTES_MAX,
    FrameType.CHOICE: CONTROL_BODY_BYTES_MAX,
    FrameType.LANE_OPEN: 8 * 1024 + 1024,
    FrameType.LANE_CLOSE: 9 * 256 + 1024,
    FrameType.LANE_DATA: 32 * 1024 + 128,
    FrameType.OPEN: CONTROL_BODY_BYTES_MAX,
    FrameType.AGREE: CONTROL_BODY_BYTES_MAX,
    FrameType.SEGMENT_ACK: 5 * 1024 + 64,
    FrameType.COMMIT_ACK: CONTROL_BODY_BYTES_MAX,
    FrameType.MESSAGE: EAGER_BYTES_MAX,
    FrameType.MARKED_DATA: 16 * 1024 * 1024,
    FrameType.DATA: CHUNK_BYTES_MAX,
}
SMALL_CONTROL = 1024 + SEAL_BYTES


def smallest(frame_type: FrameType) -> int:
    if frame_type in HANDSHAKE_TYPES:
        return HANDSHAKE_BODY_BYTES
    return 0 if frame_type == FrameType.MESSAGE else 1


def largest(frame_type: FrameType) -> int:
    return LARGEST.get(frame_type, SMALL_CONTROL)


def allowed_flags(frame_type: int) -> set[int]:
    if frame_type >= FIRST_PAYLOAD_TYPE:
        return {0, Flag.CHECKED}
    return {Flag.SEALED, Flag.CHECKED}


def example(frame_type: FrameType) -> bytes:
    return encode_header(
        frame_type, Flag.CHECKED, 7, smallest(frame_type) or 5, 3, 2, 99, 0xABCD
    )


def repaired(raw: bytes | bytearray) -> bytes:
    """The same bytes under a header check that matches them."""
    return bytes(raw[:28]) + zlib.crc32(raw[:28]).to_bytes(4, "little")


u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))


@st.composite
def headers(draw: st.DrawFn) -> Header:
    frame_type = draw(st.sampled_from(FrameType))
    flags = draw(st.sampled_from(sorted(allowed_flags(frame_type))))
    length = draw(st.integers(smallest(frame_type), largest(frame_type)))
    check = draw(u32) if flags == Flag.CHECKED else 0
    numbers = (draw(u32), draw(u32), draw(u64))
    raw = encode_header(frame_type, flags, draw(u16), length, *numbers, check)
    return decode_header(raw)


@given(headers())
def test_what_is_written_is_read(header: Header) -> None:
    """Every field, over its whole range."""
    raw = encode_header(
        header.type,
        header.flags,
        header.sequence,
        header.length,
        header.request,
        header.segment,
        header.offset,
        header.payload_check,
    )
    assert len(raw) == HEADER_BYTES
    for view in (raw, bytearray(raw), memoryview(raw)):
        assert decode_header(view) == header


@pytest.mark.rule("KVW-HD-01", "keeps")
@pytest.mark.rule("KVW-HD-02", "keeps")
@every_type
def test_each_type_is_read(frame_type: FrameType) -> None:
    """The layout, byte by byte, for one frame of each type."""
    raw = example(frame_type)
    header = decode_header(raw)
    assert raw[0] == header.type == frame_type
    assert raw[1] == header.flags == Flag.CHECKED
    assert raw[2:4] == (7).to_bytes(2, "little")
    assert raw[4:8] == header.length.to_bytes(4, "little")
    assert raw[8:12] == (3).to_bytes(4, "little")
    assert raw[12:16] == (2).to_bytes(4, "little")
    assert raw[16:24] == (99).to_bytes(8, "little")
    assert raw[24:28] == (0xABCD).to_bytes(4, "little")
    assert raw[28:] == zlib.crc32(raw[:28]).to_bytes(4, "little")


def test_fields_that_are_not_given_are_zero() -> None:
    """A frame of no request has none."""
    brief = encode_header(FrameType.PING, Flag.CHECKED, 7, 5)
    assert brief == encode_header(FrameType.PING, Flag.CHECKED, 7, 5, 0, 0, 0, 0)


@pytest.mark.rule("KVW-HD-01", "breaks")
@every_type
def test_every_flipped_bit_is_seen(frame_type: FrameType) -> None:
    """Goal R2: each of the 256 bits of a header, the bits of the check included."""
    raw = example(frame_type)
    for bit in BITS:
        with pytest.raises(MalformedFrame) as caught:
            decode_header(flipped(raw, bit))
        assert caught.value.rule == "KVW-HD-01", f"bit {bit}"


def flipped(raw: bytes, bit: int) -> bytes:
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_every_burst_is_seen() -> None:
    """Up to 32 neighbouring bits in any state: what CRC-32 promises."""
    chance = random.Random(2)
    raw = int.from_bytes(example(FrameType.DATA), "little")
    for _ in range(10_000):
        burst = chance.randrange(1, 2**32) << chance.randrange(0, 8 * 28 - 32)
        with pytest.raises(MalformedFrame):
            decode_header((raw ^ burst).to_bytes(HEADER_BYTES, "little"))


@pytest.mark.rule("KVW-HD-02", "breaks")
def test_every_other_type_is_unknown() -> None:
    """All of the 256 numbers that are no type."""
    unknown = set(range(256)) - set(FrameType)
    assert len(unknown) == 256 - len(FrameType)
    for number in unknown:
        with pytest.raises(UnexpectedFrame) as caught:
            decode_header(encode_header(number, Flag.CHECKED, 0, 1))
        assert caught.value.rule == "KVW-HD-02"


def test_a_wrong_check_is_found_before_an_unknown_type() -> None:
    """Nothing of a damaged header is believed, not even that its type is unknown."""
    raw = encode_header(0xEE, 0xFF, 0, 2**32 - 1)
    with pytest.raises(ProtocolError) as caught:
        decode_header(flipped(raw, 255))
    assert caught.value.rule == "KVW-HD-01"


def flags_of(frame_type: FrameType, *, allowed: bool) -> Iterator[bytes]:
    for flags in range(256):
        if (flags in allowed_flags(frame_type)) is allowed:
            yield encode_header(frame_type, flags, 0, largest(frame_type))


@pytest.mark.rule("KVW-HD-03", "keeps")
@every_type
def test_flags_that_a_type_allows(frame_type: FrameType) -> None:
    """Two of the 256, and which two depends on whether payload follows."""
    read = [decode_header(raw).flags for raw in flags_of(frame_type, allowed=True)]
    assert set(read) == allowed_flags(frame_type)


@pytest.mark.rule("KVW-HD-03", "breaks")
@every_type
def test_all_other_flags(frame_type: FrameType) -> None:
    """Unknown bits, both bits at once, a sealed payload, an unprotected control."""
    refused = list(flags_of(frame_type, allowed=False))
    assert len(refused) == 254
    for raw in refused:
        with pytest.raises(MalformedFrame) as caught:
            decode_header(raw)
        assert caught.value.rule == "KVW-HD-03"


@pytest.mark.rule("KVW-HD-04", "keeps")
@every_type
def test_lengths_that_a_type_allows(frame_type: FrameType) -> None:
    """Both ends of the range."""
    for length in (smallest(frame_type), largest(frame_type)):
        raw = encode_header(frame_type, Flag.CHECKED, 0, length)
        assert decode_header(raw).length == length


@pytest.mark.rule("KVW-HD-04", "breaks")
@every_type
def test_lengths_beyond_the_range(frame_type: FrameType) -> None:
    """One less, one more, and numbers that a signed type would take for negative."""
    low, high = smallest(frame_type), largest(frame_type)
    beyond = {low - 1, high + 1, 2**31 - 1, 2**31, 2**32 - 1} - {-1}
    for length in beyond:
        with pytest.raises(FrameTooLarge) as caught:
            decode_header(encode_header(frame_type, Flag.CHECKED, 0, length))
        assert caught.value.rule == "KVW-HD-04"
        assert f"{low} to {high}" in str(caught.value)


@pytest.mark.rule("KVW-HD-06", "keeps")
@every_type
def test_a_check_where_the_flag_says_so(frame_type: FrameType) -> None:
    """And zero where it does not."""
    assert decode_header(example(frame_type)).payload_check == 0xABCD
    (other,) = allowed_flags(frame_type) - {Flag.CHECKED}
    raw = encode_header(frame_type, other, 0, largest(frame_type))
    assert decode_header(raw).payload_check == 0


@pytest.mark.rule("KVW-HD-06", "breaks")
@every_type
def test_a_check_without_the_flag(frame_type: FrameType) -> None:
    """A field that means nothing is zero, or somebody hides something in it."""
    (other,) = allowed_flags(frame_type) - {Flag.CHECKED}
    raw = encode_header(frame_type, other, 0, largest(frame_type), payload_check=1)
    with pytest.raises(MalformedFrame) as caught:
        decode_header(raw)
    assert caught.value.rule == "KVW-HD-06"


@given(
    st.sampled_from(FrameType),
    st.integers(0, 3),
    st.binary(min_size=30, max_size=30),
)
def test_any_bytes_are_a_header_or_break_a_rule(
    frame_type: FrameType, flags: int, rest: bytes
) -> None:
    """With a check that matches, so that the rules behind it are reached."""
    try:
        header = decode_header(repaired(bytes([frame_type, flags]) + rest))
    except ProtocolError:
        return
    assert smallest(FrameType(header.type)) <= header.length
    assert header.length <= largest(FrameType(header.type))
