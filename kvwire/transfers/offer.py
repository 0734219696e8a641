"""The descriptions that both sides of a KV transfer exchange before bytes move.

They are the opaque descriptions in OPEN and AGREE. The consumer's description lists the
blocks that it has already, and after a lost link the parts that have landed. An answer
contains a digest of the answerer's plan, so that different plans are detected before
any byte moves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv.blocks import Bits
from kvwire.kv.geometry import Geometry, geometry_of
from kvwire.limits import (
    DESCRIPTION_BYTES_MAX,
    KIB,
    KV_BLOCKS_MAX,
    KV_GROUPS_MAX,
    KV_TEMPLATES_MAX,
    LANDED_BOX_BYTES,
    LANDED_BOXES_MAX,
)
from kvwire.wire.control import DECODE_ERRORS, U32, GeometryFields, Name

ENDPOINT_ID_BYTES = 8
TRACE_BYTES = 25
# Shorter arrays have their count in their first byte.
_FIXARRAY = 16


class TransferOffer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One side's description of a transfer.

    Attributes:
        geometry: See :attr:`kvwire.kv.geometry.Geometry.packed`; decoding checks it.
        endpoint_id: Random bytes that identify this end of the transfer on all links.
        peer_id: The peer's ``endpoint_id``, if the two met on an earlier link; else
            empty. This end resumes only with that end, never with another one of the
            same name.
        hashes: A digest of the list's block hashes; empty if there are none.
        have: Consumer: per group a little-endian bitmap of the positions that it has.
        landed: Consumer, after a lost link: the boxes that have landed.
        plan: The digest of the answerer's plan; empty in an OPEN.
        settled: Consumer, after a lost link: whether everything has landed and only the
            report may have been lost. Then nothing is sent again.
        trace: The trace context: 16 bytes of trace id, 8 bytes of the caller's span id,
            and the flags of W3C's traceparent. Empty without tracing.
    """

    geometry: msgspec.Raw
    endpoint_id: Annotated[
        bytes, Meta(min_length=ENDPOINT_ID_BYTES, max_length=ENDPOINT_ID_BYTES)
    ]
    peer_id: Annotated[bytes, Meta(max_length=ENDPOINT_ID_BYTES)] = b""
    hashes: Annotated[bytes, Meta(max_length=32)] = b""
    have: Annotated[
        tuple[tuple[Name, Annotated[bytes, Meta(max_length=KV_BLOCKS_MAX)]], ...],
        Meta(max_length=KV_GROUPS_MAX),
    ] = ()
    landed: Annotated[
        tuple[tuple[U32, U32, U32, U32, U32], ...], Meta(max_length=LANDED_BOXES_MAX)
    ] = ()
    plan: Annotated[bytes, Meta(max_length=16)] = b""
    settled: bool = False
    trace: Annotated[bytes, Meta(max_length=TRACE_BYTES)] = b""

    def encode(self) -> bytes:
        """Return the description as bytes."""
        data = msgspec.msgpack.encode(self)
        to_come = LANDED_BOX_BYTES * (LANDED_BOXES_MAX - len(self.landed))
        if len(self.landed) < _FIXARRAY:
            to_come += 2  # the count of a longer array has 3 bytes instead of 1
        if len(data) > DESCRIPTION_BYTES_MAX - to_come:
            raise UsageError(
                f"this transfer's description has {len(data)} bytes; at most "
                f"{DESCRIPTION_BYTES_MAX - to_come} are allowed: move fewer blocks at "
                "once, or leave out have="
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> TransferOffer:
        """Read a peer's description."""
        try:
            offer = _DECODER.decode(data)
            offer.read_geometry()
        except (*DECODE_ERRORS, UsageError) as exc:
            raise ProfileMismatch(f"the peer's description: {exc}") from None
        return offer

    def read_geometry(self) -> Geometry:
        """Return the peer's geometry, which was checked when it was decoded."""
        packed = bytes(self.geometry)
        return _met(packed) if len(packed) <= _MET_BYTES else _read(packed)

    def require_same_hashes(self, hashes: bytes) -> None:
        """Refuse a peer whose hashes differ from ours, if both sides gave them."""
        if hashes and self.hashes and hashes != self.hashes:
            raise ProfileMismatch(
                "hashes: the producer's and the consumer's differ, so their tokens "
                "or their block boundaries differ",
                fields=("hashes",),
            )

    def require_same_plan(self, digest: bytes) -> None:
        """Refuse an answer whose plan differs from ours."""
        if self.plan != digest:
            raise ProfileMismatch(
                "the two sides would order the bytes differently; install the same "
                "version of kvwire on both",
                fields=("plan",),
            )

    def read_have(self, consumer: Geometry) -> dict[str, Bits]:
        """Return for each list position whether the consumer has it, by group."""
        blocks = {group.name: group.blocks for group in consumer.groups}
        found: dict[str, Bits] = {}
        for name, packed in self.have:
            count = blocks.get(name, -1)
            if len(packed) != -(-count // 8):
                raise ProfileMismatch(
                    f"the peer's `have` of group {name!r} has {len(packed)} bytes for "
                    f"{count} blocks",
                    fields=("have",),
                )
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
            found[name] = bits[:count].astype(np.bool_)
        return found


def new_trace() -> bytes:
    """Return the context of a new trace, marked as sampled."""
    return os.urandom(TRACE_BYTES - 1) + b"\x01"


def traceparent(trace: bytes) -> str:
    """Return a trace as a W3C ``traceparent`` header; "" if there is none."""
    if len(trace) != TRACE_BYTES:
        return ""
    return f"00-{trace[:16].hex()}-{trace[16:24].hex()}-{trace[24:].hex()}"


_DECODER = msgspec.msgpack.Decoder(TransferOffer)
_GEOMETRY: Final = msgspec.msgpack.Decoder(GeometryFields)
# A geometry of one group has some 250 bytes. Longer ones are read again each time.
_MET_BYTES: Final = 1 * KIB


def _read(packed: bytes) -> Geometry:
    fields: tuple[Any, ...] = _GEOMETRY.decode(packed)
    return geometry_of(fields)


# Those that peers have sent before: finding one takes a tenth of reading it.
_met: Final = lru_cache(KV_TEMPLATES_MAX)(_read)


def pack_have(have: Mapping[str, Bits]) -> tuple[tuple[str, bytes], ...]:
    """Return bitmaps in the format of :attr:`TransferOffer.have`."""
    return tuple(
        (name, np.packbits(bits, bitorder="little").tobytes())
        for name, bits in have.items()
        if bits.any()
    )
