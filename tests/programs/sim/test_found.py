"""Bugs that simulated schedules have found, each as the shortest way to show it."""

from __future__ import annotations

import pytest

from kvwire.errors import ConnectionLost
from tests.support.core_pair.peer import ConnectionPair


def test_half_a_message_is_gone_when_the_connection_has_ended() -> None:
    """The other half may never come, and then nothing would end the receive."""
    pair = ConnectionPair()
    pair.client.send(7, b"whole")
    pair.client.send(8, b"half")
    pair.deliver(pair.client)
    arrival = pair.server.header(pair.client.wire[0][0])
    pair.server.core.fail(ConnectionLost("aborted"))
    with pytest.raises(ConnectionLost):
        pair.server.recv(8)
    assert pair.server.received(pair.server.recv(7)) == b"whole"
    assert arrival is not None
    pair.server.body(arrival, b"half")
    assert pair.server.received(pair.server.recv(8)) == b"half"
