"""Messages that nobody wants are dropped, and their senders have their credit back."""

from __future__ import annotations

import pytest

from kvwire.errors import PeerCancelled, UsageError
from kvwire.proto import messages as module
from tests.proto.expect import expect_error, expect_fine
from tests.proto.test_messages import LARGE, SMALL, TAG
from tests.support.core_pair.pair import ConnectionPair


@pytest.mark.parametrize("data", [b"", SMALL, LARGE])
def test_what_nobody_wants_is_dropped_until_it_is_received_again(data: bytes) -> None:
    """Many times over: the sender has its credit back, and nothing is kept."""
    pair = ConnectionPair()
    assert pair.server.core.messages.discard(TAG) == 0
    for _ in range(30):
        sent = pair.client.send(TAG, data)
        expect_fine(pair)
        if sent is not None:
            expect_error(pair.client, sent, PeerCancelled)
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
    expect_error(pair.client, announced, PeerCancelled)
    other = pair.server.recv(8, 100)
    assert pair.server.received(other) == SMALL
    assert not pair.server.memory


def test_what_a_receive_waits_for_is_not_discarded() -> None:
    pair = ConnectionPair()
    receive = pair.server.recv(TAG, 100)
    with pytest.raises(UsageError, match="cancel the receive first"):
        pair.server.core.messages.discard(TAG)
    pair.server.cancel(receive)
    assert pair.server.core.messages.discard(TAG) == 0


def test_the_oldest_discarded_tag_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DISCARDED_TAGS_MAX", 2)
    pair = ConnectionPair()
    for tag in (1, 2, 1, 3):
        pair.server.core.messages.discard(tag)
    for tag in (1, 2, 3):
        pair.client.send(tag, SMALL)
    expect_fine(pair)
    assert pair.server.core.messages.unreceived == {2: 1}
