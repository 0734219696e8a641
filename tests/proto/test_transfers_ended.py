"""KV transfers in any order of events, and ended at every point of their way."""

from __future__ import annotations

import itertools
import random

import pytest

from kvwire.errors import (
    ClosedOK,
    DeadlineExceeded,
    RequestCancelled,
    WireCode,
)
from kvwire.proto.events import (
    SegmentsAcknowledged,
    TransferOpened,
)
from kvwire.proto.state import RequestStage
from kvwire.wire.control import Commit, SegmentBody
from kvwire.wire.header import FrameType
from tests.proto.expect import expect_broken, expect_error, expect_fine, on_the_wire
from tests.proto.moving import BOX, CHUNK, Moved, ask, both_ways, events_of, moved
from tests.support.core_pair.pair import ConnectionPair


@pytest.mark.parametrize("seed", range(20))
@both_ways
def test_marks_and_frames_in_any_order(pull: bool, seed: int) -> None:
    """What is committed is what landed, whenever each frame came."""
    chance, m = random.Random(seed), moved(pull=pull)
    m.producer.slow = chance.random() < 0.5
    parts: list[bytes] = []
    for _ in range(chance.randrange(1, 30)):
        match chance.randrange(4):
            case 0:
                parts.append(chance.randbytes(chance.choice([1, 900, CHUNK, 150_000])))
                m.mark(parts[-1])
            case 1 if m.producer._leaving:
                m.producer.complete()
            case _:
                m.pair.deliver(chance.choice([m.producer, m.consumer]))
    m.commit()
    m.pair.run()
    m.producer.slow = False
    while m.producer._leaving:
        m.producer.complete()
    expect_fine(m.pair)
    assert [m.content(n + 1) for n in range(len(parts))] == parts
    assert m.producer.error(m.outgoing) is None
    assert m.consumer.error(m.incoming) is None
    assert not m.producer.memory
    assert not m.consumer.memory


@pytest.mark.parametrize("frames", range(0, 14, 2))
@pytest.mark.parametrize("who", ["producer", "consumer"])
@both_ways
def test_ended_after_any_number_of_frames(pull: bool, who: str, frames: int) -> None:
    """Both sides end once, and have their memory back; the connection lives."""
    m = moved(pull=pull)
    for data in (b"x" * CHUNK, b"y" * (2 * CHUNK)):
        m.mark(data)
    m.commit()
    for _ in range(frames):
        m.pair.deliver(m.producer)
        m.pair.deliver(m.consumer)
    ender, request = (
        (m.producer, m.outgoing) if who == "producer" else (m.consumer, m.incoming)
    )
    was_over = request in ender.done
    ender.core.refuse(request, RequestCancelled("enough"), WireCode.CANCELLED)
    ender.collect()
    expect_fine(m.pair)
    if not was_over:
        expect_error(ender, request, RequestCancelled)
    for peer, its in ((m.producer, m.outgoing), (m.consumer, m.incoming)):
        assert its in peer.done
        assert len(peer.core.holds) == 0
    following = ask(m.pair.client)
    m.pair.run()
    assert following not in m.pair.client.done


def test_a_deadline_of_the_side_that_was_asked() -> None:
    """It may give the transfer one of its own."""
    m = moved()
    m.consumer.core.set_deadline(m.incoming, m.pair.now + 1.0)
    m.pair.advance(2.0)
    expect_error(m.consumer, m.incoming, DeadlineExceeded)
    expect_error(m.producer, m.outgoing, DeadlineExceeded)


def test_closing_ends_what_nobody_has_answered() -> None:
    """And waits for what moves."""
    pair = ConnectionPair()
    m = Moved(pair).agree()
    waiting = ask(pair.client)
    pair.run()
    assert len(pair.server.core.transfers.unanswered) == 1
    m.mark(b"x")
    pair.server.close()
    pair.run()
    expect_error(pair.client, waiting, ClosedOK)
    assert m.outgoing not in pair.client.done
    m.commit()
    expect_fine(pair)
    assert pair.client.error(m.outgoing) is None
    for peer in (pair.client, pair.server):
        assert peer.ended is not None
        assert peer.ended.graceful


def test_the_link_ends_in_the_middle() -> None:
    """Both sides have their memory back."""
    m = moved()
    m.producer.slow = True
    for _ in range(3):
        m.mark(b"x" * CHUNK)
    for _ in range(3):
        m.pair.deliver(m.producer)
    header, _ = m.producer.wire.popleft()
    m.consumer.header(header)
    m.producer.lose()
    m.consumer.lose()
    for peer, request in ((m.producer, m.outgoing), (m.consumer, m.incoming)):
        assert request in peer.done
        assert len(peer.core.holds) == 0


def test_a_transfer_of_a_higher_priority_goes_first() -> None:
    """As the side that opened it says."""
    pair = ConnectionPair()
    pair.client.stalled = True
    requests = [ask(pair.client, priority=priority) for priority in (0, 7)]
    pair.run()
    for event in events_of(pair.server, TransferOpened):
        pair.server.core.transfers.agree(event.request, b"")
    pair.server.collect()
    pair.run()
    for request in requests:
        buffer = pair.client.lend(10)
        pair.client.core.transfers.mark(request, BOX, buffer, 10)
    pair.client.stalled = False
    pair.client.collect()
    data = [f for f in on_the_wire(pair.client) if f.header.type == FrameType.DATA]
    assert [f.header.request for f in data] == [
        requests[1].wire_id,
        requests[0].wire_id,
    ]
    assert requests[0].state is RequestStage.MOVING


def test_what_lands_last_is_acknowledged_before_the_last_word() -> None:
    """Where the commit has overtaken the payload; then nothing of it is kept."""
    m = moved()
    m.producer.stalled = True
    for data in (b"x", b"y"):
        m.mark(data)
    m.commit()
    m.pair.run()
    m.producer.stalled = False
    m.producer.collect()
    expect_fine(m.pair)
    said = [e.numbers for e in events_of(m.producer, SegmentsAcknowledged)]
    assert sorted(itertools.chain(*said)) == [1, 2]
    for peer, request in ((m.producer, m.outgoing), (m.consumer, m.incoming)):
        assert peer.error(request) is None
        with pytest.raises(KeyError):
            peer.core.transfers.transfer(request)


def test_settled_before_the_link_is_through() -> None:
    """The consumer has everything; the producer's memory is free when its link is."""
    m = moved()
    m.producer.slow = True
    m.mark(b"x" * 100)
    m.commit()
    expect_fine(m.pair)
    assert m.outgoing not in m.producer.done
    assert m.sources[0] in m.producer.memory
    m.producer.complete()
    expect_fine(m.pair)
    assert m.producer.error(m.outgoing) is None
    assert m.sources[0] in m.producer.freed


@pytest.mark.rule("KVW-TR-04", "breaks")
def test_a_commit_out_of_turn() -> None:
    """Before the answer, and a second time."""
    early = Moved(ConnectionPair())
    early.producer.forge(
        FrameType.COMMIT, Commit(0, True), request=early.asker.wire_id or 0
    )
    expect_broken(early.pair, early.consumer, "KVW-TR-04")
    twice = moved()
    twice.producer.stalled = True
    twice.mark(b"x")
    for _ in range(2):
        twice.producer.forge(
            FrameType.COMMIT, Commit(1, True), request=twice.asker.wire_id or 0
        )
    expect_broken(twice.pair, twice.consumer, "KVW-TR-04")


@pytest.mark.rule("KVW-TR-03", "breaks")
def test_a_mark_before_the_answer() -> None:
    """The consumer has not said that it wants anything."""
    early = Moved(ConnectionPair())
    early.producer.forge(
        FrameType.SEGMENT, SegmentBody(1, BOX, 5), request=early.asker.wire_id or 0
    )
    expect_broken(early.pair, early.consumer, "KVW-TR-03")


@pytest.mark.rule("KVW-TR-03", "breaks")
def test_a_mark_after_the_commit() -> None:
    """While a segment is still on its way."""
    m = moved()
    m.producer.stalled = True
    m.mark(b"x" * 100)
    m.commit()
    m.producer.forge(
        FrameType.SEGMENT, SegmentBody(2, BOX, 5), request=m.asker.wire_id or 0
    )
    expect_broken(m.pair, m.consumer, "KVW-TR-03")
