"""Bytes in any pieces make the same frames."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import FrameTooLarge, MalformedFrame
from kvwire.limits import HEADER_BYTES
from kvwire.wire.decoder import Decoder, Frame
from kvwire.wire.header import Flag, FrameType, encode_header

PING = encode_header(FrameType.PING, Flag.CHECKED, 0, 3) + b"abc"
EMPTY = encode_header(FrameType.MESSAGE, 0, 1, 0, offset=7)
DATA = encode_header(FrameType.DATA, 0, 2, 40, request=1) + bytes(range(40))
STREAM = PING + EMPTY + DATA + EMPTY


def decoded(*pieces: bytes) -> list[Frame]:
    decoder = Decoder()
    frames: list[Frame] = []
    for piece in pieces:
        frames += decoder.feed(piece)
        assert decoder.wanted_bytes >= 1
    assert not decoder.in_frame
    return frames


def test_frames_come_out_whole() -> None:
    """Header decoded and raw, and all that follows it."""
    frames = decoded(STREAM)
    assert [frame.header.type for frame in frames] == [
        FrameType.PING,
        FrameType.MESSAGE,
        FrameType.DATA,
        FrameType.MESSAGE,
    ]
    assert [frame.body for frame in frames] == [b"abc", b"", bytes(range(40)), b""]
    assert b"".join(frame.raw_header + frame.body for frame in frames) == STREAM


def test_every_cut_into_three() -> None:
    """Goal S9b, exhaustively: no position of two cuts makes a difference."""
    whole = decoded(STREAM)
    for a, b in itertools.combinations_with_replacement(range(len(STREAM) + 1), 2):
        assert decoded(STREAM[:a], STREAM[a:b], STREAM[b:]) == whole


def test_byte_by_byte() -> None:
    """And what is missing is said before each byte."""
    decoder, missing = Decoder(), []
    found: list[Frame] = []
    for value in PING:
        missing.append(decoder.wanted_bytes)
        found += decoder.feed(bytes([value]))
    assert [frame.body for frame in found] == [b"abc"]
    assert missing == [*range(HEADER_BYTES, 0, -1), 3, 2, 1]


@given(st.lists(st.binary(max_size=9), max_size=9), st.data())
def test_any_messages_in_any_pieces(bodies: list[bytes], data: st.DataObject) -> None:
    """Frames of 0 to 9 bytes, cut anywhere."""
    stream = b"".join(
        encode_header(FrameType.MESSAGE, 0, 0, len(body)) + body for body in bodies
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert [frame.body for frame in decoded(*pieces)] == bodies


def test_an_end_inside_a_frame_shows() -> None:
    """In a header, between header and body, in a body; not between two frames."""
    for end in range(len(PING) + 1):
        decoder = Decoder()
        assert len(list(decoder.feed(PING[:end]))) == (end == len(PING))
        assert decoder.in_frame is (0 < end < len(PING))


def test_frames_before_a_broken_one_come_out() -> None:
    """And nothing after it, whatever is fed: there is no way back into step."""
    decoder = Decoder()
    feed = decoder.feed(PING + bytes(HEADER_BYTES) + PING)
    assert next(feed).body == b"abc"
    with pytest.raises(MalformedFrame) as broken:
        next(feed)
    assert broken.value.rule == "KVW-HD-01"
    for piece in (PING, b""):
        with pytest.raises(MalformedFrame) as again:
            list(decoder.feed(piece))
        assert again.value is broken.value


def test_a_length_is_refused_before_its_bytes_are_kept() -> None:
    """The header alone is enough."""
    too_long = encode_header(FrameType.PING, Flag.CHECKED, 0, 2**32 - 1)
    with pytest.raises(FrameTooLarge):
        list(Decoder().feed(too_long))
