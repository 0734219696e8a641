"""The messages between the two engines of a migration, beside the KV.

The source sends all of its messages with one tag, in the order of the migration. The
target answers once, with the tag that the migration names: an empty message if it has
taken the request, otherwise the reason why it has not.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvwire.limits import KV_BLOCK_TOKENS_MAX, KV_BLOCKS_MAX, MIB, NAME_CHARS_MAX

# An engine's state for a request besides its KV: a million tokens of 4 bytes.
MIGRATION_STATE_BYTES_MAX: Final = 4 * MIB
MIGRATION_ROUNDS_MAX: Final = 64

MIGRATION_TAG: Final = int.from_bytes(b"kvw-move", "big")
"""Messages of migrations have this tag; an application takes others."""

MOVE_BYTES: Final = 16

_MoveId = Annotated[bytes, Meta(min_length=MOVE_BYTES, max_length=MOVE_BYTES)]


class Round(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Announces that blocks are pushed now; the first round begins the migration."""

    # Random bytes that identify the migration, and the transfers of its rounds.
    move: _MoveId
    request: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]  # name of the request
    reply: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # tag of the answer
    index: Annotated[int, Meta(ge=0, lt=MIGRATION_ROUNDS_MAX)]  # the round, from 0
    # The number of blocks, which follow those of the previous round.
    blocks: Annotated[int, Meta(ge=1, le=KV_BLOCKS_MAX)]
    # The number of tokens in them; only the last round may have fewer than the blocks
    # hold.
    tokens: Annotated[int, Meta(ge=1, le=KV_BLOCKS_MAX * KV_BLOCK_TOKENS_MAX)]
    # Tokens of a block at the source.
    block_tokens: Annotated[int, Meta(ge=1, le=KV_BLOCK_TOKENS_MAX)]


class Handover(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Gives the request to the target; the source will not continue it."""

    move: _MoveId  # the migration's bytes
    # The engine's own state for the request: its tokens, its sampling.
    state: Annotated[bytes, Meta(max_length=MIGRATION_STATE_BYTES_MAX)]


class Withdrawal(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ends the migration; the request stays at the source."""

    move: _MoveId


Message: TypeAlias = Round | Handover | Withdrawal

_DECODER = msgspec.msgpack.Decoder(Message)


def decode(raw: bytes | bytearray) -> Message:
    """Decode a message."""
    message: Message = _DECODER.decode(raw)
    return message


def transfer_id(move: bytes, index: int) -> bytes:
    """Return the id of one round's transfer, which no other peer can guess."""
    return b"kvwire-move/" + move + index.to_bytes(4, "big")
