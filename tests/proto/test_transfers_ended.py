"""KV transfers in any order of events, and ended at every point of their way."""

from __future__ import annotations

import random

from kvwire.errors import (
    ClosedOK,
)
from tests.proto.expect import expect_error, expect_fine
from tests.proto.moving import CHUNK, Moved, ask, both_ways, moved
from tests.support.core_pair.pair import ConnectionPair


@both_ways
def test_marks_and_frames_in_any_order(pull: bool) -> None:
    """What is committed is what landed, whenever each frame came."""
    for seed in range(20):
        chance, m = random.Random(seed), moved(pull=pull)
        m.producer.slow = chance.random() < 0.5
        parts: list[bytes] = []
        for _ in range(chance.randrange(1, 30)):
            match chance.randrange(4):
                case 0:
                    parts.append(
                        chance.randbytes(chance.choice([1, 900, CHUNK, 150_000]))
                    )
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
