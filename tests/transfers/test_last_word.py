"""What is still to be said of a transfer when its link is lost, or its side closes.

That it is said again, and believed exactly, in any order of events: test_machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import kvwire
from kvwire.proto.records import TransferRecord
from kvwire.transfers.outgoing import SendFlow
from kvwire.transfers.state import LegState
from kvwire.wire.control import SegmentBody
from kvwire.wire.header import FrameType
from tests.support import inside
from tests.support.caches import same
from tests.support.world import DEST, LIST, Ends, World, scenario

PUSH = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


async def settled_unheard(w: World, push: bool = False) -> Ends:
    """A transfer that is complete for its consumer; the producer does not know yet."""
    out, inc = w.begin(push=push)
    await w.until(lambda: inside.planned(inc) and inside.legs(out)[0].planned)
    w.freeze(w.push_side)
    out.ready()
    out.finish()
    assert (await inc).complete
    return out, inc


@pytest.fixture(name="forge")
def _forge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that marks although its consumer says that all is settled."""
    real = SendFlow.send

    def send(self: Any) -> None:
        leg = self._leg
        if leg.state is not LegState.SETTLED:
            real(self)
        elif leg.core is not None and not leg.core.over:
            body = SegmentBody(1, (0, 0, 1, 0, 5), 1)
            leg.link.core.outbox.send(FrameType.SEGMENT, body, request=leg.core.wire_id)
            leg.link.run()

    monkeypatch.setattr(SendFlow, "send", send)


@PUSH
@pytest.mark.rule("KVW-TR-10", "breaks")
@pytest.mark.usefixtures("forge")
@scenario("inproc", lease_s=1.0)
async def test_a_mark_for_a_transfer_that_is_settled(w: World, push: bool) -> None:
    """The memory is somebody else's: the connection ends before a byte lands."""
    out, _ = await settled_unheard(w, push)
    for tensor in w.target.tensors:
        tensor[DEST] = 7.0
    broken: list[str] = []
    recover = inside.links(w.d).lost
    assert recover is not None

    def lost(connection: kvwire.Connection, error: kvwire.ConnectionClosed) -> None:
        broken.append(str(error))
        recover(connection, error)

    inside.links(w.d).lost = lost
    w.cut()
    await w.until(lambda: any("KVW-TR-10" in error for error in broken))
    assert all((t[DEST] == 7.0).all() for t in w.target.tensors)
    out.abort()


@PUSH
@pytest.mark.rule("KVW-TR-10", "keeps")
@scenario("inproc")
async def test_nothing_is_marked_for_a_transfer_that_is_settled(
    w: World, push: bool
) -> None:
    out, _ = await settled_unheard(w, push)
    assert same(w.source, LIST, w.target, DEST)
    w.cut()
    assert (await out).complete
    assert not inside.sent(out)


@scenario("inproc")
async def test_going_on_with_an_end_that_is_over_is_refused(w: World) -> None:
    """Nothing is known of it any more, so there is nothing to wait for."""
    out, inc = w.begin()
    out.ready()
    out.finish()
    await inc
    await out
    request = inside.core(w.pull_side).open_transfer(
        TransferRecord(id=inside.key(inc)),
        inside.half(inc),
        pull=True,
        deadline=None,
    )
    inside.run(w.pull_side)
    await w.until(lambda: request.over)
    assert not inside.registry(w.p).live


def deafen(connection: kvwire.Connection) -> None:
    """Its link hears nothing any more, not even its own end."""
    link: Any = inside.link(connection)
    link._turn = link.wake = lambda *_: None


@asynccontextmanager
async def dialled_by_the_producer() -> AsyncIterator[World]:
    """A world in which the consumer listens."""
    async with kvwire.open(name="decode") as d, kvwire.open(name="prefill") as p:
        address = await d.listen("inproc://")
        push_side = await p.connect(address)
        yield World(p, d, await d.accept(), push_side, address)


@pytest.mark.asyncio(loop_factories=["virtual"])
@pytest.mark.parametrize("ends", ["is lost", "is closed"])
async def test_a_producer_that_comes_back_before_its_old_link_is_known_to_be_lost(
    ends: str,
) -> None:
    """It is answered once that is known: what is settled here is not unknown."""
    async with dialled_by_the_producer() as w:
        p, d, address = w.p, w.d, w.address
        pull_side, push_side = w.pull_side, w.push_side
        out, _ = await settled_unheard(w, push=True)
        deafen(pull_side)
        push_side._dialled = None
        push_side.abort("a broken cable")
        await push_side.wait_closed()
        await p.connect(address)
        await w.until(lambda: inside.questions(d))
        assert not out.done()
        if ends == "is lost":
            inside.core(pull_side).fail(kvwire.ConnectionLost("silence"))
        else:
            inside.core(pull_side).fail(kvwire.ClosedOK("this side has closed"))
        inside.run(pull_side)
        produced = await out
        if ends == "is lost":
            assert produced.complete
        else:
            (reason,) = produced.missing.reasons
            assert "nothing is known about it" in reason
        await w.until(inside.registry(d).all_settled.is_set)
        assert not inside.questions(d)
        link: Any = inside.link(pull_side)
        del link._turn, link.wake
        link.wake()


@pytest.mark.asyncio(loop_factories=["virtual"])
async def test_a_producer_that_is_back_while_its_last_link_says_the_last_word() -> None:
    """One link carries that at a time: it is said again once that one is lost."""
    async with dialled_by_the_producer() as w:
        p, d, address = w.p, w.d, w.address
        push_side = w.push_side
        out, _ = await settled_unheard(w, push=True)
        push_side._dialled = None
        push_side.abort("a broken cable")
        await w.until(lambda: inside.owed(d))
        (word,) = inside.owed(d)
        second = await p.connect(address)
        w.freeze(second)
        its_end = await d.accept()
        await w.until(lambda: word.state is LegState.SETTLED)
        deafen(its_end)
        second._dialled = None
        second.abort("another broken cable")
        await second.wait_closed()
        await p.connect(address)
        await w.until(lambda: inside.questions(d))
        assert not out.done()
        inside.core(its_end).fail(kvwire.ConnectionLost("silence"))
        inside.run(its_end)
        assert (await out).complete
        await w.until(inside.registry(d).all_settled.is_set)
        assert not inside.questions(d)
        link: Any = inside.link(its_end)
        del link._turn, link.wake
        link.wake()


# --- a consumer that closes -----------------------------------------------------------


@PUSH
@pytest.mark.parametrize("noticed", [False, True])
@scenario("inproc")
async def test_a_consumer_that_closes_says_its_last_word_first(
    w: World, push: bool, noticed: bool
) -> None:
    """The producer does not hold its blocks for a lease, nor call them missing."""
    out, _ = await settled_unheard(w, push)
    w.cut()
    if noticed:
        await w.turns_until(lambda: inside.owed(w.d))
    await w.d.close()
    assert out.done()
    assert (await out).complete
    assert out.is_drained
    assert inside.registry(w.d).all_settled.is_set()
    assert not w.p.live_connections


@PUSH
@scenario("inproc")
async def test_nor_does_one_that_waits_for_its_producer_to_come_back(
    w: World, push: bool
) -> None:
    """It listens until it has been asked, also where others find it closed."""
    address = await w.d.listen("inproc://")
    dialled, taken = await w.p.connect(address), await w.d.accept()
    await w.pull_side.close()
    w.pull_side, w.push_side = taken, dialled
    out, _ = await settled_unheard(w, push)
    w.cut()
    closing = inside.services(w.d).loop.create_task(w.d.close())
    await w.until(lambda: w.d.closed)
    with pytest.raises(kvwire.ClosedOK):
        await w.d.connect(w.address)
    await closing
    assert (await out).complete
    with pytest.raises(kvwire.ConnectError):
        await w.p.connect(address)


@scenario("inproc")
async def test_nor_is_a_close_held_up_by_a_producer_that_is_gone(w: World) -> None:
    await settled_unheard(w)
    w.p.abort()
    await w.p.close()
    begun = inside.now()
    await w.d.close()
    assert inside.now() - begun < w.d.config.close_timeout_s + 3


# --- an abort while the link is lost --------------------------------------------------


@PUSH
@scenario("inproc")
async def test_nor_is_a_close_held_up_by_what_was_aborted(w: World, push: bool) -> None:
    out, inc = w.begin(push=push)
    asks = out if push else inc
    await w.until(lambda: inside.planned(inc) and inside.legs(out)[0].planned)
    near, far = (w.p, w.d) if push else (w.d, w.p)
    far.abort()
    await w.until(lambda: asks._legs[0].state is LegState.WAITING)
    asks.abort("given up")
    begun = inside.now()
    await near.close()
    assert inside.now() - begun < near.config.close_timeout_s
