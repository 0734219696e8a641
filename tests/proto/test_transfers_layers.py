"""Layers by themselves between two sides that say them in fewer frames."""

from __future__ import annotations

from kvwire.errors import RequestCancelled, WireCode
from kvwire.limits import LAST_WORD_DELAY_S, SEGMENTS_TOGETHER
from kvwire.proto.events import SegmentsAcknowledged
from tests.proto.expect import expect_fine
from tests.proto.moving import Moved, events_of, moved


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
