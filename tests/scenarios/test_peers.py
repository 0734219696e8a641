"""R11 to R16: peers that restart, leave, fall silent, or say too late what they say."""

from __future__ import annotations

import kvwire
from tests.scenarios.world import DEST, LIST, World, held, scenario
from tests.support import inside
from tests.support.caches import LARGE, Memory, same


@scenario()
async def test_r11_peer_restarts_on_the_same_address(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    w.p.abort()
    await w.p.close()
    async with kvwire.open(name="prefill") as again:
        assert await again.listen(w.address) == w.address
        # At once, and not when the lease of 30 s ends.
        outcome = await inc
        said = "the peer has restarted; the peer's side of it is gone"
        assert said in outcome.missing["kv", DEST[0]]
        await inc.drained()
        late = w.pull_side.pull("u", w.target.cache, DEST)
        assert not (await late).complete
        await late.drained()
        # Nothing is wedged: the same names work with the new start.
        w.pull_side = await w.d.connect(w.address)
        w.p = again
        assert w.pull_side.peer.incarnation == again.incarnation
        assert await w.moves("t", LIST, DEST)
        # The link that found the new start out is not kept.
        await w.until(lambda: len(w.d.live_connections) == 1)


@scenario()
async def test_r12_peer_leaves_while_transfers_run(w: World) -> None:
    out, inc = w.begin()
    other = w.p.publish("u", w.source.cache, [6])
    half = w.pull_side.pull("u", w.target.cache, [20])
    other.ready(layers=0)
    await half.layer(0)
    thaw = w.freeze(w.pull_side)
    out.ready()
    out.finish()
    await w.until(lambda: inside.legs(out))
    leaving = inside.services(w.p).loop.create_task(w.push_side.close())
    await w.until(lambda: inside.core(w.push_side).phase.value != "open")
    assert not leaving.done(), "what is in flight is waited for"
    thaw()
    await leaving
    # What was finished is delivered, what was not is ended on both sides.
    assert (await inc).complete
    assert (await out).complete
    assert same(w.source, LIST, w.target, DEST)
    assert not (await half).complete
    assert not (await other).complete


@scenario()
async def test_r13_completion_arrives_after_an_abort(w: World) -> None:
    out, inc = w.begin()
    await w.until(lambda: inside.planned(inc))
    thaw = w.freeze(w.push_side)
    out.ready()
    out.finish()
    outcome = await inc
    # The consumer's last word is on its way, and its producer gives up.
    out.abort("too late")
    produced = await out
    assert produced.missing["kv", LIST[0]] == "too late"
    thaw()
    assert outcome.complete
    assert inc.outcome is outcome
    out.abort("again")
    inc.abort("again")
    assert out.outcome is produced
    assert await w.moves("u", [6, 7], [20, 21]), "the connection has not suffered"


@scenario()
async def test_r14_abort_of_a_block_that_is_received_and_sent_on(w: World) -> None:
    w.source, w.target = Memory(LARGE, 8), Memory(LARGE, 8)
    w.source.stamp(range(8))
    onward = Memory(LARGE, 8)
    first = w.p.publish("in", w.source.cache, [0, 1, 2, 3, 4, 5])
    received = w.pull_side.pull("in", w.target.cache, [0, 1, 2, 3, 4, 5])
    sent = w.d.publish("on", w.target.cache, [0, 1, 2, 3, 4, 5])
    third = w.push_side.pull("on", onward.cache, [0, 1, 2, 3, 4, 5])
    first.ready(layers=0)
    await received.layer(0)
    thaw = w.freeze(w.push_side)
    sent.ready(layers=0)
    await w.until(lambda: held(w.d))
    received.abort("preempted")
    sent.abort("preempted")
    await received
    await sent
    await received.drained()
    # The link still reads them: they are not free, and that is counted.
    assert not sent.is_drained
    assert w.d.quarantined_bytes
    thaw()
    await sent.drained()
    assert not w.d.quarantined_bytes
    assert not (await third).complete
    assert not (await first).complete


@scenario(lease_s=0.2)
async def test_r15_peer_says_nothing_after_an_abort(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    w.freeze(w.push_side)
    inc.abort("the request is gone")
    outcome = await inc
    assert outcome.missing["kv", DEST[0]] == "the request is gone"
    # Nothing is asked of the peer: this link writes there no more.
    await inc.drained()
    # And the peer's blocks are reclaimed when it is found to be dead.
    w.pull_side.abort("found to be dead")
    await out
    await out.drained()


@scenario()
async def test_r16_an_id_is_used_again_after_a_failure(w: World) -> None:
    failed = w.p.publish("t", w.source.cache, LIST)
    failed.abort("prefill failed")
    await failed
    assert await w.moves("t", [6, 7], [20, 21]), "tainted by its last use"


@scenario()
async def test_r16_an_old_consumer_does_not_meet_a_new_producer(w: World) -> None:
    old = w.p.publish("t", w.source.cache, LIST)
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    await w.until(lambda: inside.planned(inc))
    w.cut()
    old.abort("prefill failed")
    new = w.p.publish("t", w.source.cache, [6, 7, 8, 2, 0])
    new.ready()
    new.finish()
    # It comes back on a new link, and hears of its own producer.
    outcome = await inc
    assert "prefill failed" in outcome.missing["kv", DEST[0]]
    assert w.target.free(DEST), "another prompt's blocks landed here"
    w.pull_side = await w.d.connect(w.address)
    fresh = w.pull_side.pull("t", w.target.cache, DEST)
    assert (await fresh).complete
    assert same(w.source, [6, 7, 8, 2, 0], w.target, DEST)
