"""Where the two ends meet: names, orders, and what is remembered of the dead."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import kvwire
from kvwire.limits import TRANSFERS_WAITING_MAX
from kvwire.transfers import registry as module
from kvwire.transfers.offer import TransferOffer
from kvwire.transfers.registry import TOMBSTONES_MAX
from kvwire.transfers.state import LegState
from tests.support import inside, virtual_time
from tests.support.waiting import PATIENCE_S
from tests.support.world import World, scenario

LIST = [3, 1, 4]
DEST = [10, 11, 12]


@scenario("inproc")
async def test_several_wait_for_one_name(w: World) -> None:
    """The first one gets it; the others learn that has already taken it, at once."""
    asked = [w.pull_side.pull("t", w.target.cache, [10 + n]) for n in range(3)]
    await virtual_time.pass_time(0.1)
    out = w.p.publish("t", w.source.cache, [3])
    out.ready()
    out.finish()
    assert (await asked[0]).complete
    for number, inc in enumerate(asked[1:], 11):
        assert "has already taken it" in (await inc).missing["kv", number]


@scenario("inproc")
async def test_the_reason_is_said_once_to_each_who_may_ask(w: World) -> None:
    w.p.publish("t", w.source.cache, LIST, consumers=2).abort("no prefill today")
    for _ in range(2):
        inc = w.pull_side.pull("t", w.target.cache, DEST)
        assert "no prefill today" in (await inc).missing["kv", DEST[0]]
    # The third one asks for whatever comes next under this name.
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    await virtual_time.pass_time(1.0)
    assert not inc.done()
    out = w.p.publish("t", w.source.cache, LIST)
    out.ready()
    out.finish()
    assert (await inc).complete


@scenario("inproc")
async def test_who_finds_no_room_on_a_new_link_asks_on_the_next(w: World) -> None:
    """One that the producer had met, and as many others as may wait for an answer."""
    out, inc = w.begin()
    await w.until(lambda: inside.planned(inc))
    names = range(TRANSFERS_WAITING_MAX)
    asked = [w.pull_side.pull(name, w.target.cache, DEST) for name in names]

    def left() -> list[int]:
        states = [inside.legs(one)[0].state for one in asked]
        return [name for name in names if states[name] is LegState.WAITING]

    w.cut()
    await w.until(
        lambda: len(left()) == 1 and len(inside.questions(w.p)) >= len(asked) - 1
    )
    (last,) = left()
    asked[last - 1].abort()
    missed = w.p.publish(last, w.source.cache, LIST)
    missed.ready()
    missed.finish()
    w.cut()
    assert (await asked[last]).complete
    for end in (out, inc, *asked):
        end.abort()


@scenario()
async def test_a_reason_that_is_lost_with_its_link_is_said_again(w: World) -> None:
    """Who asks has no lease, and would wait for ever."""
    w.p.publish("t", w.source.cache, LIST).abort("no prefill today")
    # From here the consumer hears nothing but the end of its link.
    w.freeze(w.pull_side)
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    await w.until(lambda: not inside.remembered(w.p))
    w.cut()
    async with asyncio.timeout(PATIENCE_S):
        outcome = await inc
    assert "no prefill today" in outcome.missing["kv", DEST[0]]


@scenario("inproc")
async def test_who_comes_too_late_hears_what_ended_it(w: World) -> None:
    """The error is that of a consumer who was there: docs/topics/kv-transfers.md."""
    w.p.publish("aborted", w.source.cache, LIST).abort("no prefill today")
    await w.p.publish("late", w.source.cache, LIST, deadline=timedelta(seconds=0.1))
    gates = {"aborted": kvwire.PeerCancelled, "late": kvwire.DeadlineExceeded}
    for name, error in gates.items():
        inc = w.pull_side.pull(name, w.target.cache, DEST)
        with pytest.raises(error, match="it has ended"):
            await inc.layer(0)
    w.d.expect("refused", w.target.cache, DEST).abort("no room in the batch")
    out = w.push_side.push("refused", w.source.cache, LIST)
    assert "no room in the batch" in (await out).missing["kv", LIST[0]]
    await out.drained()


@scenario("inproc")
async def test_what_is_remembered_is_bounded(
    w: World,
) -> None:
    last = TOMBSTONES_MAX + 9
    for number in range(last + 1):
        w.p.publish(number, w.source.cache, LIST).abort(f"reason {number}")
    assert len(inside.remembered(w.p)) == TOMBSTONES_MAX
    for number in (last, last - 1, 10):
        inc = w.pull_side.pull(number, w.target.cache, DEST)
        assert f"reason {number}" in (await inc).missing["kv", DEST[0]]
    assert len(inside.remembered(w.p)) == TOMBSTONES_MAX - 3


@scenario("inproc")
async def test_a_question_that_is_taken_back_is_forgotten(w: World) -> None:
    kept = w.pull_side.pull("t", w.target.cache, DEST)
    other = w.pull_side.pull("t", w.target.cache, DEST)
    await w.until(lambda: len(inside.questions(w.p)) == 2)
    other.abort()
    await w.until(lambda: len(inside.questions(w.p)) == 1)
    kept.abort()
    await w.until(lambda: not inside.questions(w.p))
    assert not inside.questions(w.p)


@pytest.mark.parametrize("all_peers", [True, False])
@scenario("inproc")
async def test_what_waits_for_an_answer_is_bounded_in_bytes(
    w: World, monkeypatch: pytest.MonkeyPatch, *, all_peers: bool
) -> None:
    """Of one connection and of all; what is refused is one transfer, and says why."""
    limit = "WAITING_BYTES_ALL_MAX" if all_peers else "WAITING_BYTES_MAX"
    monkeypatch.setattr(module, limit, 10 * 1024)
    other = await w.d.connect(w.address)
    ends = [w.pull_side, other][: 1 + all_peers]

    def ask(number: int) -> kvwire.Incoming:
        by = ends[number % len(ends)]
        return by.pull(f"t{number}", w.target.cache, [10 + number])

    asked = [ask(number) for number in range(8)]
    await virtual_time.pass_time(0.1)
    waiting = [inc for inc in asked if not inc.done()]
    assert 0 < len(waiting) < 6
    assert w.pull_side.closed is other.closed is False
    for inc in asked:
        if inc in waiting:
            continue
        assert "have reached their memory limit" in str((await inc).missing)
    # What has been answered, or was given up, makes room.
    waiting[0].abort("not wanted")
    out = w.p.publish(waiting[1].id, w.source.cache, [3])
    out.ready()
    out.finish()
    assert (await waiting[1]).complete
    again = [ask(number) for number in (10, 11)]
    await virtual_time.pass_time(0.1)
    assert not any(inc.done() for inc in again)
    for inc in (*waiting, *again):
        inc.abort("not wanted")
    await virtual_time.pass_time(0.1)
    assert not inside.questions(w.p)
    assert not inside.registry(w.p)._waiting_bytes


@scenario("inproc", resume=False)
async def test_questions_of_a_lost_connection_are_forgotten(w: World) -> None:
    asked = [w.pull_side.pull(n, w.target.cache, DEST) for n in range(50)]
    await w.until(lambda: len(inside.questions(w.p)) == 50)
    w.cut()
    for inc in asked:
        assert not (await inc).landed
    assert not inside.questions(w.p)
    assert not inside.questions(w.p)


@scenario("inproc")
async def test_ending_by_name(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST)
    other = w.p.publish("u", w.source.cache, LIST)
    inside.registry(w.p).end("t", "the engine says so")
    assert (await out).missing["kv", LIST[0]] == "the engine says so"
    assert not other.done()
    other.abort()


@scenario("inproc")
async def test_the_end_of_a_link_asks_nothing_again_that_nobody_here_has_named(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer may leave a thousand questions and drop other links at any rate."""
    for number in range(5):
        w.pull_side.pull(f"unknown {number}", w.target.cache, DEST)
    await w.until(lambda: len(inside.questions(w.p)) == 5)
    read = TransferOffer.decode
    said: list[bytes] = []

    def counted(data: bytes) -> TransferOffer:
        said.append(data)
        return read(data)

    monkeypatch.setattr(TransferOffer, "decode", counted)
    other = await w.d.connect(w.address)
    theirs = await w.p.accept()
    other.abort()
    await theirs.wait_closed()
    await w.until(lambda: theirs not in w.p.live_connections)
    await virtual_time.pass_time(1.0)
    assert said == []
    assert len(inside.questions(w.p)) == 5
    assert await w.moves("named", [6, 7], [20, 21])


# --- what an open transfer waits for --------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("pull", "the peer 'prefill' has not published it"),
        ("push", "the peer 'decode' has not expected it"),
        ("publish", "0 of 1 consumers have pulled it"),
        ("expect", "no peer has pushed it"),
    ],
)
@scenario("inproc")
async def test_the_reason_says_what_was_waited_for(
    w: World, verb: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: dict[str, Any] = {
        "pull": w.pull_side.pull,
        "push": w.push_side.push,
        "publish": w.p.publish,
        "expect": w.d.expect,
    }
    end = calls[verb]("t", w.source.cache, LIST, deadline=timedelta(seconds=25))
    assert said in repr(end)
    await virtual_time.pass_time(21.0)
    named = [r for r in caplog.records if "transfer 't' is open" in r.message]
    assert [said in record.message for record in named] == [True]
    assert said in str((await end).missing.reasons)
    await end.drained()


@scenario("inproc")
async def test_a_producer_that_never_finishes_is_named(w: World) -> None:
    out, inc = w.begin(theirs={"deadline": timedelta(seconds=5)})
    out.ready()
    await inc.layer(0)
    assert "finish() has not been called" in repr(out)
    # All of it is here: only the producer's last word is missing.
    assert "the peer 'prefill' has not finished it" in repr(inc)
    await inc
    await out
