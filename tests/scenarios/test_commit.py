"""R22, R25 to R27, R45: what is marked, in which order, and what closes a transfer."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

import kvwire
from kvwire.limits import TRANSFERS_WAITING_MAX
from tests.scenarios.world import DEST, LIST, World, scenario
from tests.support import inside
from tests.support.caches import LAYERS, same


@scenario()
async def test_r22_a_layer_without_a_hook(w: World) -> None:
    out, inc = w.begin()
    for layer in (0, 1, 3):
        out.ready(layers=layer)
    await inc.layer(3)
    with pytest.raises(kvwire.UsageError, match="layer 2 of block position 0"):
        out.finish()
    assert not inc.done(), "nothing was committed"
    assert not inc.layer_landed(2)
    out.ready(layers=2)
    out.finish()
    assert (await inc).complete


@scenario()
async def test_r25_a_commit_that_overtakes_the_data(w: World) -> None:
    out, inc = w.begin_large(8)
    await w.until(lambda: inside.planned(inc))
    out.ready()
    out.finish()

    def committed() -> bool:
        receipt = inside.leg(inc)
        assert receipt is not None
        if receipt.core is None:
            return True
        return receipt.link.transfers.records[receipt.core].committed

    await w.turns_until(committed)
    assert not inc.done(), "the commit is here, and most of the data is not"
    assert not inc.layer_landed(LAYERS - 1)
    assert (await inc).complete
    assert same(w.source, range(8), w.target, range(8))


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("first", ["producer", "consumer"])
@scenario()
async def test_r26_either_side_comes_first(w: World, push: bool, first: str) -> None:
    def produce() -> kvwire.Outgoing:
        out = w.produce("t", LIST, push=push)
        # All of it, whether the consumer is there or not.
        out.ready()
        out.finish()
        return out

    if first == "producer":
        out = produce()
        assert await w.stays_open(out, 0.02)
        inc = w.consume("t", DEST, push=push)
    else:
        inc = w.consume("t", DEST, push=push)
        assert await w.stays_open(inc, 0.02)
        out = produce()
    assert (await inc).complete
    assert (await out).complete
    assert same(w.source, LIST, w.target, DEST)


@scenario()
async def test_r26_what_waits_for_its_counterpart_is_bounded(w: World) -> None:
    waiting = [
        w.pull_side.pull(number, w.target.cache, [number % 32])
        for number in range(TRANSFERS_WAITING_MAX)
    ]
    with pytest.raises(kvwire.UsageError, match="wait for this peer's answer"):
        w.pull_side.pull("one more", w.target.cache, [0])
    # What is refused here costs nobody else anything.
    assert not w.pull_side.closed
    waiting[0].abort("not needed")
    await waiting[0]
    assert await w.moves("another", [6, 7], [20, 21])
    for inc in waiting:
        inc.abort("not needed")


@pytest.mark.rule("KVW-TR-09", "KVW-TR-11", "keeps")
@scenario()
async def test_r27_two_forwards_mark_the_same_part(w: World) -> None:
    out, inc = w.begin()
    refused: list[int] = []
    begin = threading.Barrier(2)

    def forward() -> None:
        begin.wait()
        for layer in range(LAYERS):
            for chunk in (slice(0, 2), slice(2, 5)):
                try:
                    out.ready(layers=layer, blocks=chunk)
                except kvwire.UsageError:
                    refused.append(layer)

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 2 * LAYERS, "each part is marked by exactly one"
    out.finish()
    assert (await inc).complete
    assert same(w.source, LIST, w.target, DEST)


@scenario()
async def test_r45_a_layer_fails_and_the_last_one_succeeds(w: World) -> None:
    out, inc = w.begin()
    kernel: Future[None] = Future()
    for layer in (0, 1, 3):
        out.ready(layers=layer)
    out.ready(layers=2, after=kernel)
    await inc.layer(3)
    # SEGMENT_ACK may come later than the layer.
    await w.until(lambda: out._progress.landed == LAYERS - 1)
    out.finish()
    kernel.set_exception(ValueError("the kernel failed"))
    for end, blocks in ((inc, DEST), (out, LIST)):
        outcome = await end
        assert not outcome.complete
        assert outcome.usable_prefix == 0
        for block in blocks:
            assert "the kernel failed" in outcome.missing["kv", block]
            assert outcome.missing.layers(("kv", block)) == (2,)
    assert all((t[DEST] == -1.0).all() for t in w.target.tensors[2:3])
