"""Requests of a device's memory: nothing touches it before the front permits that."""

from __future__ import annotations

import pytest

from kvwire import errors
from kvwire.proto.requests import REQUEST_ID_MAX
from kvwire.proto.state import RequestKind
from tests.proto.moving import expect_error, expect_fine
from tests.support.core_pair.peer import ConnectionPair

TAG = 7
SMALL, LARGE = b"small", b"large" * 30_000  # 64 bytes travel at once
sizes = pytest.mark.parametrize("data", [SMALL, LARGE])


@sizes
def test_a_message_leaves_a_device_when_that_permits(data: bytes) -> None:
    """It is announced at once: later messages of its tag stay behind it."""
    pair = ConnectionPair()
    sent = pair.client.send_from_device(TAG, data)
    pair.client.send(TAG, b"second")
    received = [pair.server.recv(TAG, len(LARGE)) for _ in range(2)]
    pair.run()
    assert received[0] not in pair.server.done
    assert pair.server.received(received[1]) == b"second"
    pair.client.permit()
    expect_fine(pair)
    assert pair.server.received(received[0]) == data
    assert pair.client.error(sent) is None
    assert not pair.client.memory


@pytest.mark.parametrize("ends", ["DONE", "FAILED"])
def test_an_empty_message_of_a_device(ends: str) -> None:
    """It has no bytes to wait for, but its place among the messages of its tag."""
    pair = ConnectionPair()
    sent = pair.client.send_from_device(TAG, b"")
    received = pair.server.recv(TAG, 0)
    pair.run()
    if ends == "FAILED":
        pair.client.cancel(sent)
    pair.client.permit()
    expect_fine(pair)
    if ends == "DONE":
        assert pair.client.error(sent) is None
        assert pair.server.received(received) == b""
    else:
        expect_error(pair.client, sent, errors.RequestCancelled)
    assert sent.buffer in pair.client.freed
    assert not pair.client.memory


@sizes
@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_message_arrives_in_a_device_when_that_permits(
    data: bytes, first: str
) -> None:
    """It is taken at once: later receives get later messages."""
    pair = ConnectionPair()
    if first == "send":
        pair.client.send(TAG, data)
        pair.run()
    into = pair.server.recv_into_device(TAG, len(data))
    if first == "recv":
        pair.client.send(TAG, data)
    pair.client.send(TAG, b"second")
    second = pair.server.recv(TAG, 100)
    pair.run()
    assert into not in pair.server.done
    assert pair.server.received(second) == b"second"
    assert into.buffer is not None
    assert not any(pair.server.content(into.buffer))
    pair.server.permit()
    expect_fine(pair)
    assert pair.server.received(into) == data
    assert into.buffer in pair.server.freed
    assert not pair.client.memory


@pytest.mark.parametrize("nbytes", [4, 70])
def test_one_that_is_too_small_leaves_the_message_there(nbytes: int) -> None:
    pair = ConnectionPair()
    pair.client.send(TAG, bytes(nbytes))
    small = pair.server.recv_into_device(TAG, nbytes - 1)
    pair.run()
    expect_error(pair.server, small, errors.MessageTooLarge)
    whole = pair.server.recv(TAG, nbytes)
    expect_fine(pair)
    assert pair.server.received(whole) == bytes(nbytes)


def test_a_damaged_message_is_not_put_into_a_device() -> None:
    pair = ConnectionPair()
    into = pair.server.recv_into_device(TAG, 100)
    pair.client.send(TAG, SMALL)
    header, _ = pair.client.wire.popleft()
    pair.server.receive((header, b"smell"))
    expect_error(pair.server, into, errors.IntegrityError)
    assert not pair.server.wanted


@sizes
def test_a_cancel_before_the_device_permits(data: bytes) -> None:
    """Its memory is free at once; the credit of what was held comes back."""
    pair = ConnectionPair()
    for _ in range(16):
        into = pair.server.recv_into_device(TAG, len(data))
        pair.client.send(TAG, data)
        pair.run()
        pair.server.cancel(into)
        assert into.buffer in pair.server.freed
        expect_error(pair.server, into, errors.RequestCancelled)
        pair.server.permit()
        pair.run()
    assert pair.client.send(TAG, SMALL) is None, "there was no credit for it"
    sent = pair.client.send_from_device(TAG, data)
    pair.server.recv(TAG, 100)
    pair.server.recv(TAG, len(data))
    pair.run()
    pair.client.cancel(sent)
    assert sent.buffer in pair.client.freed
    pair.client.permit()
    pair.run()
    assert pair.client.broken is pair.server.broken is None


def test_a_put_and_a_get_ask_when_the_device_permits() -> None:
    """Only then do they have a number: others that began later go before them."""
    pair = ConnectionPair()
    region = pair.server.expose(LARGE)
    grant = pair.server.grant(region)
    read = pair.client.reserve(RequestKind.GET, len(LARGE))
    write = pair.client.reserve(RequestKind.PUT, LARGE[::-1])
    dropped = pair.client.reserve(RequestKind.PUT, LARGE)
    early = pair.client.get(grant)
    expect_fine(pair)
    assert pair.client.received(early) == LARGE
    assert not read.wire_id
    pair.client.cancel(dropped)
    assert dropped.buffer in pair.client.freed
    for request in (read, write, dropped):
        pair.client.core.ask(request, grant)
    expect_fine(pair)
    assert pair.client.received(read) == LARGE
    assert pair.client.error(write) is None
    assert pair.server.content(region.buffer) == LARGE[::-1]
    expect_error(pair.client, dropped, errors.RequestCancelled)


def test_a_put_for_which_no_number_is_left() -> None:
    pair = ConnectionPair()
    grant = pair.server.grant(pair.server.expose(10))
    put = pair.client.reserve(RequestKind.PUT, bytes(10))
    pair.client.core._requests._next_id = REQUEST_ID_MAX + 2
    pair.client.core.ask(put, grant)
    pair.client.collect()
    expect_error(pair.client, put, errors.UsageError)


@sizes
def test_a_close_waits_for_what_a_device_has_met(data: bytes) -> None:
    pair = ConnectionPair()
    into = pair.server.recv_into_device(TAG, len(data))
    pair.client.send(TAG, data)
    pair.run()
    pair.client.close()
    pair.run()
    assert pair.server.ended is None
    pair.server.permit()
    pair.run()
    assert pair.server.received(into) == data
    for peer in (pair.client, pair.server):
        assert peer.ended is not None
        assert peer.ended.graceful
