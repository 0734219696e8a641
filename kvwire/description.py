"""What the two sides of a KV transfer tell each other before a byte moves.

It travels as the opaque description of OPEN and AGREE. The consumer's says what it has
already, and after a lost link what has landed; the answer carries a digest of the
answerer's plan, so that two sides which would walk the bytes differently notice first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv.blocks import Bits
from kvwire.kv.geometry import Geometry
from kvwire.limits import (
    DESCRIPTION_BYTES_MAX,
    KV_BLOCKS_MAX,
    KV_GROUPS_MAX,
    NAME_CHARS_MAX,
    SEGMENTS_MAX,
)

GroupName = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Description(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One side's half of a transfer.

    Attributes:
        geometry: See :meth:`kvwire.kv.geometry.Geometry.encode`; checked by its decode.
        have: Consumer: per group a bitmap of the positions it has, little-endian.
        landed: Consumer, after a lost link: boxes that have landed before.
        hashes: A digest over the block hashes of the list, where they are given.
        plan: The digest of the answerer's plan; empty in an OPEN.
        settled: Consumer, after a lost link: it has all it was sent, and only its last
            word may be missing. Nothing is sent again.
        end: 8 random bytes that name this end of the transfer over all its links.
        attempt: 0 for the first, counted up by each new link.
    """

    geometry: tuple[
        tuple[
            GroupName,
            tuple[tuple[GroupName, GroupName], ...],
            GroupName,
            U32,
            U32 | None,
        ],
        ...,
    ]
    have: Annotated[
        tuple[tuple[GroupName, Annotated[bytes, Meta(max_length=KV_BLOCKS_MAX)]], ...],
        Meta(max_length=KV_GROUPS_MAX),
    ] = ()
    landed: Annotated[
        tuple[tuple[U32, U32, U32, U32, U32], ...], Meta(max_length=SEGMENTS_MAX)
    ] = ()
    hashes: Annotated[bytes, Meta(max_length=32)] = b""
    plan: Annotated[bytes, Meta(max_length=16)] = b""
    settled: bool = False
    end: Annotated[bytes, Meta(max_length=8)] = b""
    attempt: U32 = 0

    def encode(self) -> bytes:
        """The bytes that travel.

        Raises:
            UsageError: They would be more than one frame holds.
        """
        data = msgspec.msgpack.encode(self)
        if len(data) > DESCRIPTION_BYTES_MAX:
            raise UsageError(
                f"the description of this transfer has {len(data)} bytes, more than "
                f"{DESCRIPTION_BYTES_MAX}: move fewer blocks in one transfer"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """Read a peer's.

        Raises:
            ProfileMismatch: It is not one.
        """
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise ProfileMismatch(f"the peer's description: {exc}") from None

    def read_geometry(self) -> Geometry:
        """The peer's geometry.

        Raises:
            ProfileMismatch: A number in it is out of range.
        """
        try:
            return Geometry.decode(self.geometry)
        except UsageError as exc:
            raise ProfileMismatch(f"the peer's description: {exc}") from None

    def read_have(self, consumer: Geometry) -> dict[str, Bits]:
        """What the consumer has, one bool for each position of its lists.

        Raises:
            ProfileMismatch: A bitmap does not fit the consumer's list.
        """
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


_DECODER = msgspec.msgpack.Decoder(Description)


def pack_have(have: Mapping[str, Bits]) -> tuple[tuple[str, bytes], ...]:
    """The bitmaps of :attr:`Description.have`."""
    return tuple(
        (name, np.packbits(bits, bitorder="little").tobytes())
        for name, bits in have.items()
        if bits.any()
    )
