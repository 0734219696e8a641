"""A payload as messages, and the descriptor that says which they are.

::

    descriptor = number of the first message | length of each, if there are several
                (4 bytes)                            (4 bytes each)

Large fragments are moved as they lie, each as a message of its own: over RDMA by the
card, over shared memory in one copy. Small ones are packed by UCX into one message.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import MalformedFrame
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.memory.buffers import slice_payload

# Fragments of at least this are messages of their own, which nobody has to pack.
PIECE_BYTES: Final = 128 * KIB
PIECES_MAX: Final = 32
# Of docs/topics/protocol.md: what a descriptor and its payload have to be.
RULE: Final = "KVW-LN-07"

_NUMBER: Final = struct.Struct(">I")


def piece_lengths(payload: Payload) -> list[int]:
    """Return the bytes of each message of a payload; none if it is one."""
    if not isinstance(payload, Fragments) or not 2 <= len(payload) <= PIECES_MAX:
        return []
    if payload.nbytes < PIECE_BYTES * len(payload):
        return []
    lengths: list[int] = payload.lengths.tolist()
    return lengths


def pieces(payload: Payload, lengths: list[int]) -> Iterator[Payload]:
    """Cut a payload; return all of it for no lengths."""
    if not lengths:
        yield payload
        return
    starts = itertools.accumulate(lengths[:-1], initial=0)
    for start, length in zip(starts, lengths, strict=True):
        yield slice_payload(payload, start, length)


def descriptor(first: int, lengths: list[int]) -> bytes:
    """Return the descriptor that the receiver gets."""
    return b"".join(map(_NUMBER.pack, (first, *lengths)))


def read_descriptor(data: bytes, nbytes: int) -> tuple[int, list[int]]:
    """Return the first message's number and all lengths; none if it is one.

    Args:
        data: As a peer has sent it.
        nbytes: Of the payload.

    Raises:
        MalformedFrame: No lane would make it for such a payload.
    """
    count, rest = divmod(len(data), _NUMBER.size)
    if rest or not 1 <= count <= PIECES_MAX + 1 or count == 2:
        raise MalformedFrame(RULE, f"ucx: a descriptor of {len(data)} bytes")
    first, *lengths = (number for (number,) in _NUMBER.iter_unpack(data))
    if lengths and (0 in lengths or sum(lengths) != nbytes):
        text = f"ucx: a descriptor of {sum(lengths)} bytes for {nbytes}"
        raise MalformedFrame(RULE, text)
    return first, lengths
