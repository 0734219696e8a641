"""Tickets, by which decode reads a computed prompt without a request to prefill.

A reference to a computed prompt lists its blocks, with each block's generation in the
windows of prefill's workers. Decode reads the blocks, and frees them by a message that
needs no answer. A block that prefill has reused since then is missing.

vLLM's scheduler answers a client before its workers can report anything about the step.
So the scheduler draws the generations, and the workers set them. All ranks hold a
prompt in blocks with the same ids, so one ticket serves all of them.

Clients carry references, and could combine one prompt's ticket with another prompt's
tokens. So the ticket has a *seal* per rank: a digest of the blocks and of the name of
the prompt's tokens, keyed with the serial of the rank's window, which only the engines
know.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Array
from kvwire.spi import DECODE_ERRORS

WINDOW: Final = "kvwire-vllm"
"""The name of each worker's window."""
RELEASE_TAG: Final = int.from_bytes(b"kvw-free", "big")
"""Messages that free a prompt's blocks have this tag."""

# Larger prompts are pulled: 100,000 tokens in blocks of 16 have 6,250 blocks.
TICKET_BLOCKS_MAX: Final = 8192
_RANKS_MAX: Final = 1024
_SEAL_BYTES: Final = 16
_U4: Final = np.dtype("<u4")
_U8: Final = np.dtype("<u8")
_BLOCK_BYTES: Final = _U4.itemsize + _U8.itemsize
# In base64, plus 100 bytes of structure for each of 64 tables.
TICKET_CHARS_MAX: Final = (
    (TICKET_BLOCKS_MAX * _BLOCK_BYTES + 18 * _RANKS_MAX + 6400) * 4 // 3
)

_Seal = Annotated[bytes, Meta(min_length=_SEAL_BYTES, max_length=_SEAL_BYTES)]


class _Fields(msgspec.Struct, array_like=True, frozen=True):
    counts: tuple[Annotated[int, Meta(ge=0, le=TICKET_BLOCKS_MAX)], ...]
    ids: bytes
    generations: bytes
    seals: tuple[_Seal, ...]


_DECODER: Final = msgspec.msgpack.Decoder(_Fields)


class PromptTicket(NamedTuple):
    """A computed prompt's blocks, by block table.

    Attributes:
        blocks: Their ids at prefill.
        generations: The generation of each.
        seals: The seal for each of prefill's ranks.
        sealed: The digest that the seals must match, for this engine's prompt.
    """

    blocks: dict[str, Ids]
    generations: dict[str, Array]
    seals: tuple[bytes, ...]
    sealed: bytes


def write(
    blocks: Mapping[str, Sequence[int]],
    generations: Mapping[str, Array],
    content: bytes,
    serials: Sequence[bytes],
) -> str:
    """Return a ticket as text for a reference, its tables in the order of ``blocks``.

    Args:
        blocks: Block ids, by table.
        generations: The generation of each.
        content: The name of the prompt's tokens.
        serials: The serial of each rank's window.
    """
    ids = _joined([np.asarray(one, _U4) for one in blocks.values()])
    drawn = _joined([generations[name].astype(_U8, copy=False) for name in blocks])
    counts = tuple(map(len, blocks.values()))
    sealed = _digest(counts, ids, drawn, content)
    seals = tuple(seal(serial, sealed) for serial in serials)
    data = msgspec.msgpack.encode(_Fields(counts, ids, drawn, seals))
    return base64.b64encode(data).decode()


def read(text: str, tables: Sequence[str], content: bytes, ranks: int) -> PromptTicket:
    """Read a ticket from a reference.

    Args:
        text: The ticket.
        tables: The names of this engine's block tables.
        content: The name of this engine's prompt.
        ranks: How many ranks the reference names.

    Raises:
        UsageError: It is malformed, or from an engine with other tables or ranks.
    """
    try:
        fields = _DECODER.decode(base64.b64decode(text, validate=True))
    except (*DECODE_ERRORS, ValueError) as exc:
        raise UsageError(f"kv_transfer_params: ticket: {exc}") from None
    counts = fields.counts
    total = sum(counts)
    if (
        len(counts) != len(tables)
        or not total
        or len(fields.ids) != _U4.itemsize * total
        or len(fields.generations) != _U8.itemsize * total
    ):
        raise UsageError(
            f"kv_transfer_params: ticket: it has {counts} blocks per table, in "
            f"{len(fields.ids)} bytes of ids and {len(fields.generations)} of "
            f"generations; this engine has {len(tables)} tables"
        )
    if len(fields.seals) != ranks:
        raise UsageError(
            f"kv_transfer_params: ticket: it has seals for {len(fields.seals)} ranks; "
            f"remote has {ranks}"
        )
    ends = np.cumsum(counts)[:-1]
    ids = np.split(np.frombuffer(fields.ids, _U4).astype(np.int64), ends)
    drawn = np.split(np.frombuffer(fields.generations, _U8), ends)
    return PromptTicket(
        dict(zip(tables, ids, strict=True)),
        dict(zip(tables, drawn, strict=True)),
        fields.seals,
        _digest(counts, fields.ids, fields.generations, content),
    )


def seal(serial: bytes, sealed: bytes) -> bytes:
    """Return the seal for the rank with this window serial."""
    return hmac.digest(serial, sealed, "sha256")[:_SEAL_BYTES]


class OfferedBlocks:
    """One table's blocks in references, with each block's generation and count.

    While any reference names a block, it keeps its generation, even if several prompts
    begin with it.
    """

    def __init__(self) -> None:
        self._generations: Array = np.zeros(0, np.uint64)
        self._references = np.zeros(0, np.int32)

    def take(self, blocks: Sequence[int]) -> Array:
        """Count one more reference to blocks; return their generations."""
        ids = np.asarray(blocks, np.int64)
        if ids.size and (last := int(ids.max())) >= self._references.size:
            # bounded: the blocks of the engine
            more = max(1024, 2 * last) - self._references.size
            self._generations = np.pad(self._generations, (0, more))
            self._references = np.pad(self._references, (0, more))
        new = ids[self._references[ids] == 0]
        self._generations[new] = np.frombuffer(os.urandom(8 * new.size), np.uint64)
        self._references[ids] += 1
        return self._generations[ids]

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """End one reference to blocks; return the blocks that have none left."""
        ids = np.asarray(blocks, np.int64)
        self._references[ids] -= 1
        free: list[int] = ids[self._references[ids] == 0].tolist()
        return free


def _joined(arrays: Sequence[Array]) -> bytes:
    return b"".join(one.tobytes() for one in arrays)


def _digest(
    counts: tuple[int, ...], ids: bytes, generations: bytes, content: bytes
) -> bytes:
    named = msgspec.msgpack.encode((counts, ids, generations, content))
    return hashlib.sha256(named).digest()
