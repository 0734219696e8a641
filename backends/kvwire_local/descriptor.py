"""Descriptors: a payload's place in memory, in at most ``DESCRIPTOR_BYTES_MAX`` bytes.

In a payload of a KV cache nearly all fragments have the same length: only the first and
the last are shortened by the chunk's borders. So a descriptor is a head of 32 bytes and
a table with 4 bytes per fragment: its distance from the lowest fragment, in units of
the largest power of two that divides all distances. If the lengths vary, each fragment
takes 4 more bytes. A payload of 1 MiB in fragments of 512 bytes takes 8 KiB.

========= ===== ======================================================================
kind      u8    LATER (nothing follows), MEMORY (of the sender), ARENA (shared by it)
form      u8    0: one length for all but the first and last; 1: a table of lengths
shift     u8    distances are in units of ``1 << shift`` bytes
zero      u8
arena     u32   which arena, as announced on the socket; 0 for MEMORY
base      u64   the lowest address, or the lowest offset in the arena
count     u32   fragments
first     u32   bytes of the first fragment; 0 in form 1, as the next two
middle    u32   bytes of each other one
last      u32   bytes of the last fragment
========= ===== ======================================================================
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import ProtocolError
from kvwire.kv.fragments import Array, Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX

RULE: Final = "KVW-LN-07"
_HEAD: Final = struct.Struct("<BBBxIQIIII")
# No process has addresses beyond this, and no sum below can overflow 64 bits.
_ADDRESS_MAX: Final = 2**63
_UINT32_MAX: Final = 2**32 - 1
_TABLE: Final = np.dtype("<u4")


class PlaceKind(enum.IntEnum):
    """The kinds of memory that can contain a payload."""

    LATER = 0
    MEMORY = 1
    ARENA = 2


@dataclass(frozen=True, slots=True)
class DescribedPlace:
    """A payload's place in memory, as its descriptor describes it.

    Attributes:
        kind: The kind of memory.
        arena: For ARENA, the sender's number of the arena.
        fragments: The payload's pieces: addresses of the sender, or offsets in the
            arena. None for LATER: another descriptor follows on the socket.
    """

    kind: PlaceKind
    arena: int = 0
    fragments: Fragments | None = None


LATER: Final = bytes([PlaceKind.LATER])
"""The descriptor of a payload whose place follows on the socket."""


def encode(kind: PlaceKind, arena: int, fragments: Fragments) -> bytes | None:
    """Return the descriptor of a payload of 1 byte or more; None if it is too long."""
    addresses = fragments.addresses
    lengths = fragments.lengths
    count = len(fragments)
    if fragments.nbytes > _UINT32_MAX or _HEAD.size + 4 * count > DESCRIPTOR_BYTES_MAX:
        return None
    if count == 1:
        return encode_piece(kind, arena, int(addresses[0]), fragments.nbytes)
    base = int(addresses.min())
    distances = addresses - np.uint64(base)
    shift = _common_shift(distances)
    if int(distances.max()) >> shift > _UINT32_MAX:
        return None
    table = (distances >> np.uint64(shift)).astype(_TABLE).tobytes()
    first = int(lengths[0])
    last = int(lengths[-1])
    middle = int(lengths[-1])
    if count > 2:
        middle = int(lengths[1])
        if not (lengths[1:-1] == middle).all():
            table += lengths.astype(_TABLE).tobytes()
            head = _HEAD.pack(kind, 1, shift, arena, base, count, 0, 0, 0)
            descriptor = head + table
            return descriptor if len(descriptor) <= DESCRIPTOR_BYTES_MAX else None
    head = _HEAD.pack(kind, 0, shift, arena, base, count, first, middle, last)
    return head + table


def encode_piece(kind: PlaceKind, arena: int, base: int, nbytes: int) -> bytes:
    """Return the descriptor of a contiguous payload, as :func:`encode` makes it."""
    return _HEAD.pack(kind, 0, 0, arena, base, 1, nbytes, nbytes, nbytes) + bytes(4)


def decode(descriptor: bytes, nbytes: int) -> DescribedPlace:
    """Decode a peer's descriptor of a payload of ``nbytes`` bytes.

    Raises:
        ProtocolError: A correct lane would not make such a descriptor.
    """
    if descriptor == LATER:
        return DescribedPlace(PlaceKind.LATER)
    if not _HEAD.size < len(descriptor) <= DESCRIPTOR_BYTES_MAX:
        raise _refused(f"{len(descriptor)} bytes")
    kind, form, shift, arena, base, count, *cut = _HEAD.unpack_from(descriptor)
    if kind not in (PlaceKind.MEMORY, PlaceKind.ARENA) or form > 1 or shift > 63:
        raise _refused(f"kind {kind}, form {form}, shift {shift}")
    if count < 1 or len(descriptor) != _HEAD.size + 4 * count * (form + 1):
        raise _refused(f"{len(descriptor)} bytes for {count} fragments of form {form}")
    if (kind == PlaceKind.MEMORY and arena) or descriptor[3] or (form and any(cut)):
        raise _refused("a field that must be 0 has another value")
    if count == 1:
        return DescribedPlace(PlaceKind(kind), arena, _piece(descriptor, nbytes))
    distances = np.frombuffer(descriptor, _TABLE, count, _HEAD.size)
    furthest = int(distances.max()) << shift
    if furthest + base + nbytes >= _ADDRESS_MAX:
        raise _refused("addresses beyond the end of memory")
    lengths = _lengths(descriptor, form, count, cut)
    total = int(lengths.sum())
    if total != nbytes or not lengths.all():
        raise _refused(
            f"fragments with {total} bytes instead of {nbytes}, or an empty fragment"
        )
    addresses = (distances.astype(np.uint64) << np.uint64(shift)) + np.uint64(base)
    fragments = Fragments(addresses, lengths, owner=None, writable=False)
    return DescribedPlace(PlaceKind(kind), arena, fragments)


def _common_shift(distances: Array) -> int:
    """Return the exponent of the largest power of two that divides all distances."""
    bits = int(np.bitwise_or.reduce(distances))
    return (bits & -bits).bit_length() - 1 if bits else 0


def _piece(descriptor: bytes, nbytes: int) -> Fragments:
    """Decode a descriptor of one fragment; NumPy would take longer than the copy."""
    _, form, _, _, base, _, first, middle, last = _HEAD.unpack_from(descriptor)
    if form or descriptor[_HEAD.size :] != bytes(4) or not first == middle == last:
        raise _refused("a single fragment in the form for several")
    if first != nbytes:
        raise _refused(f"fragments with {first} bytes instead of {nbytes}")
    if base + nbytes >= _ADDRESS_MAX:
        raise _refused("addresses beyond the end of memory")
    return Fragments(
        np.array((base,), np.uint64),
        np.array((nbytes,), np.uint64),
        owner=None,
        writable=False,
    )


def _lengths(descriptor: bytes, form: int, count: int, cut: list[int]) -> Array:
    if form:
        table: npt.NDArray[np.uint32] = np.frombuffer(
            descriptor, _TABLE, count, _HEAD.size + 4 * count
        )
        return table.astype(np.uint64)
    first, middle, last = cut
    lengths = np.full(count, middle, np.uint64)
    lengths[0] = first
    lengths[-1] = last
    return lengths


def _refused(text: str) -> ProtocolError:
    return ProtocolError(RULE, f"local: invalid descriptor: {text}")
