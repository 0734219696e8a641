"""Transfers with a codec: the promises of any transfer, for encoded blocks."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.kv.coded_cache import CodedCache
from kvwire.kv.row_codec import ROW_CODECS, TransferCodec, row_codec
from tests.support import inside
from tests.support.caches import BLOCKS, FREE, LAYERS, RANKS, SPEC, Memory
from tests.support.simulated_device import SimulatedDevice
from tests.support.world import DEST, LIST, World, scenario

INT8: dict[str, Any] = {"codec": "int8"}


def coded(tensor: np.ndarray, codec: TransferCodec = "int8") -> np.ndarray:
    """What a codec makes of a tensor's rows."""
    rows = tensor.reshape(-1, tensor.shape[-1]).copy()
    encoded = np.empty((len(rows), row_codec(codec).row_bytes(rows.shape[1])), np.uint8)
    row_codec(codec).encode(rows, encoded)
    return row_codec(codec).decode(encoded, tensor.shape[-1]).reshape(tensor.shape)


def landed(
    w: World, layer: int, codec: TransferCodec = "int8", positions: slice = slice(None)
) -> bool:
    """Whether these positions of a layer hold what the codec made of the source's."""
    came = w.target.tensors[layer][DEST[positions]]
    return bool((came == coded(w.source.tensors[layer][LIST[positions]], codec)).all())


async def both(out: kvwire.Outgoing, inc: kvwire.Incoming) -> list[kvwire.Outcome]:
    outcomes = [await out, await inc]
    await asyncio.gather(out.drained(), inc.drained())
    return outcomes


@pytest.mark.parametrize("codec", ROW_CODECS)
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@scenario("tcp")
async def test_layer_by_layer(w: World, codec: TransferCodec, push: bool) -> None:
    out, inc = w.begin({"codec": codec}, {"codec": codec}, push=push)
    for layer in range(LAYERS):
        out.ready(layer)
        await inc.layer(layer)
        assert landed(w, layer, codec)
    out.finish()
    sent, came = await both(out, inc)
    row_bytes = ROW_CODECS[codec].row_bytes(SPEC.head_dim)
    assert sent.complete
    assert came.complete
    assert sent.nbytes == came.nbytes
    assert came.nbytes * SPEC.head_dim * 4 == row_bytes * SPEC.block_bytes * len(LIST)
    assert set(came.landed) == {("kv", block) for block in DEST}
    assert set(sent.landed) == {("kv", block) for block in LIST}


@scenario("tcp")
async def test_a_growing_transfer_marked_behind_a_future(w: World) -> None:
    tokens = len(LIST) * SPEC.block_tokens
    source = w.source.cache
    out = w.p.publish("t", source, LIST[:2], tokens=tokens, growing=True, **INT8)
    inc = w.pull_side.pull("t", w.target.cache, DEST, tokens=tokens, **INT8)
    out.ready(blocks=slice(0, 2))
    with pytest.raises(kvwire.UsageError, match="group 'kv' is already listed"):
        out.extend([1])
    out.extend(LIST[2:])
    computed = asyncio.get_running_loop().create_future()
    out.ready(blocks=slice(2, 5), after=computed)
    out.finish()
    assert await w.stays_open(inc, 0.05)
    w.source.stamp(LIST[2:], salt=1)  # nothing has read them yet
    computed.set_result(None)
    outcomes = await both(out, inc)
    assert all(outcome.complete for outcome in outcomes)
    assert all(landed(w, layer) for layer in range(LAYERS))


@scenario("tcp")
async def test_what_the_consumer_has_is_left_alone(w: World) -> None:
    hashes = [b"%d" % n for n in range(len(LIST))]
    out = w.p.publish("t", w.source.cache, LIST, hashes=hashes, **INT8)
    inc = w.pull_side.pull(
        "t", w.target.cache, DEST, hashes=hashes, have=hashes[1:3], **INT8
    )
    out.ready()
    out.finish()
    _, came = await both(out, inc)
    assert came.complete
    assert w.target.free(DEST[1:3])
    for layer in range(LAYERS):
        assert landed(w, layer, positions=slice(0, 1))
        assert landed(w, layer, positions=slice(3, 5))


@pytest.mark.parametrize("other", [None, "fp8"])
@scenario("tcp")
async def test_two_sides_that_have_not_agreed(
    w: World, other: TransferCodec | None
) -> None:
    out, inc = w.begin(INT8, {"codec": other})
    for outcome in await both(out, inc):
        (reason,) = outcome.missing.reasons
        assert re.search(r"differs in fingerprint.*codec=int8 of float32", reason)
    assert w.target.free(DEST)


@scenario("tcp")
async def test_an_exact_part_of_a_transfer_that_was_not_finished(w: World) -> None:
    out, inc = w.begin(INT8, INT8)
    out.ready(layers=slice(0, 2))
    out.ready(layers=2, blocks=slice(0, 3))
    out.finish(partial=True)
    for outcome, ids in zip(await both(out, inc), (LIST, DEST), strict=True):
        assert outcome.state == "partial"
        assert [outcome.missing.layers(("kv", block)) for block in ids] == [
            *[(3,)] * 3,
            *[(2, 3)] * 2,
        ]
    assert landed(w, 2, positions=slice(0, 3))
    assert (w.target.tensors[2][DEST[3:]] == FREE).all()
    assert (w.target.tensors[3] == FREE).all()
    with pytest.raises(kvwire.PeerCancelled, match="layer 2 did not land"):
        await inc.layer(2)


@scenario("tcp")
async def test_it_goes_on_over_another_link(w: World) -> None:
    out, inc = w.begin(INT8, INT8)
    out.ready(layers=slice(0, 2))
    await inc.layer(1)
    w.cut()
    out.ready(layers=slice(2, 4))
    out.finish()
    outcomes = await both(out, inc)
    assert all(outcome.complete for outcome in outcomes)
    assert all(landed(w, layer) for layer in range(LAYERS))


class Gate:
    """Stops the threads that encode or decode, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.error: Exception | None = None
        real = getattr(CodedCache, verb)

        def gated(cache: CodedCache, *arguments: Any) -> None:
            self.reached.set()
            self._open.wait(20)
            if self.error is not None:
                raise self.error
            real(cache, *arguments)

        monkeypatch.setattr(CodedCache, verb, gated)

    def open(self, error: Exception | None = None) -> None:
        """Let them go on, or fail."""
        self.error = error
        self._open.set()


@scenario("tcp")
async def test_a_thread_that_reads_blocks_keeps_them(w: World) -> None:
    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, "encode")
        out, inc = w.begin(INT8, INT8)
        out.ready()
        await w.until(gate.reached.is_set)
        out.abort("prefill broke")
        assert (await out).state == "failed"
        assert (await inc).state == "failed"
        assert not await w.stays_open(out, 0.02)
        assert not out.is_drained
        gate.open()
        await out.drained()
    assert w.target.free(DEST)
    held = weakref.ref(out)
    del out, inc
    try:
        await w.until(lambda: held() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["deadline", "abort", "close", "settled", "cut"])
@scenario("tcp")
async def test_an_outcome_waits_for_a_thread_that_writes_blocks(
    w: World, end: str
) -> None:
    """However it ends, nothing is written once the outcome is known."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, "decode")
        out, inc = w.begin(INT8, INT8)
        out.ready()
        if end in ("settled", "cut"):
            out.finish()
        await w.until(gate.reached.is_set)
        closing = asyncio.create_task(w.d.close()) if end == "close" else None
        if end == "cut":
            w.cut()
        if end == "abort":
            inc.abort("the user left")
        if end == "deadline":
            inc._expired()
        assert await w.stays_open(inc, 0.05)
        assert not inc.is_drained
        gate.open()
        outcome = await inc
        after = [tensor.copy() for tensor in w.target.tensors]
        await inc.drained()
        if closing is not None:
            await closing
        await inside.services(w.d).codec_threads.close()  # nothing runs there any more
        assert all(map(np.array_equal, after, w.target.tensors))
    for position, block in enumerate(DEST):
        here = slice(position, position + 1)
        lost = outcome.missing.layers(("kv", block)) if outcome.missing else ()
        for layer in set(range(LAYERS)) - set(lost):
            assert landed(w, layer, positions=here)
    if end in ("settled", "cut"):
        assert outcome.complete
        assert (await out).complete


@pytest.mark.parametrize("verb", ["encode", "decode"])
@scenario("tcp")
async def test_what_could_not_be_coded_has_not_landed(w: World, verb: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, verb)
        gate.open(MemoryError("no room for a piece"))
        out, inc = w.begin(INT8, INT8)
        out.ready()
        out.finish()
        outcome = await inc
        await asyncio.gather(out.drained(), inc.drained())
    assert outcome.state == "failed"
    assert "no room for a piece" in str(outcome.missing.reasons)
    assert w.target.free(DEST)


@scenario("tcp")
async def test_each_rank_encodes_its_heads(w: World) -> None:
    parts = []
    for rank, spec in enumerate(RANKS):
        heads = [tensor[:, :, :, rank : rank + 1] for tensor in w.source.tensors]
        out = w.p.publish(f"t{rank}", kvwire.PagedCache(spec, heads), LIST, **INT8)
        out.ready()
        out.finish()
        parts.append(w.pull_side.pull(f"t{rank}", w.target.cache, DEST, **INT8))
    joined = kvwire.join(*parts)
    for layer in range(LAYERS):
        await joined.layer(layer)
        assert landed(w, layer)
    assert (await joined).complete


@scenario("tcp")
async def test_caches_on_a_device(w: World, device: SimulatedDevice) -> None:
    """Whatever runs on the device's default stream, which all threads have in common.

    What writes the blocks is what a mark waits for.
    """
    default, gate = device.stream(), threading.Event()
    default.call(partial(_pass, gate))
    device.record_current = default.record  # type: ignore[method-assign]
    try:
        ends = [[device.array(t) for t in m.tensors] for m in (w.source, w.target)]
        caches = [kvwire.PagedCache(SPEC, arrays) for arrays in ends]
        out = w.p.publish("t", caches[0], LIST, **INT8)
        inc = w.pull_side.pull("t", caches[1], DEST, **INT8)
        out.ready()
        out.finish()
        await inc.layer(0)
        assert inc.layer_event(0) is not None
        outcomes = await both(out, inc)
        assert all(outcome.complete for outcome in outcomes)
        for layer in range(LAYERS):
            w.target.tensors[layer][:] = ends[1][layer].read()
            assert landed(w, layer)
    finally:
        gate.set()
        default.close()
        await w.d.close()
        await w.p.close()


def _pass(gate: threading.Event) -> None:
    gate.wait()


@pytest.mark.parametrize("produces", [True, False], ids=["producer", "consumer"])
@scenario("tcp")
async def test_a_failed_device_keeps_its_memory(
    w: World, device: SimulatedDevice, produces: bool
) -> None:
    """It proves nothing any more, so its blocks are never said to be free."""
    try:
        memory = w.source if produces else w.target
        cache = kvwire.PagedCache(SPEC, [device.array(t) for t in memory.tensors])
        caches = [cache, w.target.cache] if produces else [w.source.cache, cache]
        out = w.p.publish("t", caches[0], LIST, **INT8)
        inc = w.pull_side.pull("t", caches[1], DEST, **INT8)
        await w.until(lambda: inc.met)
        device.fail("it fell off the bus")
        out.ready()
        out.finish()
        assert "it fell off the bus" in str((await inc).missing)
        failed, other = (out, inc) if produces else (inc, out)
        await failed
        await other.drained()
    finally:
        await w.d.close()
        await w.p.close()
    assert not failed.is_drained


@scenario("tcp")
async def test_a_codec_that_there_is_not(w: World) -> None:
    with pytest.raises(kvwire.UsageError, match="fp8, int8, int4"):
        w.p.publish("t", w.source.cache, LIST, codec="zstd-planes")  # type: ignore[arg-type]
    read_only = Memory(SPEC, BLOCKS)
    for tensor in read_only.tensors:
        tensor.flags.writeable = False
    cache = kvwire.PagedCache(SPEC, read_only.tensors)
    with pytest.raises(kvwire.UsageError, match="read-only"):
        w.pull_side.pull("t", cache, DEST, **INT8)
