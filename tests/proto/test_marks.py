"""Layers by themselves, between two sides that say them in fewer frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import RequestCancelled, WireCode
from kvwire.limits import LAST_WORD_DELAY_S, SEGMENTS_TOGETHER
from kvwire.proto.events import SegmentsAcknowledged
from kvwire.proto.marks import packed_mark, read_mark
from kvwire.proto.records import Box
from kvwire.wire.header import FrameType, decode_header, encode_header
from tests.proto.expect import expect_fine
from tests.proto.moving import BOX, CHUNK, Moved, events_of, moved


def acknowledged(m: Moved) -> list[tuple[int, ...]]:
    """What each SEGMENT_ACK has said."""
    return [e.numbers for e in events_of(m.producer, SegmentsAcknowledged)]


def test_segments_are_acknowledged_together() -> None:
    """Some at once, the rest when nothing more has come for a while."""
    m = moved(layers=True)
    for _ in range(SEGMENTS_TOGETHER + 1):
        m.mark(b"x")
        m.pair.run()
    together = tuple(range(1, SEGMENTS_TOGETHER + 1))
    assert acknowledged(m) == [together]
    m.pair.advance(LAST_WORD_DELAY_S)
    expect_fine(m.pair)
    assert acknowledged(m) == [together, (SEGMENTS_TOGETHER + 1,)]
    m.commit()
    expect_fine(m.pair)
    assert m.over()


def test_what_landed_is_said_before_the_end() -> None:
    m = moved(layers=True)
    m.mark(b"x")
    m.pair.run()
    assert not acknowledged(m)
    m.consumer.core.refuse(m.incoming, RequestCancelled("enough"), WireCode.CANCELLED)
    m.consumer.collect()
    expect_fine(m.pair)
    assert acknowledged(m) == [(1,)]
    assert m.producer.error(m.outgoing)


def test_the_producer_learns_when_the_link_has_all() -> None:
    m = moved(layers=True)
    calls: list[int] = []
    transfer = m.producer.core.transfers.transfer(m.outgoing)
    transfer.on_sent = lambda: calls.append(transfer.sending)
    m.mark(b"x")
    m.mark(b"y")
    m.pair.run()
    assert calls
    assert not any(calls)
    assert not acknowledged(m)


# --- marks in the header of DATA


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


@pytest.mark.rule("KVW-TR-13", "keeps")
def test_a_chunk_says_its_segment() -> None:
    """Behind a longer segment, and before one; the last one commits."""
    m = moved(brief=True, layers=True)
    m.producer.stalled = True
    for nbytes, commit in ((9, 0), (CHUNK + 1, 0), (8, 0), (7, 2)):
        m.mark(b"x" * nbytes, commit=commit)
    m.producer.stalled = False
    m.producer.collect()
    data = ["DATA"] * 3
    assert m.names == ["SEGMENT", "SEGMENT", *data, "MARKED_DATA", "MARKED_DATA"]
    expect_fine(m.pair)
    assert [len(m.content(number)) for number in (1, 2, 3, 4)] == [9, CHUNK + 1, 8, 7]


def test_commit_says_what_is_unsaid() -> None:
    m = moved(layers=True)
    m.producer.stalled = True
    m.mark(b"x")
    m.commit()
    m.producer.stalled = False
    m.producer.collect()
    assert m.names == ["SEGMENT", "COMMIT", "DATA"]
    expect_fine(m.pair)


@pytest.mark.rule("KVW-TR-13", "breaks")
@pytest.mark.parametrize(("layers", "commit"), [(False, 0), (True, 3)])
def test_a_mark_that_was_not_agreed_on(*, layers: bool, commit: int) -> None:
    """Or with a commit that there is not."""
    assert broken(moved(layers=layers), commit << 62 | 1 << 32 | 1) == "KVW-TR-13"


@pytest.mark.parametrize(("number", "rule"), [(2, "KVW-TR-03"), (0, "KVW-TR-03")])
def test_a_mark_out_of_turn(number: int, rule: str) -> None:
    assert broken(moved(layers=True), packed_mark(BOX, 0) or 0, number) == rule


def test_a_mark_of_a_transfer_that_is_over_is_dropped() -> None:
    m = moved(layers=True)
    m.consumer.core.refuse(m.incoming, RequestCancelled("enough"), WireCode.CANCELLED)
    m.mark(b"x")
    expect_fine(m.pair)


def test_a_damaged_segment_with_its_mark() -> None:
    m = moved(layers=True)
    m.mark(b"x")
    header, _ = m.producer.wire.pop()
    m.producer.wire.append((header, b"y"))
    m.commit()
    m.pair.run()
    assert m.producer.transfers[m.outgoing].damaged == [1]


def broken(m: Moved, offset: int, number: int = 1) -> str:
    """The rule that a forged MARKED_DATA breaks."""
    wire_id = m.asker.wire_id or 0
    m.producer.forge_payload(
        FrameType.MARKED_DATA, b"x", request=wire_id, segment=number, offset=offset
    )
    m.pair.run()
    assert m.consumer.broken is not None
    return m.consumer.broken.rule
