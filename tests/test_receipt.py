"""What a consumer checks of each segment before it has memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvwire.errors import ProtocolError
from kvwire.last_word import LastWord
from kvwire.proto.events import SegmentMarked, TransferCommitted
from kvwire.proto.requests import Request
from kvwire.proto.segments import Box, Segment
from kvwire.proto.state import Kind, State
from tests.scenarios.world import Memory, same
from tests.support.pairs import Pair, connected, until

BLOCKS = range(4)
# (group, layer, layers, granule, granules): the first layer of all four blocks.
FIRST_LAYER: Box = (0, 0, 1, 0, 4)


async def begun(pair: Pair, source: Memory, target: Memory) -> tuple[Any, Any, Request]:
    """A push that both sides have agreed on; its two ends, and the producer's core."""
    incoming = pair.far.expect("x", target.cache, BLOCKS)
    outgoing = pair.left.push("x", source.cache, BLOCKS)
    core = pair.left.core
    await until(lambda: any(r.state is State.MOVING for r in core._requests))
    (request,) = core._requests
    assert request.kind is Kind.OUTGOING
    return incoming, outgoing, request


def layer_bytes(memory: Memory) -> int:
    return sum(memory.tensors[0][block].nbytes for block in BLOCKS)


def mark(pair: Pair, request: Request, box: Box, nbytes: int) -> None:
    """Mark what the producer's front would not."""
    lent = pair.near.buffers.lend(memoryview(bytearray(nbytes)))
    pair.left.core.transfers.mark(request, box, lent, nbytes)
    pair.left.run()


async def expect_refused(pair: Pair, incoming: Any, target: Memory, rule: str) -> None:
    await until(lambda: pair.right.closed)
    assert f"[{rule}]" in str(pair.right.core.error)
    incoming.abort()
    outcome = await incoming
    assert not outcome.complete
    await incoming.drained()
    assert target.free(block for block in range(32) if block not in BLOCKS)


@pytest.mark.rule("KVW-TR-09", "keeps")
@pytest.mark.rule("KVW-TR-11", "keeps")
async def test_every_layer_once() -> None:
    """What an honest producer does."""
    async with connected("inproc") as pair:
        source, target = Memory(), Memory()
        source.stamp(BLOCKS)
        incoming, outgoing, _ = await begun(pair, source, target)
        outgoing.ready()
        outgoing.finish()
        outcome = await incoming
        assert outcome.complete
        await outgoing
        assert same(source, BLOCKS, target, BLOCKS)


OUTSIDE: dict[str, tuple[Box, int]] = {
    "another group": ((1, 0, 1, 0, 4), 0),
    "a layer too many": ((0, 0, 5, 0, 4), 0),
    "a layer beyond": ((0, 4, 1, 0, 4), 0),
    "no layer": ((0, 0, 0, 0, 4), 0),
    "a block too many": ((0, 0, 1, 0, 5), 0),
    "the largest numbers": ((2**32 - 1,) * 5, 0),
    "a byte too few": (FIRST_LAYER, -1),
    "a byte too many": (FIRST_LAYER, 1),
}


@pytest.mark.rule("KVW-TR-09", "breaks")
@pytest.mark.parametrize(("box", "beside"), OUTSIDE.values(), ids=list(OUTSIDE))
async def test_a_segment_that_is_none(box: Box, beside: int) -> None:
    """Its bytes get no memory, whatever it says of their number."""
    async with connected("inproc") as pair:
        source, target = Memory(), Memory()
        incoming, _, request = await begun(pair, source, target)
        mark(pair, request, box, layer_bytes(source) + beside)
        await expect_refused(pair, incoming, target, "KVW-TR-09")
        assert target.free(BLOCKS)


@pytest.mark.rule("KVW-TR-11", "breaks")
@pytest.mark.parametrize("again", [FIRST_LAYER, (0, 0, 1, 3, 1), (0, 0, 2, 2, 2)])
async def test_a_segment_that_was_marked_before(again: Box) -> None:
    """All of it, or any part: what has landed is not written twice."""
    async with connected("inproc") as pair:
        source, target = Memory(), Memory()
        incoming, _, request = await begun(pair, source, target)
        whole = layer_bytes(source)
        mark(pair, request, FIRST_LAYER, whole)
        mark(pair, request, again, whole // 4 * again[2] * again[4])
        await expect_refused(pair, incoming, target, "KVW-TR-11")


def last_word() -> LastWord:
    """Of a transfer that was settled on a link that is lost."""
    incoming: Any = SimpleNamespace(met=b"", key=b"x", end=b"")
    receipt: Any = SimpleNamespace(connection=None, incarnation=bytes(16))
    return LastWord(incoming, receipt, asks=False)


@pytest.mark.rule("KVW-TR-10", "keeps")
@pytest.mark.rule("KVW-TR-10", "breaks")
def test_a_settled_transfer_is_not_marked_again() -> None:
    """The consumer may be using the memory for something else; a commit is fine."""
    request = Request(kind=Kind.INCOMING, wire_id=None, buffer=None, nbytes=0)
    segment = Segment(request=request, number=1, box=FIRST_LAYER, nbytes=5)
    word = last_word()
    word.event(TransferCommitted(request=request, complete=True))
    with pytest.raises(ProtocolError) as caught:
        word.event(SegmentMarked(segment=segment))
    assert caught.value.rule == "KVW-TR-10"
