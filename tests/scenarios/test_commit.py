"""R26, R27, R45: what is marked, by whom, and what waits for its counterpart."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

import kvwire
from kvwire.limits import TRANSFERS_WAITING_MAX
from tests.support.caches import LAYERS, same
from tests.support.world import DEST, LIST, World, scenario


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
