"""A peer's half of a transfer, and the boxes that it names afterwards.

The first byte says which end we are, and whether the rest is the peer's bytes as they
came or the values of an honest codec. Whatever they are: a description is refused or
makes a plan, and what the plan says of our memory lies inside it.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv.geometry import Geometry
from kvwire.kv.landed import Landed
from kvwire.kv.layout import AXES
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, Segment, TransferPlan
from kvwire.kv.spec import KVSpec
from kvwire.proto.records import SegmentRecord
from kvwire.transfers.incoming import missing_chunks
from kvwire.transfers.offer import TransferOffer
from tests.programs.fuzz.reader import Reader

_SPEC: Final = KVSpec(layers=2, kv_heads=2, head_dim=2, block_tokens=4)
_BLOCKS: Final = 4
_LIST: Final = [3, 0, 2]
_BOXES_MAX: Final = 20
_CHUNK_BYTES: Final = 16


def run(data: bytes) -> int:
    """Bit 0 of the first byte is our side, bit 1 how the rest is read."""
    reader = Reader(data)
    options = reader.byte()
    side = PlanSide.PRODUCER if options & 1 else PlanSide.CONSUMER
    said = data[1:] if options & 2 else _written(reader)
    try:
        description = TransferOffer.decode(said)
        peer = description.read_geometry()
        have = description.read_have(peer if side is PlanSide.PRODUCER else _mine())
        plan = TransferPlan(_cache(), _LIST, peer, side, have=have)
    except (ProfileMismatch, UsageError):
        return len(data) + len(said)
    assert len(plan.digest) == 16
    landed = Landed(plan)
    try:
        landed.mark_boxes([Segment(*box) for box in description.landed])
    except UsageError:
        landed = Landed(plan)
    for box in landed.boxes(_BOXES_MAX):
        assert landed.has(box)
    for _ in range(_BOXES_MAX):
        if not reader:
            break
        _mark(plan, landed, reader)
    return len(data) + len(said)


@functools.cache
def _memory() -> npt.NDArray[np.uint16]:
    heads, dims = _SPEC.kv_heads, _SPEC.head_dim
    return np.zeros((_SPEC.layers, _BLOCKS, 2, _SPEC.block_tokens, heads, dims), "u2")


@functools.cache
def _cache() -> PagedCache:
    return PagedCache(_SPEC, list(_memory()))


def _mine() -> Geometry:
    plan = TransferPlan(_cache(), _LIST, _own(), PlanSide.CONSUMER)
    return plan.local


@functools.cache
def _own() -> Geometry:
    order = " ".join(_cache().groups["kv"].order)
    return Geometry.decode((("kv", _SPEC.to_pairs(), order, len(_LIST), None),))


def _written(reader: Reader) -> bytes:
    """Nearly a description of a cache like ours."""
    changes = reader.byte()
    pairs = dict(_SPEC.to_pairs())
    if changes & 1:
        pairs[reader.pick(list(pairs))] = str(reader.number())
    order = list(AXES)
    for _ in range(reader.byte() % 6):
        order.append(order.pop(reader.byte() % len(order)))
    block_tokens = 1 + reader.byte() % 12
    pairs["block_tokens"] = str(block_tokens)
    tokens = len(_LIST) * _SPEC.block_tokens
    blocks = reader.number() if changes & 2 else -(-tokens // block_tokens)
    group = (
        reader.take(1).decode("latin-1") if changes & 4 else "kv",
        list(pairs.items()),
        " ".join(order),
        blocks % 2**32,
        tokens if changes & 8 else None,
    )
    have = [("kv", reader.short())] if changes & 16 else []
    boxes = [_box(reader) for _ in range(reader.byte() % 5)] if changes & 32 else []
    fields = ([group], b"12345678", b"", b"", have, boxes)
    return msgspec.msgpack.encode(fields)


def _box(reader: Reader) -> tuple[int, int, int, int, int]:
    group, layer, layers, granule, granules = (
        reader.number() % 2**32 for _ in range(5)
    )
    return group, layer, layers, granule, granules


def _mark(plan: TransferPlan, landed: Landed, reader: Reader) -> None:
    """Take a segment that the peer names, as far as a consumer does."""
    segment = Segment(*_box(reader))
    try:
        plan.check(segment)
    except UsageError:
        return
    nbytes, fragments = plan.nbytes_of(segment), plan.fragments(segment)
    assert fragments.nbytes == nbytes
    if nbytes:
        first = np.uint64(_memory().ctypes.data)
        assert (fragments.addresses >= first).all()
        ends = fragments.addresses + fragments.lengths
        assert (ends <= first + np.uint64(_memory().nbytes)).all()
    count = -(-nbytes // _CHUNK_BYTES)
    core = SegmentRecord(request=None, number=1, box=segment, nbytes=nbytes)  # type: ignore[arg-type]
    core.arrived = bytearray(reader.byte() % 3 for _ in range(count))
    missing = missing_chunks(core, _CHUNK_BYTES)
    before = landed.left
    landed.mark_but(segment, missing)
    assert landed.left <= before
    assert missing or landed.has(segment)
