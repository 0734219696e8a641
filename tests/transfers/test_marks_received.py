"""What a producer marks is compared with the consumer's plan; a hostile one loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvwire
from kvwire.kv.plan import Segment
from kvwire.proto.records import SegmentRecord, TransferRecord
from kvwire.proto.state import RequestKind
from kvwire.transfers import incoming as receipt_module
from kvwire.transfers.incoming import missing_chunks
from kvwire.wire.control import SegmentBody
from kvwire.wire.header import FrameType
from tests.support import inside
from tests.support.caches import LAYERS, SPEC, same
from tests.support.world import DEST, LIST, World, play, scenario

LAYER_BYTES = len(LIST) * SPEC.layer_block_bytes


class Hostile:
    """An agreed transfer, one end of which says what its core did not."""

    def __init__(self, w: World, out: kvwire.Outgoing, inc: kvwire.Incoming) -> None:
        self.w, self.out, self.inc = w, out, inc

    @classmethod
    async def of(cls, w: World) -> Hostile:
        out, inc = w.begin()
        await w.until(lambda: inside.planned(inc))
        return cls(w, out, inc)

    def say(self, frame_type: FrameType, body: Any, *, producer: bool = True) -> None:
        end = inside.legs(self.out)[0] if producer else inside.leg(self.inc)
        assert end is not None
        assert end.core is not None
        connection: Any = end.link
        outbox = connection.core.outbox
        outbox.send(frame_type, body, request=end.core.wire_id)
        connection.run()

    async def broken(self, rule: str, by: kvwire.Connection) -> None:
        """The connection ends, naming the rule, and the process lives."""
        await by.wait_closed()
        assert inside.core(by).error is not None
        assert rule in str(inside.core(by).error)
        self.inc.abort()
        self.out.abort()
        assert not (await self.inc).landed
        await self.inc.drained()
        assert self.w.target.free(range(32))
        self.w.pull_side = await self.w.d.connect(self.w.address)
        assert await self.w.moves("another", [6, 7], [20, 21])


def check_hostile(act: Callable[[Hostile], None], rule: str, *, consumer: bool) -> None:
    """One side acts against a rule; the other one refuses it by its id."""

    async def run(w: World) -> None:
        hostile = await Hostile.of(w)
        act(hostile)
        await hostile.broken(rule, w.pull_side if consumer else w.push_side)

    play(run, "inproc", resume=False)


@pytest.mark.rule("KVW-TR-12", "breaks")
def test_a_mark_of_too_much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer would lay out all of it in one turn of its loop."""
    nbytes = LAYERS * LAYER_BYTES
    monkeypatch.setattr(receipt_module, "SEGMENT_BYTES_MAX", nbytes - 1)

    def act(hostile: Hostile) -> None:
        hostile.say(FrameType.SEGMENT, SegmentBody(1, (0, 0, LAYERS, 0, 5), nbytes))

    check_hostile(act, "KVW-TR-12", consumer=True)


@pytest.mark.rule("KVW-TR-12", "keeps")
@scenario("inproc")
async def test_one_granule_may_be_marked_however_long_it_is(
    w: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can cut it: it is one block of both sides, or a part of one."""
    monkeypatch.setattr(receipt_module, "SEGMENT_BYTES_MAX", 1)
    hostile = await Hostile.of(w)
    hostile.say(FrameType.SEGMENT, SegmentBody(1, (0, 0, 4, 2, 1), SPEC.block_bytes))
    receipt = inside.leg(hostile.inc)
    assert receipt is not None
    flow: Any = receipt.flow
    await w.until(lambda: bool(flow._segments))
    assert not w.pull_side.closed
    hostile.inc.abort()
    hostile.out.abort()


@pytest.mark.rule("KVW-TR-11", "breaks")
@scenario("inproc")
async def test_a_mark_of_what_landed_on_an_earlier_link(w: World) -> None:
    """The consumer may be reading it."""
    hostile = await Hostile.of(w)
    hostile.out.ready(layers=0)
    await hostile.inc.layer(0)
    before = inside.carrier(hostile.inc)
    w.cut()
    await w.until(
        lambda: (
            inside.carrier(hostile.inc) is not before
            and inside.legs(hostile.out)[0].core is not None
        )
    )
    resumed = inside.leg(hostile.inc)
    assert resumed is not None
    hostile.say(FrameType.SEGMENT, SegmentBody(1, (0, 0, 1, 0, 5), LAYER_BYTES))
    connection: Any = resumed.link
    await connection.front.wait_closed()
    assert "KVW-TR-11" in str(connection.core.error)
    assert same(w.source, LIST, w.target, DEST, layers=[0])
    hostile.inc.abort()
    hostile.out.abort()


@pytest.mark.parametrize("description", [b"", b"\xc1", bytes(48 * 1024), b"\x90" * 99])
@pytest.mark.parametrize("kind", [RequestKind.OUTGOING, RequestKind.INCOMING])
@scenario("inproc")
async def test_a_description_that_is_none(
    w: World, kind: RequestKind, description: bytes
) -> None:
    """It fails its own transfer, by name, and the connection goes on."""
    waits = w.p.publish("t", w.source.cache, LIST)
    expects = w.p.expect("t", w.source.cache, LIST)
    request = inside.core(w.pull_side).open_transfer(
        TransferRecord(id=inside.key(waits)),
        description,
        pull=kind is RequestKind.INCOMING,
        deadline=None,
    )
    inside.run(w.pull_side)
    await w.until(lambda: request.over)
    assert not waits.done()
    assert not expects.done()
    waits.abort()
    expects.abort()
    assert await w.moves("u", [6, 7], [20, 21])


def test_chunks_that_have_not_landed() -> None:
    segment = SegmentRecord(
        request=None,  # type: ignore[arg-type]
        number=1,
        box=Segment(0, 0, 1, 0, 1),
        nbytes=25,
    )
    # Marked, and never given memory: nothing of it can have come.
    assert missing_chunks(segment, 10) == [(0, 25)]
    segment.arrived = bytearray([2, 1, 0])
    assert missing_chunks(segment, 10) == [(10, 15)]
    segment.arrived = bytearray([0, 2, 1])
    assert missing_chunks(segment, 10) == [(0, 10), (20, 5)]
    segment.arrived = bytearray([1, 0, 2])
    assert missing_chunks(segment, 10) == [(0, 20)]
    segment.arrived = bytearray([2, 2, 2])
    assert missing_chunks(segment, 10) == []
