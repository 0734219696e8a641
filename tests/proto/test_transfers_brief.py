"""KV transfers between two sides that say the same in fewer frames."""

from __future__ import annotations

import itertools

import pytest

from kvwire.errors import ConnectionLost
from kvwire.proto.events import SegmentsAcknowledged, TransferCommitted
from kvwire.proto.requests import RequestRecord
from kvwire.wire.control import CommitAck, SegmentAck
from kvwire.wire.header import FrameType
from tests.proto.expect import expect_fine
from tests.proto.moving import Moved, brief_pair, events_of, moved


def test_a_commit_that_is_not_complete() -> None:
    """The other one that SEGMENT can say."""
    m = moved(brief=True)
    m.mark(b"x")
    m.mark(b"y", commit=1)
    expect_fine(m.pair)
    (committed,) = events_of(m.consumer, TransferCommitted)
    assert not committed.complete
    said = [e.numbers for e in events_of(m.producer, SegmentsAcknowledged)]
    assert sorted(itertools.chain(*said)) == [1, 2]


def test_the_last_word_comes_before_the_close() -> None:
    """And the consumer's end is a good one."""
    m = moved(brief=True)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    m.producer.close()
    expect_fine(m.pair)
    assert m.consumer.error(m.incoming) is None


def test_the_last_word_of_a_connection_that_is_aborted() -> None:
    """It is still sent."""
    m = moved(brief=True)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    m.producer.core.fail(ConnectionLost("enough"))
    m.producer.collect()
    assert m.names == ["FIN"]
    m.pair.deliver(m.producer)
    assert m.consumer.error(m.incoming) is None


# --- damage, and what breaks the rules


@pytest.mark.rule("KVW-TR-06", "breaks")
def test_settled_with_segments_that_were_acknowledged() -> None:
    """Or that never were, or twice."""
    for damaged in [(1,), (2, 2), (3,)]:
        m = moved(brief=True)
        m.mark(b"x")
        m.mark(b"y")
        m.producer.wire.clear()
        wire_id = m.asker.wire_id or 0
        m.consumer.forge(FrameType.SEGMENT_ACK, SegmentAck((1,)), request=wire_id)
        expect_fine(m.pair)
        m.commit()
        m.producer.wire.clear()
        m.consumer.forge(FrameType.COMMIT_ACK, CommitAck(damaged), request=wire_id)
        m.pair.run()
        assert m.producer.broken is not None
        assert m.producer.broken.rule == "KVW-TR-06"


def test_a_side_that_does_not_know_brief_transfers() -> None:
    """It is spoken to as ever."""
    requests: list[RequestRecord] = []
    for m in (moved(), Moved(brief_pair()).agree()):
        assert m.producer.core.transfers.brief == bool(requests)
        m.mark(b"x")
        m.commit()
        expect_fine(m.pair)
        requests.append(m.outgoing)
        assert m.over() != m.producer.core.transfers.brief
