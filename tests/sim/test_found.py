"""Bugs that simulated schedules have found, each as the shortest way to show it."""

from __future__ import annotations

import gc

import pytest

from kvwire.errors import ConnectionLost
from kvwire.proto.liveness import Liveness, LivenessVerdict
from tests.support.core_pair.pair import ConnectionPair
from tests.support.pairs import connected


def test_an_announced_message_is_gone_when_the_connection_has_ended() -> None:
    """A receive that met it would wait for ever: nobody answers its READY."""
    pair = ConnectionPair()
    pair.client.send(7, bytes(1000))
    pair.run()
    pair.server.core.fail(ConnectionLost("aborted"))
    with pytest.raises(ConnectionLost):
        pair.server.recv(7)


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


def test_a_connection_that_has_ended_sends_nothing() -> None:
    """Whoever waits until nothing is to send would turn in a circle."""
    pair = ConnectionPair()
    pair.client.stalled = True
    pair.server.recv(7, 1000)
    pair.client.send(7, bytes(1000))
    pair.run()
    assert pair.client.core.sending
    pair.client.core.fail(ConnectionLost("aborted"))
    assert not pair.client.core.sending


def test_a_message_that_nobody_takes_is_no_buffer_of_the_link() -> None:
    """Once it is all here nothing can touch it: it must not stay in the table."""
    pair = ConnectionPair()
    pair.client.send(7, b"hello")
    pair.run()
    assert not len(pair.server.core.holds)
    assert pair.server.received(pair.server.recv(7)) == b"hello"


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


def test_a_late_loop_listens_once_more_before_it_calls_its_peer_dead() -> None:
    """Two stalls in a row, and the answer to our ping still lies in the socket."""
    watch = Liveness(interval_s=2.0, misses=2, now=0.0)
    assert watch.look(7.0) is LivenessVerdict.PING
    assert watch.look(watch.due + 5.0) is LivenessVerdict.PING
    silent_until = watch.due
    assert watch.look(silent_until) is LivenessVerdict.DEAD


def test_a_loop_that_is_always_late_still_finds_its_peer_dead() -> None:
    """It listens once more, not for ever."""
    watch = Liveness(interval_s=2.0, misses=3, now=0.0)
    verdicts = [watch.look(watch.due + 0.3) for _ in range(5)]
    assert verdicts[-1] is LivenessVerdict.DEAD


def test_who_was_heard_after_a_late_look_is_judged_afresh() -> None:
    """The one more look is for a peer that stays silent."""
    watch = Liveness(interval_s=2.0, misses=2, now=0.0)
    watch.look(7.0)
    now = watch.due + 5.0
    watch.look(now)
    watch.heard(now + 0.1)
    assert watch.look(watch.due) is LivenessVerdict.FINE
    assert watch.look(watch.due + 5.0) is LivenessVerdict.PING
    assert watch.look(watch.due + 5.0) is LivenessVerdict.PING
