"""Bugs that simulated schedules have found, each as the shortest way to show it."""

from __future__ import annotations

import gc

import pytest

from kvwire.errors import ConnectionLost
from tests.support.core_pair.peer import ConnectionPair
from tests.support.pairs import connected


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


async def test_messages_that_nobody_took_go_with_their_connection() -> None:
    """They used to stay in the communicator's table of memory for ever."""
    async with connected() as pair:
        for _ in range(10):
            await pair.left.send(7, b"never asked for")
        await pair.left.send(8, b"the last one")
        await pair.right.recv(8)
        assert len(pair.far._state.buffers) == 0
        assert bytes(await pair.right.recv(7)) == b"never asked for"
    gc.collect()
