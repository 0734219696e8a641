"""Layers by themselves: acknowledged together, and marked by their only chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import MalformedFrame
from kvwire.limits import SEGMENTS_MAX, SEGMENTS_TOGETHER
from kvwire.proto.connection import LAST_FIN_DELAY_S
from kvwire.proto.events import SegmentsAcknowledged
from kvwire.proto.records import Box, packed_mark, read_mark
from kvwire.wire.header import FrameType, decode_header, encode_header
from tests.proto.moving import CHUNK, Moved, expect_fine, moved


def acknowledged(m: Moved) -> list[tuple[int, ...]]:
    """What each SEGMENT_ACK has said."""
    return [e.numbers for e in m.producer.heard(SegmentsAcknowledged)]


def test_segments_are_acknowledged_together() -> None:
    """Some at once, the rest when nothing more has come for a while."""
    m = moved()
    for _ in range(SEGMENTS_TOGETHER + 1):
        m.mark(b"x")
        m.pair.run()
    together = tuple(range(1, SEGMENTS_TOGETHER + 1))
    assert acknowledged(m) == [together]
    m.pair.advance(LAST_FIN_DELAY_S)
    expect_fine(m.pair)
    assert acknowledged(m) == [together, (SEGMENTS_TOGETHER + 1,)]
    m.commit()
    expect_fine(m.pair)
    assert not m.over()
    m.pair.advance(LAST_FIN_DELAY_S)
    assert m.over()


# --- marks in the header of DATA


@pytest.mark.parametrize(
    "box", [(64, 0, 1, 0, 1), (0, 4096, 1, 0, 1), (0, 0, 1, 0, 65536)]
)
def test_a_mark_that_has_no_room_in_an_offset(box: Box) -> None:
    assert packed_mark(box, 0) is None


@given(
    st.integers(0, 2),
    st.tuples(*(st.integers(0, 2**bits) for bits in (6, 12, 12, 16, 16))),
)
def test_a_mark_as_an_offset(commit: int, box: Box) -> None:
    """It comes back, or has no room."""
    mark = packed_mark(box, commit)
    fits = all(f >> bits == 0 for f, bits in zip(box, (6, 12, 12, 16, 16), strict=True))
    assert (mark is not None) == fits
    if mark is not None:
        raw = encode_header(FrameType.MARKED_DATA, 0, 0, 7, 1, 3, mark)
        body = read_mark(decode_header(raw))
        assert (body.number, body.box, body.nbytes, body.commit) == (3, box, 7, commit)


def test_commit_sends_unsent_marks() -> None:
    m = moved()
    m.producer.stalled = True
    for data in (b"x", b"y" * (CHUNK + 1), b"z"):
        m.mark(data)
    m.commit()
    m.producer.stalled = False
    m.producer.collect()
    assert m.names == ["SEGMENT"] * 3 + ["COMMIT"] + ["DATA"] * 4
    expect_fine(m.pair)


def test_a_damaged_segment_with_its_mark() -> None:
    m = moved()
    m.mark(b"x")
    header, _ = m.producer.wire.pop()
    m.producer.wire.append((header, b"y"))
    m.commit()
    m.pair.run()
    assert m.producer.transfers[m.outgoing].damaged == [1]


def test_a_commit_that_there_is_not() -> None:
    raw = encode_header(FrameType.MARKED_DATA, 0, 0, 7, 1, 3, 3 << 62)
    with pytest.raises(MalformedFrame, match="commit 3"):
        read_mark(decode_header(raw))


def test_a_number_beyond_the_largest() -> None:
    """So a producer cannot make the consumer keep more marks than it may."""
    for number, fits in ((SEGMENTS_MAX, True), (SEGMENTS_MAX + 1, False)):
        header = decode_header(
            encode_header(FrameType.MARKED_DATA, 0, 0, 7, 1, number, 1 << 32 | 1)
        )
        if fits:
            assert read_mark(header).number == number
        else:
            with pytest.raises(MalformedFrame, match=f"segment {number}"):
                read_mark(header)
