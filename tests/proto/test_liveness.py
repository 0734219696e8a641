"""A dead peer is noticed in time, a healthy one never, whoever has stalled."""

from __future__ import annotations

import random

import pytest

from kvwire.errors import FlowControlViolation, UnexpectedFrame
from kvwire.limits import PING_INTERVAL_S, PING_MISSES, STALL_TOLERANCE_S
from kvwire.proto.liveness import (
    PINGS_PER_SECOND_MAX,
    PINGS_SAVED_MAX,
    Keepalive,
    Liveness,
    LivenessVerdict,
)
from kvwire.wire.control import Ping


def watch(now: float = 100.0) -> Liveness:
    return Liveness(interval_s=PING_INTERVAL_S, misses=PING_MISSES, now=now)


def test_a_stall_of_ours_is_forgiven() -> None:
    """However long we were away, the peer gets its intervals again (goal R14)."""
    for stall_s in [0.3, 3.0, 60.0, 3600.0]:
        liveness = watch()
        now = liveness.due + stall_s
        assert liveness.look(now) is LivenessVerdict.PING
        assert liveness.silence_s(now) == pytest.approx(PING_INTERVAL_S)
        assert liveness.due == pytest.approx(now + PING_INTERVAL_S)


def test_a_late_look_asks_before_it_judges() -> None:
    """What the peer has said may lie unread; one interval later nobody is late."""
    liveness = watch()
    for _ in range(2):
        assert liveness.look(liveness.due) is LivenessVerdict.PING
    assert liveness.look(liveness.due + 60.0) is LivenessVerdict.PING
    # Whoever is heard meanwhile is judged afresh.
    liveness.note_received(liveness.due - 1.0)
    assert liveness.look(liveness.due) is LivenessVerdict.FINE
    for _ in range(2):
        assert liveness.look(liveness.due) is LivenessVerdict.PING
    assert liveness.look(liveness.due + 60.0) is LivenessVerdict.PING
    assert liveness.look(liveness.due + 60.0) is LivenessVerdict.DEAD


def test_a_late_timer_within_the_tolerance_is_not_a_stall() -> None:
    """Otherwise a busy loop would never notice a dead peer."""
    liveness = watch()
    late_s = STALL_TOLERANCE_S
    now = liveness.due + late_s
    liveness.look(now)
    assert liveness.silence_s(now) == pytest.approx(PING_INTERVAL_S + late_s)


def test_stalls_delay_the_verdict_and_do_not_prevent_it() -> None:
    """A peer that is dead is found, however late each look is, one look later at most.

    The last look, if it is late, asks once more before it judges.
    """
    for seed in range(20):
        chance, liveness, looks = random.Random(seed), watch(), 0
        while True:
            looks += 1
            now = liveness.due + chance.choice([0.0, 0.1, 0.3, 5.0])
            if liveness.look(now) is LivenessVerdict.DEAD:
                break
        assert PING_MISSES <= looks <= PING_MISSES + 1
        assert liveness.due == now + PING_INTERVAL_S


@pytest.mark.rule("KVW-LV-01", "keeps")
def test_each_ping_is_answered_once_in_order() -> None:
    """Numbers begin at 1, and wrap with their 32 bits."""
    liveness = watch()
    assert [liveness.ping(100.0), liveness.ping(100.0)] == [1, 2]
    liveness.pong_received(Ping(1))
    liveness.pong_received(Ping(2))
    liveness._sent = liveness._answered = 2**32 - 1
    assert liveness.ping(100.0) == 0
    liveness.pong_received(Ping(0))
    assert liveness.ping(100.0) == 1


@pytest.mark.rule("KVW-LV-01", "breaks")
def test_an_answer_to_no_ping() -> None:
    """Never asked, asked later, or answered before."""
    for answers in [[0], [2], [3], [1, 1], [1, 0], [1, 2, 3], [1, 2, 2], [2**32 - 1]]:
        liveness = watch()
        assert [liveness.ping(100.0), liveness.ping(100.0)] == [1, 2]
        *good, wrong = answers
        for number in good:
            liveness.pong_received(Ping(number))
        with pytest.raises(UnexpectedFrame) as caught:
            liveness.pong_received(Ping(wrong))
        assert caught.value.rule == "KVW-LV-01"


def test_a_peer_that_answers_nothing_for_an_interval_hears_nothing() -> None:
    liveness = watch()
    assert liveness.peer_receives(1e9), "it was asked nothing"
    liveness.ping(101.0)
    liveness.ping(101.0 + PING_INTERVAL_S / 2)
    assert liveness.peer_receives(100.9 + PING_INTERVAL_S)
    assert not liveness.peer_receives(101.0 + PING_INTERVAL_S)
    liveness.note_received(102.0)
    liveness.pong_received(Ping(1))
    assert liveness.peer_receives(101.9 + PING_INTERVAL_S)
    assert not liveness.peer_receives(102.0 + PING_INTERVAL_S)
    liveness.pong_received(Ping(2))
    assert liveness.peer_receives(1e9)
    liveness.ping(200.0)
    assert liveness.peer_receives(201.0)


@pytest.mark.rule("KVW-LV-02", "breaks")
def test_not_everything_is_saved() -> None:
    """A peer that was silent for a year has not earned a year of pings."""
    liveness = watch()
    for _ in range(PINGS_SAVED_MAX):
        liveness.ping_received(1e9)
    with pytest.raises(FlowControlViolation):
        liveness.ping_received(1e9)


@pytest.mark.rule("KVW-LV-02", "keeps")
def test_pings_that_waited_come_together() -> None:
    """The wire was blocked one way for a minute, and the peer pinged all the time."""
    liveness = watch()
    for _ in range(60 * PINGS_PER_SECOND_MAX):
        liveness.ping_received(160.0)
    assert liveness._pings_left == PINGS_PER_SECOND_MAX


# --- what we say ourselves


def test_no_silence_of_ours_is_longer_than_an_interval() -> None:
    """Nor shorter than half of one, whenever the last frame was sent."""
    for seed in range(20):
        chance = random.Random(seed)
        mine = Keepalive(interval_s=PING_INTERVAL_S, now=100.0, frames_sent=5)
        assert mine.is_idle(5)
        assert not mine.is_idle(6)
        spoke_at, frames_sent = 100.0, 5
        while mine.due < 200.0:
            if chance.random() < 0.5:
                spoke_at, frames_sent = (
                    mine.due - chance.uniform(0.0, 1.0),
                    frames_sent + 1,
                )
            now = mine.due
            if mine.is_due(now, frames_sent):
                assert PING_INTERVAL_S / 2 <= now - spoke_at <= PING_INTERVAL_S
                spoke_at, frames_sent = now, frames_sent + 1
