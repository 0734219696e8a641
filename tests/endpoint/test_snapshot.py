"""What a snapshot shows, and what is said to wait for what."""

from __future__ import annotations

import dataclasses

import msgspec

import kvwire
import kvwire_store
from kvwire.endpoint.snapshot import SILENCE_S
from kvwire.engine.io_thread import called
from kvwire.limits import SNAPSHOT_ROWS_MAX
from tests.scenarios.world import World, scenario
from tests.support import inside, virtual_time
from tests.support.caches import LAYERS, Memory

LIST, DEST = [1, 2, 3], [11, 12, 13]


@scenario("inproc")
async def test_what_a_transfer_waits_for_at_each_step(w: World) -> None:
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    (early,) = w.d.transfers()
    assert (early.side, early.layers, early.nbytes) == ("incoming", 0, 0)
    assert early.waits_for == "the peer 'prefill' has not published it"
    await w.until(lambda: w.p.snapshot().asked)
    assert w.p.snapshot().asked == ("t",)
    out = w.p.publish("t", w.source.cache, LIST)
    out.ready(layers=0)
    await inc.layer(0)
    (here,) = w.d.transfers()
    assert here.peers == ("prefill",)
    assert (here.layers, here.layers_marked, here.layers_landed) == (LAYERS, 1, 1)
    assert here.landed_bytes * LAYERS == here.nbytes > 0
    assert here.waits_for.endswith(f"it has marked 1 of {LAYERS} layers")
    assert "1 of 4 layers landed" in repr(inc)
    await w.until(lambda: w.p.transfers()[0].layers_landed)
    (there,) = w.p.transfers()
    assert (there.side, there.id, there.nbytes) == ("outgoing", "t", here.nbytes)
    assert (there.layers_marked, there.layers_landed) == (1, 1)
    assert there.waits_for.endswith(f"1 of {LAYERS} layers are marked")
    out.ready(layers=slice(1, LAYERS))
    await inc.layer(LAYERS - 1)
    assert w.d.transfers()[0].waits_for.endswith("the producer has not committed")
    out.finish()
    outcome = await inc
    assert (await out).nbytes == outcome.nbytes == here.nbytes
    assert not w.d.transfers() + w.p.transfers()
    assert repr(inc) == "<Incoming 't' with 'prefill', over: complete>"


@scenario("inproc")
async def test_a_producer_says_who_has_not_taken_it(w: World) -> None:
    gate = inside.services(w.p).loop.create_future()
    out = w.p.publish("t", w.source.cache, LIST)
    assert w.p.transfers()[0].waits_for == "0 of 1 consumers have pulled it"
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    out.ready(after=gate)
    out.finish()
    await w.until(lambda: w.p.transfers()[0].peers)
    assert "an event" in w.p.transfers()[0].waits_for
    gate.set_result(None)
    await w.until(lambda: not w.p.transfers() or "decode" in repr(out))
    await inc
    await out


@scenario("inproc")
async def test_a_silent_peer_is_named(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    thaw = w.freeze(w.push_side)
    await virtual_time.pass_time(3.0)
    (stuck,) = w.d.transfers()
    assert "prefill is silent for" in stuck.waits_for
    (connection,) = w.d.snapshot().connections
    assert connection.silent_s >= SILENCE_S
    assert f"last frame {connection.silent_s:.1f} s ago" in repr(w.pull_side)
    thaw()
    out.abort()
    inc.abort()


@scenario("inproc")
async def test_a_snapshot_is_json_and_its_rows_are_bounded(w: World) -> None:
    cache = w.source.cache
    outs = [w.p.publish(i, cache, LIST) for i in range(SNAPSHOT_ROWS_MAX)]
    outs.append(w.p.publish(b"\xff", cache, LIST))
    request = w.pull_side.send(7, bytes(10))
    await w.until(lambda: w.push_side.unreceived)
    taken = w.p.snapshot()
    assert taken.open_transfers == len(taken.transfers) + 1 == len(outs)
    (connection,) = taken.connections
    assert (connection.peer, connection.unreceived) == ("decode", 1)
    assert (connection.transport, connection.state) == ("inproc", "open")
    text = msgspec.json.encode(taken)
    assert msgspec.json.decode(text, type=kvwire.Snapshot) == taken
    assert msgspec.to_builtins(taken).keys() == dataclasses.asdict(taken).keys()
    assert w.p.transfers()[-1].id == "ff"
    for out in outs:
        out.abort()
    await request


@scenario("inproc")
async def test_requests_say_what_they_wait_for(w: World) -> None:
    receive = w.pull_side.recv(7)
    assert "recv of tag 7, with 'prefill', waits for a message" in repr(receive)
    large = w.pull_side.send(8, bytes(2**20))
    assert "send of tag 8, with 'prefill', waits for the peer" in repr(large)
    region = w.d.register(bytearray(8), "write")
    put = w.push_side.put(bytes(8), region.grant(w.pull_side))
    assert "put with 'decode', 8 of 8 bytes moved" in repr(put)
    await put
    assert repr(put) == "<Request done>"
    receive.cancel()
    assert repr(receive).startswith("<Request failed: ")
    deferred = w.d.peer(str(w.address)).recv(9)
    assert "waits for a connection to peer" in repr(deferred)
    large.cancel()
    deferred.cancel()
    await region.close()


async def test_stores_of_the_loop_are_in_it() -> None:
    cache = Memory().cache
    async with (
        kvwire.open(name="a") as communicator,
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
    ):
        put = store.put([b"one", b"two"], cache, [0, 1])
        named = {s.name: s for s in communicator.snapshot().parts}
        (call,) = named[store.name].calls
        assert call.text == "put of 2 blocks"
        await put
        named = {s.name: s for s in communicator.snapshot().parts}
        shown = named[store.name]
        assert (shown.calls, shown.trouble) == ((), {})
        assert shown.summary == "0 blocks pinned, 0 found, 0 not found"
        assert shown.counters["stored_blocks"] == 2


def test_an_engine_takes_one_too() -> None:
    with kvwire.Engine(name="engine") as engine:
        assert engine.run(called(engine.communicator.snapshot)).name == "engine"
