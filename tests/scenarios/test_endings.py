"""R01 to R10: aborts, expiries, losses, deaths; who may touch the memory afterwards."""

from __future__ import annotations

import asyncio

import pytest

import kvwire
from tests.scenarios.world import DEST, LIST, World, scenario
from tests.support.caches import LAYERS, same


@scenario()
async def test_r01_receiver_aborts_while_a_write_is_in_flight(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    thaw = w.freeze(w.pull_side)
    out.ready(layers=1)
    inc.abort("the request is gone")
    outcome = await inc
    assert not outcome.complete
    await inc.drained()
    # The blocks have a new owner: the late write must not reach them.
    for tensor in w.target.tensors:
        tensor[DEST] = 7.0
    thaw()
    produced = await out
    assert "the request is gone" in " ".join(produced.missing.values())
    await out.drained()
    assert all((t[DEST] == 7.0).all() for t in w.target.tensors)


@pytest.mark.parametrize("connections", [1, 2])
@scenario()
async def test_r02_one_of_several_consumers_fails_while_the_others_run(
    w: World, connections: int
) -> None:
    other = await w.d.connect(w.address) if connections == 2 else w.pull_side
    out = w.p.publish("t", w.source.cache, LIST, consumers=2)
    first = w.pull_side.pull("t", w.target.cache, DEST)
    second = other.pull("t", w.target.cache, [20, 21, 22, 23, 24])
    out.ready(layers=0)
    await first.layer(0)
    await second.layer(0)
    first.abort("this rank has failed")
    assert not any(o.complete for o in (await first, await second, await out))
    # Reported once, and only after every consumer has stopped.
    await out.drained()
    await second.drained()
    assert await w.moves("u", [6, 7], [28, 29]), "the connection carries the next ones"


@scenario()
async def test_r03_lease_expires_and_the_receiver_comes_late(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST, lease_s=0.05)
    out.ready()
    out.finish()
    assert not (await out).complete
    await out.drained()
    w.source.stamp(LIST, salt=9)
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    outcome = await inc
    assert not outcome.landed
    assert "lease" in outcome.missing["kv", DEST[0]]
    assert w.target.free(DEST)


@scenario()
async def test_r04_slow_receiver_keeps_the_lease_alive(w: World) -> None:
    out, inc = w.begin({"lease_s": 0.05})
    out.ready(layers=0)
    await inc.layer(0)
    # Longer than the lease without a mark or a byte: the peer is there.
    assert await w.stays_open(inc, 0.2)
    out.ready(layers=slice(1, LAYERS))
    out.finish()
    assert (await inc).complete


@scenario()
async def test_r05_receiver_rejects_before_admission(w: World) -> None:
    inc = w.d.expect("t", w.target.cache, DEST)
    inc.abort("no room in the batch")
    out = w.push_side.push("t", w.source.cache, LIST)
    out.ready()
    out.finish()
    outcome = await out
    assert "no room in the batch" in outcome.missing["kv", LIST[0]]
    await out.drained()


@scenario()
async def test_r06_sender_cannot_go_on_after_it_was_agreed(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    out.abort("the write cannot be posted")
    outcome = await inc
    assert "the write cannot be posted" in outcome.missing["kv", DEST[0]]
    with pytest.raises(kvwire.RequestError, match="layer 1 did not land"):
        await inc.layer(1)


@scenario()
async def test_r07_completion_message_is_lost_with_its_link(w: World) -> None:
    out, inc = w.begin()
    out.ready()
    await inc.layer(LAYERS - 1)
    # From here the producer hears nothing: not SEGMENT_ACK, and not the last word.
    w.freeze(w.push_side)
    out.finish()
    outcome = await inc
    assert outcome.complete
    w.cut()
    produced = await out
    assert produced.complete, "the last word is said again on another link"
    assert same(w.source, LIST, w.target, DEST)


@scenario()
async def test_r08_sender_fails_before_the_receiver_registers(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST)
    out.abort("prefill failed")
    await out
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    outcome = await inc
    assert "prefill failed" in outcome.missing["kv", DEST[0]]


@scenario()
async def test_r09_peer_dies_during_the_handshake(w: World) -> None:
    tasks = [asyncio.create_task(w.d.connect(w.address)) for _ in range(4)]
    await asyncio.sleep(0)
    w.p.abort()
    await w.p.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    documented = (kvwire.KVWireError, OSError)
    for end in ended:
        if isinstance(end, kvwire.Connection):
            await end.wait_closed()
        else:
            assert isinstance(end, documented), end


@scenario()
async def test_r10_peer_dies_in_mid_transfer(w: World) -> None:
    out, inc = w.begin(theirs={"lease_s": 0.1})
    out.ready(layers=slice(0, 2))
    await inc.layer(1)
    w.p.abort()
    await w.p.close()
    outcome = await inc
    assert not outcome.complete
    assert outcome.usable_prefix == 0
    assert outcome.missing.layers(("kv", DEST[0])) == (2, 3)
    await inc.drained()
    # What had landed is still right.
    assert same(w.source, LIST, w.target, DEST, layers=range(2))
