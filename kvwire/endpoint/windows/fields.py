"""Encodes the byte fields of window frames: geometries, memory, sets of blocks.

The description of a window's memory is for readers in place.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.backend.window import WindowMemory
from kvwire.endpoint.windows.map import PeerGroup, Placed, spans_of
from kvwire.errors import ProfileMismatch, ProtocolError, UsageError
from kvwire.kv.blocks import Bits
from kvwire.kv.geometry import Geometry, geometry_of
from kvwire.limits import KV_GROUPS_MAX, WINDOW_MEMORY_BYTES_MAX
from kvwire.wire.control import DECODE_ERRORS, GeometryFields

_Address = Annotated[int, Meta(ge=0, lt=2**62)]
_Stride = Annotated[int, Meta(gt=-(2**62), lt=2**62)]
_RULE: Final = "KVW-WN-07"


class _Group(msgspec.Struct, array_like=True, frozen=True):
    bases: bytes
    strides: tuple[_Stride, _Stride, _Stride, _Stride]


class _Memory(msgspec.Struct, array_like=True, frozen=True):
    table: _Address
    groups: Annotated[tuple[_Group, ...], Meta(max_length=KV_GROUPS_MAX)]


_GEOMETRY: Final = msgspec.msgpack.Decoder(GeometryFields)
_DECODER: Final = msgspec.msgpack.Decoder(_Memory)
_BASE: Final = np.dtype("<i8")


def encode_memory(table: int, where: tuple[Placed, ...]) -> bytes | None:
    """Return the memory's description; None if it is too long to be sent."""
    groups = tuple(
        _Group(place.bases.astype(_BASE, copy=False).tobytes(), place.strides)
        for place in where
    )
    data = msgspec.msgpack.encode(_Memory(table, groups))
    return data if len(data) <= WINDOW_MEMORY_BYTES_MAX else None


def decode_memory(
    data: bytes, geometry: Geometry
) -> tuple[WindowMemory, tuple[PeerGroup, ...]]:
    """Read the peer's description of a window whose geometry is known.

    Raises:
        ProtocolError: The description is invalid.
    """
    try:
        memory = _DECODER.decode(data)
        if len(memory.groups) != len(geometry.groups):
            raise UsageError(f"the window has {len(memory.groups)} groups")
        where = tuple(
            Placed(
                np.frombuffer(given.bases, _BASE).reshape(
                    group.spec.layers, group.spec.components
                ),
                given.strides,
            )
            for given, group in zip(memory.groups, geometry.groups, strict=True)
        )
        spans = spans_of(geometry, where)
    except (*DECODE_ERRORS, UsageError, ValueError) as exc:
        raise ProtocolError(_RULE, f"the memory of a window: {exc}") from None
    entries = sum(group.blocks for group in geometry.groups)
    groups = tuple(map(PeerGroup, geometry.groups, where))
    return WindowMemory(spans=spans, table=(memory.table, 8 * entries)), groups


def encode_geometry(geometry: Geometry) -> bytes:
    """Return a geometry as window frames encode it."""
    return bytes(geometry.packed)


def read_geometry(data: bytes) -> Geometry:
    """Read a peer's geometry.

    Raises:
        ProfileMismatch: It is malformed.
    """
    try:
        fields: tuple[Any, ...] = _GEOMETRY.decode(data)
        return geometry_of(fields)
    except (*DECODE_ERRORS, UsageError) as exc:
        raise ProfileMismatch(f"the peer's window: {exc}") from None


def packed(bits: Bits) -> bytes:
    """Return bits in the encoding of WINDOW_GOT."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpacked(data: bytes, count: int) -> Bits:
    """Return the bits of WINDOW_GOT; all False if it has none."""
    if not data:
        return np.zeros(count, np.bool_)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits.size < count:
        raise ProtocolError("KVW-WN-03", "WINDOW_GOT covers fewer blocks than its get")
    return bits[:count].astype(np.bool_)
