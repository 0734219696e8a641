"""R11 to R13, R16: peers that restart, leave, or say too late what they say."""

from __future__ import annotations

import kvwire
from tests.scenarios.world import DEST, LIST, World, scenario
from tests.support import inside
from tests.support.caches import same


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
