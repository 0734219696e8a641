"""The 32 bytes: what is read back is what was written, and nothing else is read."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import limits
from kvwire.errors import FrameTooLarge, MalformedFrame, ProtocolError, UnexpectedFrame
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    HANDSHAKE_TYPES,
    Flag,
    FrameType,
    Header,
    decode_header,
    encode_header,
)

# Written out here once more, from the document and not from the code.
LARGEST = {
    FrameType.HELLO: limits.HANDSHAKE_BODY_BYTES,
    FrameType.ACCEPT: limits.HANDSHAKE_BODY_BYTES,
    FrameType.CONFIRM: limits.HANDSHAKE_BODY_BYTES,
    FrameType.REFUSE: limits.HANDSHAKE_BODY_BYTES + limits.SEAL_BYTES,
    FrameType.OFFER: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.CHOICE: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.LANE_OPEN: 8 * 1024 + 1024,
    FrameType.LANE_CLOSE: 9 * 256 + 1024,
    FrameType.LANE_DATA: 32 * 1024 + 128,
    FrameType.WINDOW_VIEW: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.WINDOW_MEMORY: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.WINDOW_OPENED: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.WINDOW_GET: 12 * 4096 + 1024,
    FrameType.OPEN: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.AGREE: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.SEGMENT_ACK: 5 * 1024 + 64,
    FrameType.COMMIT_ACK: limits.CONTROL_BODY_BYTES_MAX,
    FrameType.MESSAGE: limits.EAGER_BYTES_MAX,
    FrameType.MARKED_DATA: 16 * 1024 * 1024,
    FrameType.WINDOW_DATA: 256 * 1024,
    FrameType.DATA: limits.CHUNK_BYTES_MAX,
}
SMALL_CONTROL = 1024 + limits.SEAL_BYTES


def smallest(frame_type: FrameType) -> int:
    if frame_type in HANDSHAKE_TYPES:
        return limits.HANDSHAKE_BODY_BYTES
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


def expect_refused(
    raw: bytes, rule: str, kind: type[ProtocolError] = MalformedFrame
) -> str:
    """The header breaks this rule; what is said of it."""
    with pytest.raises(kind) as caught:
        decode_header(raw)
    assert caught.value.rule == rule, raw.hex()
    return str(caught.value)


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
    assert len(raw) == limits.HEADER_BYTES
    for view in (raw, bytearray(raw), memoryview(raw)):
        assert decode_header(view) == header


@pytest.mark.rule("KVW-HD-01", "KVW-HD-02", "keeps")
def test_each_type_is_read() -> None:
    """The layout, byte by byte, for one frame of each type."""
    for frame_type in FrameType:
        raw = example(frame_type)
        header = decode_header(raw)
        assert raw[0] == header.type == frame_type
        assert raw[1] == header.flags == Flag.CHECKED
        fields = ((2, 7), (4, header.length), (4, 3), (4, 2), (8, 99), (4, 0xABCD))
        assert raw[2:28] == b"".join(n.to_bytes(size, "little") for size, n in fields)
        assert raw[28:] == zlib.crc32(raw[:28]).to_bytes(4, "little")
    brief = encode_header(FrameType.PING, Flag.CHECKED, 7, 5)
    assert brief == encode_header(FrameType.PING, Flag.CHECKED, 7, 5, 0, 0, 0, 0)


@pytest.mark.rule("KVW-HD-01", "breaks")
def test_every_flipped_bit_is_seen() -> None:
    """Goal R2: each of the 256 bits of a header, the bits of the check included."""
    for frame_type in FrameType:
        raw = example(frame_type)
        for bit in range(8 * limits.HEADER_BYTES):
            expect_refused(flipped(raw, bit), "KVW-HD-01")
    # Nothing of a damaged header is believed, not even that its type is unknown.
    unknown = encode_header(0xEE, 0xFF, 0, 2**32 - 1)
    expect_refused(flipped(unknown, 255), "KVW-HD-01")


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
            decode_header((raw ^ burst).to_bytes(limits.HEADER_BYTES, "little"))


@pytest.mark.rule("KVW-HD-02", "breaks")
def test_every_other_type_is_unknown() -> None:
    """All of the 256 numbers that are no type."""
    for number in set(range(256)) - set(FrameType):
        raw = encode_header(number, Flag.CHECKED, 0, 1)
        expect_refused(raw, "KVW-HD-02", UnexpectedFrame)


@pytest.mark.rule("KVW-HD-03", "keeps")
@pytest.mark.rule("KVW-HD-03", "breaks")
def test_flags() -> None:
    """Two of the 256, and which two depends on whether payload follows."""
    for frame_type in FrameType:
        for flags in range(256):
            raw = encode_header(frame_type, flags, 0, largest(frame_type))
            if flags in allowed_flags(frame_type):
                assert decode_header(raw).flags == flags
            else:
                expect_refused(raw, "KVW-HD-03")


@pytest.mark.rule("KVW-HD-04", "keeps")
@pytest.mark.rule("KVW-HD-04", "breaks")
def test_lengths() -> None:
    """Both ends of the range, one beyond each, and what looks negative if signed."""
    for frame_type in FrameType:
        low, high = smallest(frame_type), largest(frame_type)
        for length in (low, high):
            raw = encode_header(frame_type, Flag.CHECKED, 0, length)
            assert decode_header(raw).length == length
        for length in {low - 1, high + 1, 2**31 - 1, 2**31, 2**32 - 1} - {-1}:
            raw = encode_header(frame_type, Flag.CHECKED, 0, length)
            said = expect_refused(raw, "KVW-HD-04", FrameTooLarge)
            assert f"{low} to {high}" in said


@pytest.mark.rule("KVW-HD-06", "keeps")
@pytest.mark.rule("KVW-HD-06", "breaks")
def test_a_check_where_the_flag_says_so() -> None:
    """And zero where it does not, or somebody hides something in it."""
    for frame_type in FrameType:
        assert decode_header(example(frame_type)).payload_check == 0xABCD
        (other,) = allowed_flags(frame_type) - {Flag.CHECKED}
        for check in (0, 1):
            raw = encode_header(
                frame_type, other, 0, largest(frame_type), payload_check=check
            )
            if check:
                expect_refused(raw, "KVW-HD-06")
            else:
                assert decode_header(raw).payload_check == 0


@given(
    st.sampled_from(FrameType), st.integers(0, 3), st.binary(min_size=30, max_size=30)
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
