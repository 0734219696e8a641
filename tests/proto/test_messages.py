"""Messages: in order for each tag, whole or not at all, lost by nobody's mistake."""

from __future__ import annotations

import pytest

from kvwire import errors
from kvwire.limits import REQUESTS_MAX
from kvwire.proto.events import MessageArrived
from kvwire.proto.messages import DISCARDED_TAGS_MAX
from kvwire.proto.records import RequestRecord
from kvwire.wire.control import Announce, Ready
from kvwire.wire.header import FrameType
from tests.proto.moving import expect_broken, expect_error, expect_fine
from tests.support.core_pair.peer import ConnectionPair

TAG = 7
SMALL, LARGE = b"small", b"large" * 30_000  # 64 bytes travel at once


def tag8(tag: int) -> bytes:
    return tag.to_bytes(8, "little")


def use_up_credit(pair: ConnectionPair) -> None:
    """Send as many messages as the server holds; it holds eight."""
    for _ in range(8):
        assert pair.client.send(99, b"") is None
    pair.run()


@pytest.mark.rule("KVW-MS-01", "KVW-MS-02", "keeps")
def test_a_message_arrives() -> None:
    """Of any size, whoever is first, into memory that fits, is larger, or is none."""
    for room in [None, 0, 7]:
        for first in ["send", "recv"]:
            for data in [b"", SMALL, b"x" * 64, b"x" * 65, LARGE]:
                pair = ConnectionPair()
                size = None if room is None else len(data) + room
                received: RequestRecord | None = None
                if first == "recv":
                    received = pair.server.recv(TAG, size)
                sent = pair.client.send(TAG, data)
                pair.run()
                if received is None:
                    received = pair.server.recv(TAG, size)
                expect_fine(pair)
                assert pair.server.received(received) == data
                if sent is not None:
                    assert pair.client.error(sent) is None
                    assert sent.buffer in pair.client.freed
                assert not pair.server.memory
                assert not pair.client.memory


@pytest.mark.parametrize("data", [SMALL, b"y" * 100])
def test_a_receive_that_is_too_small(data: bytes) -> None:
    """It fails and says the size; the message stays, and so does its order."""
    pair = ConnectionPair()
    early = pair.server.recv(TAG, 3)
    pair.client.send(TAG, data)
    pair.client.send(TAG, b"next")
    pair.run()
    late = pair.server.recv(TAG, 4)
    for receive in (early, late):
        expect_error(pair.server, receive, errors.MessageTooLarge)
        assert f"has {len(data)} bytes" in str(pair.server.error(receive))
    fits = [pair.server.recv(TAG, len(data)) for _ in range(2)]
    expect_fine(pair)
    assert [pair.server.received(receive) for receive in fits] == [data, b"next"]


def test_a_posted_receive_waits_behind_a_message_that_is_arriving() -> None:
    """Half a message is nobody's, and the one behind it waits."""
    pair = ConnectionPair()
    pair.client.send(TAG, SMALL)
    header, body = pair.client.wire.popleft()
    arrival = pair.server.header(header)
    assert arrival is not None
    receive = pair.server.recv(TAG, 100)
    assert receive not in pair.server.done
    pair.server.body(arrival, body)
    assert pair.server.received(receive) == SMALL


@pytest.mark.parametrize("posted", [True, False])
def test_a_message_that_came_damaged(posted: bool) -> None:
    """Whoever takes it gets the error, once; the connection goes on."""
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, 100) if posted else None
    pair.client.send(TAG, SMALL)
    header, body = pair.client.wire.popleft()
    pair.server.receive((header, b"smell"))
    if receive is None:
        receive = pair.server.recv(TAG, 100)
    expect_error(pair.server, receive, errors.IntegrityError)
    pair.client.send(TAG, body)
    again = pair.server.recv(TAG, 100)
    expect_fine(pair)
    assert pair.server.received(again) == SMALL


def test_a_damaged_message_over_the_limit_is_held_by_nobody() -> None:
    """Its memory went when it came damaged; the refusal names none."""
    pair = ConnectionPair()
    pair.client.send(TAG, SMALL)
    header, _ = pair.client.wire.popleft()
    pair.server.receive((header, b"smell"))
    refused = pair.server.recv(TAG, None, limit=len(SMALL) - 1)
    expect_error(pair.server, refused, errors.MessageTooLarge)
    assert pair.server.done[refused].held is None


# --- receives that stay


def passed_on(pair: ConnectionPair) -> list[tuple[RequestRecord, bytes]]:
    """What receives that stay have got."""
    events = pair.server.events
    return [(e.request, bytes(e.body)) for e in events if isinstance(e, MessageArrived)]


def test_a_receive_that_stays_gets_small_messages_until_another_one_comes() -> None:
    """Twice as many as the server holds, then an announced one, which ends it."""
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, None, stays=True)
    sent = [b"%d" % number for number in range(16)]
    for data in sent:
        assert pair.client.send(TAG, data) is None, "there was no credit for it"
        pair.run()
    assert passed_on(pair) == [(receive, data) for data in sent]
    assert receive not in pair.server.done
    assert not pair.server.memory
    pair.client.send(TAG, LARGE)
    pair.client.send(TAG, b"behind it")
    expect_fine(pair)
    assert pair.server.received(receive) == LARGE
    again = pair.server.recv(TAG, None, stays=True)
    expect_fine(pair)
    assert pair.server.received(again) == b"behind it"


def test_a_message_over_the_limit_of_a_receive_that_stays() -> None:
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, None, limit=3, stays=True)
    pair.client.send(TAG, SMALL)
    pair.run()
    expect_error(pair.server, receive, errors.MessageTooLarge)
    assert not passed_on(pair)


def test_a_receive_that_stays_ends_with_a_damaged_message() -> None:
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, None, stays=True)
    pair.client.send(TAG, SMALL)
    pair.server.receive((pair.client.wire.popleft()[0], b"smell"))
    expect_error(pair.server, receive, errors.IntegrityError)
    assert not passed_on(pair)


@pytest.mark.parametrize("then", ["recv", "recv later", "stays", "discard"])
def test_a_receive_that_stays_is_withdrawn_while_a_message_arrives(then: str) -> None:
    """The message is the next receive's, or nobody's."""
    pair = ConnectionPair()
    early = pair.server.recv(TAG, None, stays=True)
    pair.client.send(TAG, SMALL)
    header, body = pair.client.wire.popleft()
    arrival = pair.server.header(header)
    assert arrival is not None
    assert pair.server.core.withdraw(early)
    receive = None
    if then in ("recv", "stays"):
        receive = pair.server.recv(TAG, None, stays=then == "stays")
    elif then == "discard":
        pair.server.core.messages.discard(TAG)
    pair.server.body(arrival, body)
    if then == "recv later":
        receive = pair.server.recv(TAG)
    expect_fine(pair)
    assert not passed_on(pair)
    if receive is not None:
        assert pair.server.received(receive) == SMALL
    assert not pair.server.memory
    assert not pair.server.core.messages.unreceived


# --- credit


def test_damaged_messages_give_their_credit_back() -> None:
    """Twice as many as the server holds at once."""
    pair = ConnectionPair()
    for _ in range(16):
        assert pair.client.send(TAG, SMALL) is None, "there was no credit for it"
        pair.server.receive((pair.client.wire.popleft()[0], b"smell"))
        receive = pair.server.recv(TAG, 100)
        expect_error(pair.server, receive, errors.IntegrityError)
        pair.run()


@pytest.mark.rule("KVW-CR-01", "KVW-CR-02", "keeps")
def test_credit_runs_out_and_comes_back() -> None:
    """Without it a message is announced, even one of 0 bytes; nothing is lost."""
    pair = ConnectionPair()
    use_up_credit(pair)
    announced = [pair.client.send(99, data) for data in (b"", SMALL)]
    assert None not in announced
    receives = [pair.server.recv(99, 64) for _ in range(10)]
    expect_fine(pair)
    assert [pair.server.received(r) for r in receives] == [*[b""] * 9, SMALL]
    assert all(r is not None and pair.client.error(r) is None for r in announced)
    assert pair.client.send(99, SMALL) is None


def test_receives_without_a_size_give_credit_back() -> None:
    """Each gets its message: two at once, and more in all than the server holds."""
    pair = ConnectionPair()
    for number in range(0, 16, 2):
        receives = [pair.server.recv(TAG, None) for _ in range(2)]
        for data in (b"%d" % number, b"%d" % (number + 1)):
            assert pair.client.send(TAG, data) is None, "there was no credit for it"
            pair.run()
        received = [pair.server.received(receive) for receive in receives]
        assert received == [b"%d" % number, b"%d" % (number + 1)]
    assert not pair.server.memory


# --- rules


@pytest.mark.rule("KVW-MS-01", "breaks")
def test_messages_that_are_none() -> None:
    """Larger than agreed, or with a number."""
    for size, request_id, segment in [(65, 0, 0), (5, 1, 0), (5, 0, 1), (5, 2, 0)]:
        pair = ConnectionPair()
        pair.client.forge_payload(
            FrameType.MESSAGE, bytes(size), request=request_id, segment=segment
        )
        expect_broken(pair, pair.server, "KVW-MS-01")


@pytest.mark.rule("KVW-MS-02", "breaks")
def test_ready_for_what_was_not_announced() -> None:
    """A put, and a receive that has met the other side's message."""
    pair = ConnectionPair()
    region = pair.server.expose(100)
    put = pair.client.put(bytes(100), pair.server.grant(region))
    pair.server.forge(FrameType.READY, Ready(100), request=put.wire_id)
    expect_broken(pair, pair.client, "KVW-MS-02")
    other = ConnectionPair()
    other.client.send(TAG, bytes(100))
    receive = other.server.recv(TAG, 100)
    other.deliver(other.client)
    other.client.forge(FrameType.READY, Ready(100), request=receive.wire_id)
    expect_broken(other, other.server, "KVW-MS-02")


@pytest.mark.rule("KVW-MS-03", "keeps")
@pytest.mark.rule("KVW-MS-03", "breaks")
def test_how_many_announced_messages_may_wait() -> None:
    """The last that may, the first that may not."""
    pair, past = ConnectionPair(), 2 * REQUESTS_MAX + 1
    for number in range(1, past, 2):
        pair.client.forge(FrameType.ANNOUNCE, Announce(tag8(0), 100), request=number)
    expect_fine(pair)
    pair.client.forge(FrameType.ANNOUNCE, Announce(tag8(0), 100), request=past)
    expect_broken(pair, pair.server, "KVW-MS-03")


def test_a_size_costs_nothing_until_there_is_memory_for_it() -> None:
    """64 GiB may be announced; a receive with less says no to it."""
    pair = ConnectionPair()
    pair.client.forge(FrameType.ANNOUNCE, Announce(tag8(TAG), 2**36), request=1)
    expect_fine(pair)
    receive = pair.server.recv(TAG, None)
    expect_error(pair.server, receive, errors.MessageTooLarge)
    assert not pair.server.memory


@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_without_memory_a_message_over_the_limit_is_refused(data: bytes) -> None:
    """Its sender is told, or gets its credit back, and the next message is next."""
    pair = ConnectionPair()
    for _ in range(10):
        sent = pair.client.send(TAG, data)
        refused = pair.server.recv(TAG, None, limit=len(data) - 1)
        expect_fine(pair)
        expect_error(pair.server, refused, errors.MessageTooLarge)
        if sent is not None:
            expect_error(pair.client, sent, errors.MessageTooLarge)


# --- cancelled, withdrawn, at every point


def run_some(pair: ConnectionPair, frames: int) -> None:
    for _ in range(frames):
        pair.deliver(pair.client)
        pair.deliver(pair.server)


@pytest.mark.parametrize("data", [SMALL, b"y" * 100, LARGE])
def test_cancelled_after_any_number_of_frames(data: bytes) -> None:
    """Both sides end, each once; all memory comes back; the connection lives."""
    for who in ["sender", "receiver"]:
        for frames in range(6):
            pair = ConnectionPair()
            receive = pair.server.recv(TAG, len(LARGE))
            sent = pair.client.send(TAG, data)
            run_some(pair, frames)
            side, request = (pair.server, receive)
            if who == "sender":
                if sent is None:
                    continue
                side, request = pair.client, sent
            was_over = request in side.done
            side.cancel(request)
            side.cancel(request)
            expect_fine(pair)
            if not was_over:
                expect_error(side, request, errors.RequestCancelled)
            if who == "sender" and not was_over:
                expect_error(pair.server, receive, errors.PeerCancelled)
            if who == "receiver" and sent is not None and sent not in pair.client.done:
                # The receive took nothing; the message still waits.
                again = pair.server.recv(TAG, len(LARGE))
                expect_fine(pair)
                assert pair.server.received(again) == data
            assert not pair.client.memory
            assert not pair.server.memory
            late = pair.server.recv(5, 10)
            pair.client.send(5, b"alive")
            expect_fine(pair)
            assert pair.server.received(late) == b"alive"


def test_memory_for_a_receive_that_is_over() -> None:
    """It drains at once."""
    pair = ConnectionPair()
    pair.client.send(TAG, bytes(100))
    pair.run()
    receive = pair.server.core.recv(TAG, None, 100, None)
    pair.server.core.cancel(receive)
    late = pair.server.lend(100)
    pair.server.core.messages.provide(receive, late)
    pair.server.core.outbox.events.clear()
    pair.server.collect()
    assert late in pair.server.freed


def test_a_receive_cancelled_while_its_message_lands() -> None:
    """The message is gone, the credit is not, and the memory waits for the link."""
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, 100)
    pair.client.send(TAG, SMALL)
    header, body = pair.client.wire.popleft()
    arrival = pair.server.header(header)
    assert arrival is not None
    pair.server.cancel(receive)
    assert receive.buffer in pair.server.memory
    pair.server.body(arrival, body)
    assert receive.buffer in pair.server.freed
    expect_error(pair.server, receive, errors.RequestCancelled)
    for _ in range(20):
        taken = pair.server.recv(TAG, 100)
        pair.client.send(TAG, SMALL)
        expect_fine(pair)
        assert pair.server.received(taken) == SMALL


# --- the end of the link


@pytest.mark.parametrize("behind", [True, False])
def test_a_link_that_ends_within_a_message(behind: bool) -> None:
    """Half of it is nothing; what was whole before it can still be taken."""
    pair = ConnectionPair()
    if behind:
        pair.client.send(TAG, b"whole")
        pair.run()
    pair.client.send(TAG, SMALL)
    header, _ = pair.client.wire.popleft()
    assert pair.server.header(header) is not None
    pair.server.lose()
    if behind:
        receive = pair.server.recv(TAG, 100)
        assert pair.server.received(receive) == b"whole"
    assert not pair.server.core.messages.waits(TAG, whole=False)
    assert len(pair.server.core.holds) == 0


def test_a_link_that_ends_within_a_message_for_one_of_two_receives() -> None:
    """Both fail, and the memory of the first is free once its link is gone."""
    pair = ConnectionPair()
    receives = [pair.server.recv(TAG, 100) for _ in range(2)]
    pair.client.send(TAG, SMALL)
    header, _ = pair.client.wire.popleft()
    assert pair.server.header(header) is not None
    pair.server.lose()
    for receive in receives:
        expect_error(pair.server, receive, errors.ConnectionLost)
        assert receive.buffer in pair.server.freed
    assert len(pair.server.core.holds) == 0


@pytest.mark.parametrize("announced", ["before", "after"])
def test_who_closes_turns_announced_messages_away(announced: str) -> None:
    """Both sides close: neither waits for a receive that the other will never post."""
    pair = ConnectionPair()
    sent = []
    for end in (pair.client, pair.server):
        request = end.send(TAG, LARGE)
        assert request is not None
        sent.append((end, request))
    if announced == "before":
        pair.run()
    pair.client.close()
    pair.server.close()
    pair.run()
    for end, request in sent:
        assert isinstance(end.error(request), errors.ClosedOK)
        assert end.ended is not None
        assert isinstance(end.ended.error, errors.ClosedOK)
        assert request.buffer in end.freed


@pytest.mark.parametrize("data", [b"", SMALL, LARGE])
def test_what_nobody_wants_is_dropped_until_it_is_received_again(data: bytes) -> None:
    """Many times over: the sender has its credit back, and nothing is kept."""
    pair = ConnectionPair()
    assert pair.server.core.messages.discard(TAG) == 0
    for _ in range(30):
        sent = pair.client.send(TAG, data)
        expect_fine(pair)
        if sent is not None:
            expect_error(pair.client, sent, errors.PeerCancelled)
    assert pair.server.core.messages.unreceived == {}
    pair.server.collect()
    assert not pair.server.memory
    assert pair.client.send(TAG, SMALL) is None
    pair.run()
    received = pair.server.recv(TAG, 100)
    assert pair.client.send(TAG, b"again") is None
    expect_fine(pair)
    assert pair.server.received(received) == b"again"


def test_what_waits_is_dropped_too() -> None:
    """Whole, damaged, announced or still arriving; other tags lose nothing."""
    pair = ConnectionPair()
    pair.client.send(TAG, SMALL)
    pair.client.send(8, SMALL)
    announced = pair.client.send(TAG, LARGE)
    pair.run()
    pair.client.send(TAG, SMALL)
    pair.server.receive((pair.client.wire.popleft()[0], b"smell"))
    pair.client.send(TAG, SMALL)
    header, body = pair.client.wire.popleft()
    arrival = pair.server.header(header)
    assert arrival is not None
    assert pair.server.core.messages.unreceived == {TAG: 4, 8: 1}
    assert pair.server.core.messages.oldest.keys() == {TAG, 8}
    assert pair.server.core.messages.discard(TAG) == 4
    assert pair.server.core.messages.unreceived == {TAG: 1, 8: 1}
    pair.server.body(arrival, body)
    assert pair.server.core.messages.unreceived == {8: 1}
    expect_fine(pair)
    expect_error(pair.client, announced, errors.PeerCancelled)
    other = pair.server.recv(8, 100)
    assert pair.server.received(other) == SMALL
    assert not pair.server.memory


def test_what_a_receive_waits_for_is_not_discarded() -> None:
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, 100)
    with pytest.raises(errors.UsageError, match="cancel that receive first"):
        pair.server.core.messages.discard(TAG)
    pair.server.cancel(receive)
    assert pair.server.core.messages.discard(TAG) == 0


def test_the_oldest_discarded_tag_is_forgotten_first() -> None:
    pair = ConnectionPair()
    for tag in (1, 2, 1, *range(3, DISCARDED_TAGS_MAX + 2)):
        pair.server.core.messages.discard(tag)
    for tag in (1, 2, 3):
        pair.client.send(tag, SMALL)
    expect_fine(pair)
    assert pair.server.core.messages.unreceived == {2: 1}
