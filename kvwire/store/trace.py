"""Traces of block accesses, in a common format with one line of JSON per access.

The first four fields of a line are those of Mooncake's open traces
(github.com/kvcache-ai/Mooncake, FAST25-release), which other simulators read as well.
Further fields, which some traces have, are ignored::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52,
     "hash_ids": [46, 47, 48, 49, 2354, 2355]}

A number in ``hash_ids`` names a block and all blocks before it. Such a line describes
an engine's work on one prompt: it loads the leading blocks that are stored, computes
the others and stores them.

A recording of a store (:mod:`kvwire.store.recorder`) has three more fields: ``op`` is
the call, ``block_bytes`` the size of each block, and ``tenant`` the blocks' owner.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvwire.errors import UsageError
from kvwire.limits import NAME_CHARS_MAX
from kvwire.store.limits import STORE_SLAB_BYTES_MAX

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TraceOp(enum.Enum):
    """The operation of a trace line on its blocks."""

    REQUEST = ""
    """Get the leading blocks that are stored, and put the others. Published traces have
    only such lines."""
    LOAD = "load"
    """Get the leading blocks that are stored."""
    GET = "get"
    """Get the blocks that are stored."""
    PUT = "put"
    """Put the blocks that are not stored."""
    TOUCH = "touch"
    """Mark the blocks that are stored as used."""
    DELETE = "delete"
    """Delete the blocks."""


class TraceLine(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One line of a trace.

    Attributes:
        timestamp: The time since the start of the trace, usually in milliseconds.
        input_length: Tokens of the prompt, or of the blocks.
        output_length: Tokens of the answer; a replay does not use it.
        hash_ids: The blocks, in token order.
        op: The operation on the blocks.
        block_bytes: The size of each block; 0 if the trace does not record it.
        tenant: The tenant that owns them.
    """

    timestamp: float
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]
    op: TraceOp = TraceOp.REQUEST
    block_bytes: Annotated[int, Meta(ge=0, le=STORE_SLAB_BYTES_MAX)] = 0
    tenant: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""


encode_line: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(TraceLine).decode


def read_trace(path: Path, lines: Iterable[bytes]) -> Iterator[TraceLine]:
    """Yield the parsed lines of a file.

    Raises:
        UsageError: A line is not valid in a trace; the text names its number and the
            field.
    """
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            yield _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise UsageError(
                f"{path}, line {number}: {exc}; a trace line looks like "
                '{"timestamp": 0, "input_length": 1024, "output_length": 1, '
                '"hash_ids": [0, 1]}'
            ) from None
