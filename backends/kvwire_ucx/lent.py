"""The descriptor of a payload that the receiver reads itself, where it lies.

::

    descriptor = number with its top bit set | fragment | fragment ...
    fragment = address, 8 bytes | length, 4 bytes | length of the key, 2 bytes | key

The other descriptors, of payloads that are sent, have no such bit
(:mod:`kvwire_ucx.pieces`). Keys travel here and nowhere else: inside the control link,
under its authentication and encryption.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvwire.errors import MalformedFrame
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_ucx.bootstrap import MESSAGES
from kvwire_ucx.pieces import PIECES_MAX, RULE

# UCX writes a key for each of its memory domains: 11 bytes with shared memory and TCP,
# some 30 for each network card.
KEY_BYTES_MAX: Final = 1000
_LENT: Final = 1 << 31
_NUMBER: Final = struct.Struct(">I")
_FRAGMENT: Final = struct.Struct(">QIH")
# No process has addresses beyond, and no sum with a length overflows 64 bits.
_ADDRESS_MAX: Final = 2**63

assert (
    _NUMBER.size + PIECES_MAX * (_FRAGMENT.size + KEY_BYTES_MAX) <= DESCRIPTOR_BYTES_MAX
)


@dataclass(frozen=True, slots=True)
class LentFragment:
    """Names a range of the peer's memory, and the key to it."""

    address: int
    nbytes: int
    key: bytes


def is_lent(descriptor: bytes) -> bool:
    """Tell whether a descriptor is of a payload that is to be read."""
    return bool(descriptor) and descriptor[0] >= _LENT >> 24


def lent_descriptor(number: int, fragments: list[LentFragment]) -> bytes | None:
    """Return the descriptor that the receiver gets; None if a key is too long."""
    parts = [_NUMBER.pack(number | _LENT)]
    for one in fragments:
        if len(one.key) > KEY_BYTES_MAX:
            return None
        parts += (_FRAGMENT.pack(one.address, one.nbytes, len(one.key)), one.key)
    return b"".join(parts)


def read_lent(data: bytes, nbytes: int) -> tuple[int, list[LentFragment]]:
    """Return the payload's number and its fragments.

    Args:
        data: As a peer has sent it; :func:`is_lent` is true.
        nbytes: Of the payload.

    Raises:
        MalformedFrame: No lane would make it for such a payload.
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
