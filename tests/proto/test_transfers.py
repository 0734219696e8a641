"""KV transfers: what each side may say, when, and what comes of it."""

from __future__ import annotations

import itertools

import pytest

from kvwire import errors
from kvwire.limits import LAST_FINS_MAX, SETTLED_MAX, TRANSFERS_WAITING_MAX
from kvwire.proto import events
from kvwire.proto import transfers as module
from kvwire.proto.connection import LAST_FIN_DELAY_S
from kvwire.proto.records import SegmentRecord, packed_mark
from kvwire.types import TrustMode
from kvwire.wire import control
from kvwire.wire.header import FrameType
from tests.proto.moving import (
    CHUNK,
    Moved,
    both_ways,
    expect_broken,
    expect_error,
    expect_fine,
    moved,
)
from tests.support.core_pair.peer import BOX, ConnectionPair


@both_ways
@pytest.mark.parametrize("kept", [False, True])
def test_a_segment_that_leaves_as_soon_as_it_is_marked(kept: bool, pull: bool) -> None:
    """Without a hold if the link has taken it, and else until it has been sent."""
    m = moved(pull=pull)
    core = m.producer.core
    record = core.transfers.records[m.outgoing]
    for number, commit in ((1, 0), (2, 1)):
        data = bytes([number]) * 1000
        segment = core.transfers.mark(m.outgoing, BOX, len(data), commit)
        assert segment.number == number
        busy = [core.chunks.busy]
        chunk, header = core.transfers.leave(segment, None)
        m.producer.wire.append((header, data))
        if kept:
            core.transfers.keep(chunk, m.producer.lend(data))
            busy += [core.chunks.busy]
            assert record.sending_bytes == len(data)
            core.chunk_sent(chunk)
            busy += [core.chunks.busy]
        elif commit:
            core.transfers.settle(m.outgoing)
        assert busy == ([False, True, False] if kept else [False])
        assert record.sending_bytes == 0
        m.pair.run()
        assert m.content(number) == data
    expect_fine(m.pair)
    m.pair.advance(LAST_FIN_DELAY_S)
    assert m.over()
    assert m.producer.error(m.outgoing) is None


@pytest.mark.rule("KVW-TR-01", "KVW-TR-02", "KVW-TR-03", "KVW-TR-04", "keeps")
@pytest.mark.rule("KVW-TR-05", "KVW-TR-06", "KVW-TR-07", "KVW-TR-08", "keeps")
@both_ways
def test_a_transfer(pull: bool) -> None:
    """Marked, moved, landed, committed, settled; in the end all memory is free."""
    m = moved(pull=pull)
    (agreed,) = m.pair.client.heard(events.TransferAgreed)
    assert (agreed.request, agreed.description) == (m.asker, b"what I want")
    parts, calls = [b"a", b"b" * CHUNK, b"c" * (2 * CHUNK + 7)], list[int]()
    transfer = m.producer.core.transfers.records[m.outgoing]
    transfer.on_sent = lambda: calls.append(transfer.sending_bytes)
    for data in parts:
        m.mark(data)
    m.pair.run()
    assert [m.content(n) for n in (1, 2, 3)] == parts
    assert set(calls) == {0}, "the producer learns when the link has all"
    landed = [e.segment.number for e in m.consumer.heard(events.SegmentLanded)]
    assert sorted(landed) == [1, 2, 3]
    m.pair.advance(LAST_FIN_DELAY_S)
    said = [e.numbers for e in m.producer.heard(events.SegmentsAcknowledged)]
    assert sorted(itertools.chain(*said)) == [1, 2, 3]
    assert m.outgoing not in m.producer.done
    m.commit()
    expect_fine(m.pair)
    m.pair.advance(LAST_FIN_DELAY_S)
    assert m.consumer.transfers[m.incoming].committed
    for peer, request in ((m.producer, m.outgoing), (m.consumer, m.incoming)):
        assert peer.error(request) is None
        assert peer.transfers[request].damaged == []
        assert len(peer.core.holds) == 0
    assert m.consumer.done[m.incoming].nbytes == sum(map(len, parts))


# --- damage


def test_more_damage_than_can_be_named() -> None:
    """The whole transfer fails."""
    m = moved()
    m.producer.stalled = True
    for data in (*[b"x"] * (SETTLED_MAX + 1), b"good"):
        m.mark(data)
    m.commit()
    m.producer.stalled = False
    m.producer.collect()
    frames = list(m.producer.wire)
    m.producer.wire.clear()
    for header, body in frames:
        m.consumer.receive((header, b"y" if body == b"x" else body))
    expect_fine(m.pair)
    expect_error(m.consumer, m.incoming, errors.IntegrityError)
    expect_error(m.producer, m.outgoing, errors.IntegrityError)


# --- ended by either side, at every point


def test_late_frames_of_a_transfer_are_dropped() -> None:
    """Every kind that names one that is over."""
    m = moved()
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    m.pair.advance(LAST_FIN_DELAY_S)
    m.producer.forge(FrameType.SEGMENT, control.SegmentBody(2, BOX, 5), request=1)
    m.producer.forge(FrameType.COMMIT, control.Commit(1, True), request=1)
    m.producer.forge(FrameType.FIN, control.Fin(0), request=1)
    for frame_type in (FrameType.DATA, FrameType.MARKED_DATA):
        m.producer.forge_payload(frame_type, b"x", request=1, segment=1)
    m.producer.forge(FrameType.OPEN, control.Open(b"b", False, 0, b"", (1,)), request=3)
    m.consumer.forge(FrameType.AGREE, control.Agree(b""), request=1)
    m.consumer.forge(FrameType.SEGMENT_ACK, control.SegmentAck((1,)), request=1)
    m.consumer.forge(FrameType.COMMIT_ACK, control.CommitAck(()), request=1)
    expect_fine(m.pair)


# --- rules


@pytest.mark.rule("KVW-TR-01", "breaks")
def test_how_many_may_wait_for_an_answer() -> None:
    """The last that may, the first that may not."""
    pair = ConnectionPair()
    requests = [pair.client.open() for _ in range(TRANSFERS_WAITING_MAX)]
    expect_fine(pair)
    pair.client.cancel(requests[0])
    expect_fine(pair)
    pair.client.open()
    expect_fine(pair)
    with pytest.raises(errors.UsageError, match="wait for this peer"):
        pair.client.open()
    later = 2 * TRANSFERS_WAITING_MAX + 3
    pair.client.forge(FrameType.OPEN, control.Open(b"4", False, 0, b""), request=later)
    expect_broken(pair, pair.server, "KVW-TR-01")


P, C = "producer", "consumer"
# Who says what that breaks which rule, when the first of two segments has landed.
WRONG: list[tuple[str, str, FrameType, control.Body]] = [
    *(
        ("KVW-TR-03", P, FrameType.SEGMENT, control.SegmentBody(number, BOX, 5))
        for number in (1, 2, 4, 65_536)
    ),
    *(
        ("KVW-TR-04", P, FrameType.COMMIT, control.Commit(number, True))
        for number in (0, 1, 3, 65_536)
    ),
    *(
        ("KVW-TR-05", C, FrameType.SEGMENT_ACK, control.SegmentAck(numbers))
        for numbers in ((1,), (2,), (3,), (65_536,))
    ),
    *(
        ("KVW-TR-06", C, FrameType.COMMIT_ACK, control.CommitAck(damaged))
        for damaged in ((1,), (2, 2), (2, 3), (3,))
    ),
    ("KVW-TR-08", P, FrameType.SEGMENT_ACK, control.SegmentAck((1,))),
    ("KVW-TR-08", P, FrameType.COMMIT_ACK, control.CommitAck(())),
    ("KVW-TR-08", C, FrameType.AGREE, control.Agree(b"", (1,))),
    ("KVW-TR-08", C, FrameType.SEGMENT, control.SegmentBody(1, BOX, 5)),
]
PAYLOADS = [
    *(("KVW-TR-07", segment, 0, 1) for segment in (3, 2**32 - 1)),
    *(("KVW-DT-02", 2, 0, 50), ("KVW-DT-02", 2, 1, 99), ("KVW-DT-02", 2, CHUNK, 1)),
    *(("KVW-DT-02", 2, 2**63, 100), ("KVW-DT-03", 1, 0, 1)),
]


def one_landed(*, sent: bool) -> Moved:
    """The second segment is marked, and sent or not."""
    m = moved(in_order=False)
    m.mark(b"x")
    m.pair.run()
    m.pair.advance(LAST_FIN_DELAY_S)
    m.producer.stalled = not sent
    m.mark(b"y" * 100)
    return m


@pytest.mark.rule("KVW-TR-03", "KVW-TR-04", "KVW-TR-05", "KVW-TR-06", "breaks")
@pytest.mark.rule("KVW-TR-07", "KVW-TR-08", "KVW-DT-02", "KVW-DT-03", "breaks")
def test_what_breaks_a_rule() -> None:
    """Out of turn, of what was not sent, and for the other side to say."""
    for rule, who, frame_type, body in WRONG:
        m = one_landed(sent=rule == "KVW-TR-06")
        if rule == "KVW-TR-06":
            m.commit()
        says, hears = (m.producer, m.consumer)[:: 1 if who == P else -1]
        says.forge(frame_type, body, request=1)
        expect_broken(m.pair, hears, rule)
    for rule, segment, offset, nbytes in PAYLOADS:
        m = one_landed(sent=False)
        m.producer.forge_payload(
            *(FrameType.DATA, bytes(nbytes)), request=1, segment=segment, offset=offset
        )
        expect_broken(m.pair, m.consumer, rule)
    m = moved()
    m.consumer.forge(FrameType.OPEN, control.Open(b"b", False, 0, b"", (1,)), request=2)
    expect_broken(m.pair, m.producer, "KVW-TR-08")


@pytest.mark.rule("KVW-TR-03", "KVW-TR-04", "breaks")
@pytest.mark.parametrize(
    ("rule", "frame_type", "body"),
    [
        ("KVW-TR-03", FrameType.SEGMENT, control.SegmentBody(3, BOX, 5)),
        ("KVW-TR-04", FrameType.COMMIT, control.Commit(2, True)),
    ],
)
def test_after_its_commit_a_transfer_grows_no_more(
    rule: str, frame_type: FrameType, body: control.Body
) -> None:
    """While a segment is under way, so the transfer still moves."""
    m = one_landed(sent=False)
    m.commit()
    m.producer.forge(frame_type, body, request=1)
    expect_broken(m.pair, m.consumer, rule)


@pytest.mark.rule("KVW-TR-06", "breaks")
def test_settled_before_the_commit() -> None:
    """Though all that was marked has landed."""
    m = moved()
    m.mark(b"x")
    m.pair.run()
    m.consumer.forge(FrameType.COMMIT_ACK, control.CommitAck(()), request=1)
    expect_broken(m.pair, m.producer, "KVW-TR-06")


@both_ways
def test_a_transfer_that_is_over_is_forgotten(pull: bool) -> None:
    """Or each would stay for as long as the connection; also one without an answer."""
    m = moved(pull=pull)
    unanswered = m.pair.client.open(pull=pull)
    expect_fine(m.pair)
    m.mark(b"x")
    m.commit()
    m.pair.client.cancel(unanswered)
    expect_fine(m.pair)
    m.pair.advance(LAST_FIN_DELAY_S)
    for peer in (m.pair.client, m.pair.server):
        table = peer.core.transfers
        for request in peer.done:
            table.forget(request)
        assert table.records == table._asked == table._unanswered == {}
        assert table.unacknowledged == table.unhurried == {}


@pytest.mark.rule("KVW-TR-02", "breaks")
def test_agreeing_with_oneself() -> None:
    """The asker does not answer."""
    pair = ConnectionPair()
    pair.client.open()
    pair.client.forge(FrameType.AGREE, control.Agree(b""), request=1)
    expect_broken(pair, pair.server, "KVW-TR-02")


@pytest.mark.rule("KVW-TR-13", "breaks")
def test_marks_that_data_may_not_have() -> None:
    """Where marks are sealed, with a commit that there is not, out of turn, long."""
    loopback = TrustMode.LOOPBACK
    for trust, offset, number, rule, nbytes in (
        (TrustMode.PSK, packed_mark(BOX, 0), 1, "KVW-TR-13", 1),
        (loopback, 3 << 62 | 1 << 32 | 1, 1, "KVW-TR-13", 1),
        (loopback, packed_mark(BOX, 0), 2, "KVW-TR-03", 1),
        (loopback, packed_mark(BOX, 0), 0, "KVW-TR-03", 1),
        (loopback, packed_mark(BOX, 0), 1, "KVW-DT-02", CHUNK + 1),
    ):
        m = moved(trust=trust)
        m.producer.forge_payload(
            *(FrameType.MARKED_DATA, bytes(nbytes)),
            request=1,
            segment=number,
            offset=offset or 0,
        )
        expect_broken(m.pair, m.consumer, rule)


@pytest.mark.rule("KVW-DT-04", "breaks")
@pytest.mark.parametrize("committed_first", [True, False])
def test_a_damaged_segment(committed_first: bool) -> None:
    """It is named at the end; the others count, and so do their bytes."""
    m = moved()
    for data in (b"good", b"bad!", b"fine"):
        m.mark(data)
    if committed_first:
        m.commit()
    frames = list(m.producer.wire)
    m.producer.wire.clear()
    for header, body in frames:
        m.consumer.receive((header, b"BAD!" if body == b"bad!" else body))
    if not committed_first:
        m.commit()
    expect_fine(m.pair)
    m.pair.advance(LAST_FIN_DELAY_S)
    for peer, request in ((m.producer, m.outgoing), (m.consumer, m.incoming)):
        assert peer.error(request) is None
        transfer = peer.transfers[request]
        assert transfer.damaged == [2]
        assert [s.damaged for s in transfer.segments.values()] == [False, True, False]
    assert m.consumer.done[m.incoming].nbytes == 8


@pytest.mark.parametrize("damaged", [False, True])
def test_a_small_segment_that_is_taken_whole(damaged: bool) -> None:
    """Nobody lends memory for it, and damage is passed on as such."""
    m = moved()
    taken: list[tuple[int, bytes | memoryview | None]] = []
    records = m.consumer.core.transfers.records
    records[m.incoming].take = lambda part, body: taken.append((part.number, body))
    for data, commit in ((b"good", 0), (b"last", 2)):
        m.mark(data, commit=commit)
    frames = list(m.producer.wire)
    m.producer.wire.clear()
    for header, body in frames:
        came = b"LAST" if damaged and body == b"last" else body
        m.consumer.receive((header, came))
    assert taken == [(1, b"good"), (2, None if damaged else b"last")]
    assert not m.consumer.heard(events.SegmentMarked)
    expect_fine(m.pair)
    m.pair.advance(LAST_FIN_DELAY_S)
    for peer, request in ((m.producer, m.outgoing), (m.consumer, m.incoming)):
        assert peer.error(request) is None
        assert peer.transfers[request].damaged == [2] * damaged
    assert m.consumer.done[m.incoming].nbytes == (4 if damaged else 8)


@pytest.mark.parametrize("lost", [False, True])
def test_a_small_segment_whose_transfer_ends_while_it_arrives(lost: bool) -> None:
    """Nothing is taken: its memory may have a new owner."""
    m = moved()
    taken: list[object] = []
    records = m.consumer.core.transfers.records
    records[m.incoming].take = lambda *told: taken.append(told)
    m.mark(b"late")
    header, body = m.producer.wire.popleft()
    arrival = m.consumer.header(header)
    assert arrival is not None
    if lost:
        m.consumer.lose()
    else:
        m.consumer.core.refuse(
            m.incoming, errors.RequestCancelled("x"), errors.WireCode.CANCELLED
        )
        m.consumer.collect()
    m.consumer.body(arrival, body)
    assert taken == []


def test_a_small_segment_that_is_not_of_the_plan() -> None:
    """The front refuses it, and the connection ends."""
    m = moved()

    def refuse(*_: object) -> None:
        raise errors.ProtocolError("KVW-TR-09", "outside")

    m.consumer.core.transfers.records[m.incoming].take = refuse
    m.mark(b"what")
    expect_broken(m.pair, m.consumer, "KVW-TR-09")


@pytest.mark.rule("KVW-TR-06", "keeps")
@both_ways
def test_three_frames_after_the_answer(pull: bool) -> None:
    """The only segment says that it is the last one; one answer says all of it."""
    m = moved(pull=pull, in_order=False)
    m.mark(b"x" * 100, commit=2)
    assert m.names == ["SEGMENT", "DATA"]
    m.pair.deliver(m.producer)
    m.pair.deliver(m.producer)
    assert m.names == ["COMMIT_ACK"]
    expect_fine(m.pair)
    assert m.content(1) == b"x" * 100
    assert not m.producer.heard(events.SegmentsAcknowledged)  # the end says it
    assert m.producer.error(m.outgoing) is None
    m.pair.advance(LAST_FIN_DELAY_S)
    for peer in (m.producer, m.consumer):
        assert len(peer.core.holds) == 0


def test_all_has_landed_before_the_link_is_through_with_it() -> None:
    """The transfer is not over yet, so an event says what the consumer has."""
    m = moved()
    m.producer.slow = True
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    (said,) = m.producer.heard(events.SegmentsAcknowledged)
    assert said.numbers == (1,)
    assert m.outgoing not in m.producer.done
    m.producer.complete()
    assert m.producer.error(m.outgoing) is None


# --- in fewer frames


@pytest.mark.rule("KVW-TR-08", "keeps")
@both_ways
def test_the_last_word_rides_on_the_next_transfer(pull: bool) -> None:
    """On its OPEN if the producer asks, and on AGREE if it answers."""
    m = moved(pull=pull)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    assert not m.over()
    asked = m.pair.client.open(pull=pull)
    expect_fine(m.pair)
    if pull:
        assert not m.over()
        m.pair.server.agree()
        expect_fine(m.pair)
    assert m.over()
    assert m.consumer.error(m.incoming) is None
    assert asked not in m.pair.client.done
    m.pair.advance(2 * LAST_FIN_DELAY_S)
    assert m.producer.broken is m.consumer.broken is None


def test_as_many_last_fins_as_can_ride(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are all said at once."""
    assert LAST_FINS_MAX > 2
    monkeypatch.setattr(module, "LAST_FINS_MAX", 2)
    m = moved()
    other = m.pair.client.open()
    expect_fine(m.pair)
    answerer = m.pair.server.agree()
    expect_fine(m.pair)
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    assert not m.over()
    m.producer.commit(other)
    expect_fine(m.pair)
    assert m.over()
    assert answerer in m.consumer.done


def test_memory_of_a_transfer_that_is_over() -> None:
    """What comes late drains at once, and what the link writes when it has written."""
    m = moved(in_order=False)
    marked: list[SegmentRecord] = []
    m.mark(b"x" * 100)
    m.pair.deliver(m.producer)
    m.consumer.place = marked.append
    m.mark(b"x" * 100)
    header, body = m.producer.wire.popleft()
    arrival = m.consumer.header(header)
    assert arrival is not None
    m.pair.deliver(m.producer)
    m.consumer.core.refuse(
        m.incoming, errors.RequestCancelled("x"), errors.WireCode.CANCELLED
    )
    late = m.consumer.lend(100)
    m.consumer.core.transfers.place(marked[0], late)
    m.consumer.collect()
    assert late in m.consumer.freed
    assert m.targets[1] in m.consumer.memory
    m.consumer.body(arrival, body)
    assert m.targets[1] in m.consumer.freed
    assert m.consumer.heard(events.SegmentLanded) == []
    expect_fine(m.pair)


def test_who_was_answered_waits_no_more() -> None:
    """Neither side counts transfers that move, or that are over."""
    pair = ConnectionPair()
    for _ in range(TRANSFERS_WAITING_MAX - 1):
        pair.client.open()
    for _ in range(3):
        pair.client.open()
        expect_fine(pair)
        pair.server.agree()
        expect_fine(pair)
    for _ in range(3):
        request = pair.client.open()
        expect_fine(pair)
        pair.client.core.cancel(request)
        expect_fine(pair)


@both_ways
def test_refused_before_it_was_answered(pull: bool) -> None:
    """The asker learns why."""
    m = Moved(ConnectionPair(), pull)
    m.pair.server.core.refuse(
        m.answerer, errors.RequestCancelled("not here"), errors.WireCode.CANCELLED
    )
    expect_fine(m.pair)
    expect_error(m.pair.client, m.asker, errors.PeerCancelled)
    assert "not here" in str(m.pair.client.error(m.asker))
    m.pair.server.core.transfers.agree(m.answerer, b"")
    m.pair.server.collect()
    assert not m.pair.server.wire
    assert m.pair.server.core.transfers.unanswered == []


# --- marks in the header of DATA


@pytest.mark.rule("KVW-TR-13", "keeps")
def test_a_chunk_says_its_segment() -> None:
    """Behind a longer segment, and before one; the last one commits."""
    m = moved()
    m.producer.stalled = True
    for nbytes, commit in ((9, 0), (CHUNK + 1, 0), (8, 0), (7, 2)):
        m.mark(b"x" * nbytes, commit=commit)
    m.producer.stalled = False
    m.producer.collect()
    data = ["DATA"] * 3
    assert m.names == ["SEGMENT", "SEGMENT", *data, "MARKED_DATA", "MARKED_DATA"]
    expect_fine(m.pair)
    assert [len(m.content(number)) for number in (1, 2, 3, 4)] == [9, CHUNK + 1, 8, 7]


def test_an_end_between_a_mark_and_its_bytes() -> None:
    """Whoever is asked for memory may end the connection; then the bytes go nowhere."""
    m = moved()
    m.consumer.place = lambda segment: m.consumer.lose()
    m.mark(b"x")
    m.pair.run()
    assert m.consumer.ended is not None
    assert not m.consumer.heard(events.SegmentLanded)


def test_the_last_word_of_a_connection_that_is_aborted() -> None:
    """It is still sent."""
    m = moved()
    m.mark(b"x", commit=2)
    expect_fine(m.pair)
    m.producer.core.fail(errors.ConnectionLost("enough"))
    m.producer.collect()
    assert m.names == ["FIN"]
    m.pair.deliver(m.producer)
    assert m.consumer.error(m.incoming) is None


def test_closing_ends_what_nobody_has_answered() -> None:
    """And waits for what moves."""
    pair = ConnectionPair()
    m = Moved(pair).agree()
    waiting = pair.client.open()
    pair.run()
    assert len(pair.server.core.transfers.unanswered) == 1
    m.mark(b"x")
    pair.server.close()
    pair.run()
    expect_error(pair.client, waiting, errors.ClosedOK)
    assert m.outgoing not in pair.client.done
    m.commit()
    expect_fine(pair)
    pair.advance(LAST_FIN_DELAY_S)
    assert pair.client.error(m.outgoing) is None
    for peer in (pair.client, pair.server):
        assert peer.ended is not None
        assert peer.ended.graceful
