"""Descriptors of payloads, which are either sent as messages or lent for reading.

::

    sent = number of the first message | length of each, if there are several
           (4 bytes)                     (4 bytes each)
    lent = number with its top bit set | fragment | fragment ...
    fragment = address, 8 bytes | length, 4 bytes | length of the key, 2 bytes | key

Large fragments are moved in place, each as a message of its own: over RDMA by the card,
over shared memory in one copy. UCX packs small ones into one message.

Keys of lent memory travel in descriptors only, so on the control link, under its
authentication and encryption.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import MalformedFrame
from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB
from kvwire.memory.buffers import slice_payload
from kvwire_ucx.bootstrap import MESSAGES

# Fragments of at least this size are messages of their own, which need no packing.
PIECE_BYTES: Final = 128 * KIB
PIECES_MAX: Final = 32
# The rule in docs/topics/protocol.md about a descriptor and its payload.
RULE: Final = "KVW-LN-07"

_NUMBER: Final = struct.Struct(">I")
# UCX writes a key for each of its memory domains: 11 bytes with shared memory and TCP,
# some 30 for each network card.
KEY_BYTES_MAX: Final = 1000
_LENT: Final = 1 << 31
_FRAGMENT: Final = struct.Struct(">QIH")
# No process has addresses beyond this, and no sum with a length overflows 64 bits.
_ADDRESS_MAX: Final = 2**63

assert (
    _NUMBER.size + PIECES_MAX * (_FRAGMENT.size + KEY_BYTES_MAX) <= DESCRIPTOR_BYTES_MAX
)


def piece_lengths(payload: Payload) -> list[int]:
    """Return the length of each message of a payload; [] if it is one message."""
    if not isinstance(payload, Fragments) or not 2 <= len(payload) <= PIECES_MAX:
        return []
    if payload.nbytes < PIECE_BYTES * len(payload):
        return []
    lengths: list[int] = payload.lengths.tolist()
    return lengths


def pieces(payload: Payload, lengths: list[int]) -> Iterator[Payload]:
    """Yield the pieces of a payload that have these lengths, or all of it for []."""
    if not lengths:
        yield payload
        return
    starts = itertools.accumulate(lengths[:-1], initial=0)
    for start, length in zip(starts, lengths, strict=True):
        yield slice_payload(payload, start, length)


def descriptor(first: int, lengths: list[int]) -> bytes:
    """Return the descriptor of a payload that is sent as messages."""
    return b"".join(map(_NUMBER.pack, (first, *lengths)))


def read_descriptor(data: bytes, nbytes: int) -> tuple[int, list[int]]:
    """Read such a descriptor: the first message's number, and the lengths or [].

    Raises:
        MalformedFrame: The peer's lane would not make it.
    """
    count, rest = divmod(len(data), _NUMBER.size)
    if rest or not 1 <= count <= PIECES_MAX + 1 or count == 2:
        raise MalformedFrame(RULE, f"ucx: a descriptor of {len(data)} bytes")
    first, *lengths = (number for (number,) in _NUMBER.iter_unpack(data))
    if lengths and (0 in lengths or sum(lengths) != nbytes):
        text = f"ucx: a descriptor of {sum(lengths)} bytes for {nbytes}"
        raise MalformedFrame(RULE, text)
    return first, lengths


@dataclass(frozen=True, slots=True)
class LentFragment:
    """A range of the peer's memory, and the key for reading it."""

    address: int
    nbytes: int
    key: bytes


def is_lent(descriptor: bytes) -> bool:
    """Return whether a descriptor is for a lent payload."""
    return bool(descriptor) and descriptor[0] >= _LENT >> 24


def lent_descriptor(number: int, fragments: list[LentFragment]) -> bytes | None:
    """Return the descriptor of a lent payload; None if a key is too long."""
    parts = [_NUMBER.pack(number | _LENT)]
    for one in fragments:
        if len(one.key) > KEY_BYTES_MAX:
            return None
        parts += (_FRAGMENT.pack(one.address, one.nbytes, len(one.key)), one.key)
    return b"".join(parts)


def read_lent(data: bytes, nbytes: int) -> tuple[int, list[LentFragment]]:
    """Read such a descriptor: the payload's number and its fragments.

    Raises:
        MalformedFrame: The peer's lane would not make it.
    """
    if not _NUMBER.size <= len(data) <= DESCRIPTOR_BYTES_MAX:
        raise _refused(f"{len(data)} bytes")
    number = _NUMBER.unpack_from(data)[0] & ~_LENT
    if number >= MESSAGES:
        raise _refused(f"message {number}")
    found: list[LentFragment] = []
    at = _NUMBER.size
    while at < len(data):
        if len(data) - at < _FRAGMENT.size or len(found) == PIECES_MAX:
            raise _refused(f"{len(data)} bytes, of which {at} are fragments")
        address, length, key_bytes = _FRAGMENT.unpack_from(data, at)
        at += _FRAGMENT.size
        key = data[at : at + key_bytes]
        at += key_bytes
        if not 0 < key_bytes == len(key) <= KEY_BYTES_MAX:
            raise _refused(f"a key of {key_bytes} bytes")
        if not length or address >= _ADDRESS_MAX:
            raise _refused(f"{length} bytes at {address:#x}")
        found.append(LentFragment(address, length, key))  # bounded: PIECES_MAX
    total = sum(one.nbytes for one in found)
    if total != nbytes:
        raise _refused(f"{total} bytes for a payload of {nbytes}")
    return number, found


def _refused(text: str) -> MalformedFrame:
    return MalformedFrame(RULE, f"ucx: a descriptor of lent memory: {text}")
