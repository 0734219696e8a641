"""KV transfers between two sides that say the same in fewer frames."""

from __future__ import annotations

import itertools

import pytest

from kvwire.errors import ConnectionLost
from kvwire.limits import LAST_WORD_DELAY_S, LAST_WORDS_MAX
from kvwire.proto import transfers as module
from kvwire.proto.events import SegmentsAcknowledged, TransferCommitted, TransferOpened
from kvwire.proto.requests import RequestRecord
from kvwire.wire.control import Agree, CommitAck, Open, SegmentAck
from kvwire.wire.header import FrameType
from tests.proto.expect import expect_broken, expect_fine, on_the_wire
from tests.proto.moving import Moved, ask, both_ways, brief_pair, events_of, moved


def names(m: Moved) -> list[str]:
    """What is on its way from the producer and then from the consumer."""
    frames = [*on_the_wire(m.producer), *on_the_wire(m.consumer)]
    return [FrameType(frame.header.type).name for frame in frames]


def over(m: Moved) -> bool:
    """Whether the consumer knows that the producer knows."""
    return m.incoming in m.consumer.done


@pytest.mark.rule("KVW-TR-06", "keeps")
@both_ways
def test_three_frames_after_the_answer(pull: bool) -> None:
    """The only segment says that it is the last one; one answer says all of it."""
    m = moved(pull=pull, brief=True)
    m.mark(b"x" * 100, commit=2)
    assert names(m) == ["SEGMENT", "DATA"]
    m.pair.deliver(m.producer)
    m.pair.deliver(m.producer)
    assert names(m) == ["COMMIT_ACK"]
    expect_fine(m.pair)
    assert m.content(1) == b"x" * 100
    (committed,) = events_of(m.consumer, TransferCommitted)
    assert committed.complete
    (said,) = events_of(m.producer, SegmentsAcknowledged)
    assert said.numbers == (1,)
    assert m.producer.error(m.outgoing) is None
    m.pair.advance(LAST_WORD_DELAY_S)
    for peer in (m.producer, m.consumer):
        assert len(peer.core.holds) == 0


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


@pytest.mark.rule("KVW-TR-08", "keeps")
@both_ways
def test_the_last_word_rides_on_the_next_transfer(pull: bool) -> None:
    """On its OPEN if the producer asks, and on AGREE if it answers."""
    m = moved(pull=pull, brief=True)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    assert not over(m)
    asked = ask(m.pair.client, pull=pull)
    expect_fine(m.pair)
    if pull:
        assert not over(m)
        answerer = events_of(m.pair.server, TransferOpened)[-1].request
        m.pair.server.core.transfers.agree(answerer, b"")
        m.pair.server.collect()
        expect_fine(m.pair)
    assert over(m)
    assert m.consumer.error(m.incoming) is None
    assert asked not in m.pair.client.done
    m.pair.advance(2 * LAST_WORD_DELAY_S)
    assert m.producer.broken is m.consumer.broken is None


def test_the_last_word_waits_no_longer_than_said() -> None:
    """Then it has a frame of its own."""
    m = moved(brief=True)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    m.pair.advance(LAST_WORD_DELAY_S / 2)
    assert not over(m)
    m.pair.advance(LAST_WORD_DELAY_S)
    assert over(m)
    assert m.consumer.error(m.incoming) is None


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
    assert names(m) == ["FIN"]
    m.pair.deliver(m.producer)
    assert m.consumer.error(m.incoming) is None


def test_as_many_last_words_as_can_ride(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are all said at once."""
    assert LAST_WORDS_MAX > 2
    monkeypatch.setattr(module, "LAST_WORDS_MAX", 2)
    m = moved(brief=True)
    other = ask(m.pair.client)
    expect_fine(m.pair)
    answerer = events_of(m.pair.server, TransferOpened)[-1].request
    m.pair.server.core.transfers.agree(answerer, b"")
    m.pair.server.collect()
    expect_fine(m.pair)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    assert not over(m)
    m.producer.core.transfers.commit(other, complete=True)
    m.producer.collect()
    expect_fine(m.pair)
    assert over(m)
    assert answerer in m.consumer.done


# --- damage, and what breaks the rules


def test_a_damaged_segment_of_a_brief_transfer() -> None:
    """The answer names it, and so says that the others are here."""
    m = moved(brief=True)
    m.producer.stalled = True
    m.mark(b"good")
    m.mark(b"bad!")
    m.mark(b"fine", commit=2)
    m.producer.stalled = False
    m.producer.collect()
    frames = list(m.producer.wire)
    m.producer.wire.clear()
    for header, body in frames:
        m.consumer.receive((header, b"BAD!" if body == b"bad!" else body))
    expect_fine(m.pair)
    said = [e.numbers for e in events_of(m.producer, SegmentsAcknowledged)]
    assert sorted(itertools.chain(*said)) == [1, 3]
    assert m.producer.transfers[m.outgoing].damaged == (2,)
    m.pair.advance(LAST_WORD_DELAY_S)
    assert m.consumer.done[m.incoming].nbytes == 8


@pytest.mark.rule("KVW-TR-06", "breaks")
@pytest.mark.parametrize("damaged", [(1,), (2, 2), (3,)])
def test_settled_with_segments_that_were_acknowledged(damaged: tuple[int, ...]) -> None:
    """Or that never were, or twice."""
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


@pytest.mark.rule("KVW-TR-08", "breaks")
@pytest.mark.parametrize("frame_type", [FrameType.OPEN, FrameType.AGREE])
def test_a_last_word_on_what_the_peer_sends(frame_type: FrameType) -> None:
    """Only the producer has it."""
    m = moved(brief=True)
    wire_id = m.asker.wire_id or 0
    if frame_type is FrameType.OPEN:
        m.consumer.forge(frame_type, Open(b"b", False, 0, b"", (wire_id,)), request=2)
    else:
        m.consumer.forge(frame_type, Agree(b"", (wire_id,)), request=wire_id)
    expect_broken(m.pair, m.producer, "KVW-TR-08")


def test_a_last_word_on_what_is_over() -> None:
    """It is late, and dropped."""
    m = moved(brief=True)
    m.mark(b"x", commit=2)
    m.pair.advance(LAST_WORD_DELAY_S)
    expect_fine(m.pair)
    wire_id = m.asker.wire_id or 0
    body = Open(b"b", False, 0, b"", (wire_id,))
    m.producer.forge(FrameType.OPEN, body, request=wire_id + 2)
    expect_fine(m.pair)


def test_a_side_that_does_not_know_brief_transfers() -> None:
    """It is spoken to as ever."""
    requests: list[RequestRecord] = []
    for m in (moved(), Moved(brief_pair()).agree()):
        assert m.producer.core.transfers.brief == bool(requests)
        m.mark(b"x")
        m.commit()
        expect_fine(m.pair)
        requests.append(m.outgoing)
        assert over(m) != m.producer.core.transfers.brief
