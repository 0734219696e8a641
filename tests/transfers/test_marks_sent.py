"""Marks on their way: order, interleaving, grouping, cutting, and nothing twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, ValuesView
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvwire
from kvwire.kv.plan import Segment
from kvwire.limits import CHUNK_BYTES, GIB, MIB, SEGMENT_BYTES
from kvwire.proto.chunks import Chunk
from kvwire.proto.records import RequestRecord, SegmentRecord
from kvwire.proto.transfers import Transfers
from kvwire.transfers import outgoing as delivery_module
from kvwire.transfers.incoming import SEGMENT_BYTES_MAX
from tests.support import inside
from tests.support.caches import BLOCKS, LARGE, LAYERS, Memory, same
from tests.support.depth import examples
from tests.support.world import DEST, LIST, World, scenario


@contextmanager
def chunks_of(connection: kvwire.Connection) -> Iterator[list[Chunk]]:
    """The chunks that one end of a connection sends, in their order."""
    sent: list[Chunk] = []
    core: Any = inside.core(connection)
    following: Callable[[], Chunk | None] = core.next_chunk

    def noted() -> Chunk | None:
        chunk = following()
        if chunk is not None:
            sent.append(chunk)
        return chunk

    core.next_chunk = noted
    yield sent
    core.next_chunk = following


async def on_another_link(w: World, inc: kvwire.Incoming, before: object) -> None:
    await w.until(lambda: inside.carrier(inc) is not before)


def sent_boxes(out: kvwire.Outgoing) -> ValuesView[Segment]:
    """What is sent to its consumer, and not acknowledged; it changes with that."""
    return inside.sent(out).values()


@scenario()
async def test_a_long_transfer_does_not_delay_a_short_one(w: World) -> None:
    """Chunks between are counted, and not time: at most one of the long one's each."""
    w.source, w.target = Memory(LARGE, 64), Memory(LARGE, 64)
    w.source.stamp(range(64))
    assert w.source.nbytes == 256 * MIB
    long = w.p.publish("long", w.source.cache, range(64))
    short_source, short_target = Memory(LARGE, 1), Memory(LARGE, 1)
    short_source.stamp([0])
    short = w.p.publish("short", short_source.cache, [0])
    received = w.pull_side.pull("long", w.target.cache, range(64))
    quick = w.pull_side.pull("short", short_target.cache, [0])
    await w.until(lambda: inside.planned(received) and inside.planned(quick))
    with chunks_of(w.push_side) as sent:
        long.ready()
        await w.turns_until(lambda: len(sent) >= 4)
        marked_at = len(sent)
        short.ready()
        await quick.layer(LAYERS - 1)
        behind = sent[marked_at:]
        mine = inside.legs(short)[0].core
        places = [n for n, chunk in enumerate(behind) if chunk.request is mine]
        assert len(places) == LARGE.block_bytes // CHUNK_BYTES == 4
        # Each takes its turn: one chunk of the long one between two of the short.
        assert places[-1] <= places[0] + 2 * (len(places) - 1)
        # What was handed to the link before is all that lies in front of it.
        assert places[0] <= 8
    assert same(short_source, [0], short_target, [0])
    long.abort()
    short.abort()


@scenario("inproc")
async def test_a_higher_priority_goes_first(w: World) -> None:
    w.source, w.target = Memory(LARGE, 16), Memory(LARGE, 16)
    low = w.p.publish("low", w.source.cache, range(8), priority=1)
    high = w.p.publish("high", w.source.cache, range(8, 16), priority=200)
    incoming = [
        w.pull_side.pull("low", w.target.cache, range(8)),
        w.pull_side.pull("high", w.target.cache, range(8, 16)),
    ]
    await w.until(lambda: all(inside.planned(inc) for inc in incoming))
    urgent = inside.legs(high)[0].core
    with chunks_of(w.push_side) as sent:
        low.ready()
        high.ready()
        low.finish()
        high.finish()
        await incoming[1]
        order = [chunk.request is urgent for chunk in sent]
    # Nothing of the low one once the high one has begun.
    first = order.index(True)
    count = 8 * LARGE.block_bytes // CHUNK_BYTES
    assert order[first : first + count] == [True] * count
    assert all([(await inc).complete for inc in incoming])


@pytest.mark.parametrize("cut", [False, True])
@scenario()
async def test_a_large_transfer_goes_to_the_link_in_parts(
    w: World, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Else either side would look up where all of its fragments lie at once."""
    monkeypatch.setattr(delivery_module, "AHEAD_BYTES", 2 * SEGMENT_BYTES)
    sending: list[int] = []
    mark = Transfers.mark

    def noted(self: Transfers, request: RequestRecord, *rest: Any) -> SegmentRecord:
        marked = mark(self, request, *rest)
        sending.append(self.records[request].sending_bytes)
        return marked

    monkeypatch.setattr(Transfers, "mark", noted)
    out, inc = w.begin_large(32)
    out.ready()
    out.finish()
    await inc.layer(0)
    assert len(sending) < w.source.nbytes // SEGMENT_BYTES
    if cut:
        before = inside.carrier(inc)
        w.cut()
        await on_another_link(w, inc, before)
    assert (await inc).complete
    assert (await out).complete
    assert max(sending) < 2 * SEGMENT_BYTES + SEGMENT_BYTES_MAX
    assert same(w.source, range(32), w.target, range(32))


@scenario("inproc")
async def test_segments_of_one_transfer_land_in_the_order_of_their_marks(
    w: World,
) -> None:
    """So the first layer can be read while the others come."""
    out, inc = w.begin_large(16)
    await w.until(lambda: inside.planned(inc))
    boxes = sent_boxes(out)
    out.ready()
    out.finish()
    for layer in range(LAYERS):
        await inc.layer(layer)
        assert not any(inc.layer_landed(n) for n in range(layer + 2, LAYERS))
    assert (await inc).complete
    # One mark of all layers, cut into layers: they are larger than a segment.
    assert [s.layers for s in boxes] == [1] * LAYERS


@scenario("inproc")
async def test_small_layers_are_grouped_behind_one_under_way(w: World) -> None:
    out, inc = w.begin()
    await w.until(lambda: inside.planned(inc))
    for layer in range(LAYERS):
        out.ready(layers=layer)
    out.finish()
    for outcome in (await inc, await out):
        assert outcome.complete
        assert outcome.layers_grouped == LAYERS, "the choice can be seen"
    # One by one, each goes at once: there is nothing to wait behind.
    out = w.p.publish("u", w.source.cache, LIST)
    inc = w.pull_side.pull("u", w.target.cache, DEST)
    for layer in range(LAYERS):
        out.ready(layers=layer)
        await inc.layer(layer)
        await w.until(lambda: not inside.under_way(out))
    out.finish()
    assert (await inc).layers_grouped == 1


@scenario()
async def test_group_bytes_of_one_is_layer_by_layer(w: World) -> None:
    out, inc = w.begin({"group_bytes": 1})
    await w.until(lambda: inside.planned(inc))
    boxes = sent_boxes(out)
    for layer in range(LAYERS):
        out.ready(layers=layer)
    out.finish()
    assert (await inc).layers_grouped == 1
    assert (await out).layers_grouped == 1
    assert [s.layers for s in boxes] == [1] * LAYERS
    with pytest.raises(kvwire.UsageError, match="group_bytes=0"):
        w.p.publish("u", w.source.cache, LIST, group_bytes=0)


@scenario("inproc")
async def test_marks_are_grouped_only_with_their_neighbours(w: World) -> None:
    """Of the same blocks, and one layer after the other."""
    out, inc = w.begin()
    await w.until(lambda: inside.planned(inc))
    boxes = sent_boxes(out)
    for layers, blocks in (
        (3, slice(0, 2)),
        (0, slice(0, 2)),
        (1, slice(0, 2)),
        (2, slice(2, 5)),
        (3, slice(2, 5)),
    ):
        out.ready(layers, blocks)
    out.finish(partial=True)
    outcome = await inc
    assert list(boxes) == [
        Segment(0, 3, 1, 0, 2),
        Segment(0, 0, 2, 0, 2),
        Segment(0, 2, 2, 2, 3),
    ]
    assert outcome.missing.layers(("kv", DEST[0])) == (2,)
    assert outcome.missing.layers(("kv", DEST[4])) == (0, 1)


@scenario("inproc")
async def test_a_cross_layer_cache_is_cut_into_blocks(w: World) -> None:
    """The layers of a block lie together there, and stay so."""
    shape = (BLOCKS, LAYERS, 2, 64, 16, 128)
    caches = []
    for fill in (1.0, 0.0):
        tensor = np.full(shape, fill, np.float32)
        caches.append((tensor, kvwire.PagedCache(LARGE, tensor)))
    out = w.p.publish("t", caches[0][1], range(BLOCKS))
    inc = w.pull_side.pull("t", caches[1][1], range(BLOCKS))
    await w.until(lambda: inside.planned(inc))
    boxes = sent_boxes(out)
    out.ready()
    out.finish()
    assert (await inc).complete
    assert {s.layers for s in boxes} == {LAYERS}
    assert len(boxes) == BLOCKS * LARGE.block_bytes // SEGMENT_BYTES
    assert (caches[1][0] == 1.0).all()


@given(
    unit=st.integers(1, 40 * MIB),
    layers=st.integers(1, 130),
    granules=st.integers(1, 70_000),
    by_block=st.booleans(),
)
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_no_piece_is_longer_than_a_consumer_takes(
    unit: int, layers: int, granules: int, by_block: bool
) -> None:
    """Whatever the cache is; a granule cannot be cut."""
    assume(unit * layers * granules <= 64 * GIB)

    def nbytes_of(segment: Segment) -> int:
        return segment.layers * segment.granules * unit

    order = ("block", "layer") if by_block else ("layer", "block")
    walk = SimpleNamespace(order=order)
    delivery: Any = delivery_module.SendFlow.__new__(delivery_module.SendFlow)
    plan = SimpleNamespace(groups=[walk], nbytes_of=nbytes_of)
    delivery._leg = SimpleNamespace(plan=plan)
    delivery._pieces = deque()
    whole = Segment(0, 3, layers, 0, granules)
    delivery._cut(whole, nbytes_of(whole))
    assert sum(nbytes for _, nbytes in delivery._pieces) == nbytes_of(whole)
    for piece, nbytes in delivery._pieces:
        assert nbytes == nbytes_of(piece)
        assert piece.granules == 1 or nbytes_of(piece) <= SEGMENT_BYTES_MAX


@pytest.mark.parametrize("cuts", [1, 2])
@scenario()
async def test_what_has_landed_is_not_sent_again(
    w: World, monkeypatch: pytest.MonkeyPatch, cuts: int
) -> None:
    """Payload bytes are counted, over all links."""
    out, inc = w.begin_large(8)
    moved: deque[int] = deque()
    mark = Transfers.mark

    def counted(self: Transfers, *marked: Any) -> SegmentRecord:
        moved.append(marked[2])
        return mark(self, *marked)

    monkeypatch.setattr(Transfers, "mark", counted)
    for layer in range(cuts):
        out.ready(layers=layer)
        await inc.layer(layer)
        await w.until(lambda: not inside.under_way(out))
        before = inside.carrier(inc)
        w.cut()
        await on_another_link(w, inc, before)
    out.ready(layers=slice(cuts, None))
    out.finish()
    outcome = await inc
    assert outcome.complete
    assert (await out).complete
    assert sum(moved) == w.source.nbytes == outcome.nbytes
    assert same(w.source, range(8), w.target, range(8))


@scenario("inproc")
async def test_chunks_of_a_segment_that_was_cut_are_not_sent_again(w: World) -> None:
    """Half of a segment of 8 MiB was here when its link was lost."""
    out, inc = w.begin_large(8)
    await w.until(lambda: inside.planned(inc))
    out.ready(layers=0)

    def half() -> bool:
        receipt = inside.leg(inc)
        assert receipt is not None
        if receipt.core is None:
            return False
        core = receipt.link.transfers.records[receipt.core]
        segments: list[SegmentRecord] = list(core.segments.values())
        return bool(segments) and segments[0].moved >= 4 * MIB

    await w.turns_until(half)
    before = inside.carrier(inc)
    w.cut()
    await w.until(lambda: inside.carrier(inc) is not before and inc._reported)
    await inc.layer(0)
    again = sum(inside.legs(out)[0].plan.nbytes_of(s) for s in sent_boxes(out))
    assert again <= 4 * MIB
    assert same(w.source, range(8), w.target, range(8), layers=[0])
    out.abort()


@scenario("inproc")
async def test_more_segments_than_a_transfer_may_have(
    w: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transfer ends on both sides with a reason; its connection goes on."""
    monkeypatch.setattr(delivery_module, "SEGMENTS_MAX", 3)
    out, inc = w.begin({"group_bytes": 1})
    for layer in range(LAYERS):
        out.ready(layers=layer)
    for end in (out, inc):
        outcome = await end
        (reason,) = set(outcome.missing.values())
        assert "more than 3 segments" in reason
    monkeypatch.undo()
    assert await w.moves("u", [6, 7], [20, 21])


@scenario("inproc")
async def test_damage_is_named_on_both_sides(w: World) -> None:
    """Blocks that came damaged say so; those that were not marked say that."""
    out, inc = w.begin({"group_bytes": 1})
    await w.until(lambda: inside.planned(inc))
    core: Any = inside.core(w.pull_side)
    received = core.body_received

    def damaging(arrival: Any, now: float, **more: Any) -> None:
        if arrival.header.segment == 2:
            more["intact"] = False
        received(arrival, now, **more)

    core.body_received = damaging
    out.ready(blocks=0)
    out.ready(blocks=slice(1, 3))
    out.ready(blocks=3)
    out.finish(partial=True)
    for end, blocks in ((inc, DEST), (out, LIST)):
        outcome = await end
        assert set(outcome.landed) == {("kv", blocks[0]), ("kv", blocks[3])}
        reasons = [outcome.missing["kv", blocks[n]] for n in (1, 2, 4)]
        assert reasons[:2] == ["its bytes arrived damaged"] * 2
        assert reasons[2] == "it was not marked ready by the producer"
        assert outcome.usable_prefix == 1


# --- what the consumer has ------------------------------------------------------------


@pytest.mark.parametrize("agreed", [False, True])
@scenario("inproc", resume=False)
async def test_what_the_consumer_had_counts_once_it_knows_of_us(
    w: World, agreed: bool
) -> None:
    """The producer lists no block as landed that the consumer does not."""
    hashes = [b"%d" % n for n in range(len(LIST))]
    out = w.p.publish("t", w.source.cache, LIST, hashes=hashes)
    if not agreed:
        w.freeze(w.pull_side)
    inc = w.pull_side.pull("t", w.target.cache, DEST, hashes=hashes, have=hashes[:2])
    await w.until(lambda: inside.legs(out) and inside.legs(out)[0].planned)
    if agreed:
        out.ready(layers=0)
        await inc.layer(0)
        await w.until(lambda: not inside.under_way(out))
    w.cut()
    produced, consumed = await out, await inc
    assert not produced.complete
    positions = {LIST.index(block) for _, block in produced.landed}
    assert positions == {DEST.index(block) for _, block in consumed.landed}
    assert positions == ({0, 1} if agreed else set())
    assert produced.usable_prefix == consumed.usable_prefix == 2 * agreed
