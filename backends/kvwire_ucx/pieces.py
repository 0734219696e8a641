"""Descriptors of payloads, which travel as one or several messages.

::

    descriptor = number of the first message | length of each, if there are several
                 (4 bytes)                     (4 bytes each)

Large fragments are moved in place, each as a separate message: over RDMA by the card,
over shared memory in one copy. UCX packs small fragments into one message.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import MalformedFrame
from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB
from kvwire.memory.buffers import slice_payload

# Fragments of at least this size are separate messages, which need no packing.
PIECE_BYTES: Final = 128 * KIB
PIECES_MAX: Final = 32
# The rule in docs/topics/protocol.md about a descriptor and its payload.
RULE: Final = "KVW-LN-07"

_NUMBER: Final = struct.Struct(">I")

assert _NUMBER.size * (PIECES_MAX + 1) <= DESCRIPTOR_BYTES_MAX


def piece_lengths(payload: Payload) -> list[int]:
    """Return the length of each message of a payload; [] if it is one message."""
    if not isinstance(payload, Fragments) or not 2 <= len(payload) <= PIECES_MAX:
        return []
    if payload.nbytes < PIECE_BYTES * len(payload):
        return []
    lengths: list[int] = payload.lengths.tolist()
    return lengths


def pieces(payload: Payload, lengths: list[int]) -> Iterator[Payload]:
    """Yield a payload's pieces with these lengths, or all of it for []."""
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
    """Return the number of a payload's first message, and the lengths of its pieces.

    The lengths are empty for a contiguous payload.

    Raises:
        MalformedFrame: The descriptor was not made by a correct lane.
    """
    count, rest = divmod(len(data), _NUMBER.size)
    if rest or not 1 <= count <= PIECES_MAX + 1 or count == 2:
        raise MalformedFrame(RULE, f"ucx: a descriptor has {len(data)} bytes")
    first, *lengths = (number for (number,) in _NUMBER.iter_unpack(data))
    if lengths and (0 in lengths or sum(lengths) != nbytes):
        text = f"ucx: pieces of {sum(lengths)} bytes for a payload of {nbytes}"
        raise MalformedFrame(RULE, text)
    return first, lengths
