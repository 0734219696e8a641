"""Whoever has nothing to say says so, often enough not to be taken for dead."""

from __future__ import annotations

import random

from kvwire.proto.keepalive import Keepalive

INTERVAL_S = 2.0


def voice() -> Keepalive:
    return Keepalive(interval_s=INTERVAL_S, now=100.0, frames_sent=5)


def test_silence_is_noticed_within_an_interval() -> None:
    mine = voice()
    assert mine.is_idle(5)
    assert not mine.is_idle(6)
    assert not mine.is_due(100.9, 5), "a look in between changes nothing"
    assert mine.due == 101.0
    assert mine.is_due(101.0, 5)
    assert not mine.is_due(102.0, 6), "the reminder itself was sent"
    assert mine.is_due(103.0, 6)


def test_no_gap_is_longer_than_an_interval() -> None:
    """Whenever the last frame was sent."""
    for seed in range(20):
        chance, mine = random.Random(seed), voice()
        spoke_at, frames_sent = 100.0, 5
        while mine.due < 200.0:
            if chance.random() < 0.5:
                spoke_at, frames_sent = (
                    mine.due - chance.uniform(0.0, 1.0),
                    frames_sent + 1,
                )
            now = mine.due
            if mine.is_due(now, frames_sent):
                assert INTERVAL_S / 2 <= now - spoke_at <= INTERVAL_S
                spoke_at, frames_sent = now, frames_sent + 1
