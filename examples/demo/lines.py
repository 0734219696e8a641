"""The messages between the demo's processes: one JSON object per line.

The demo's main process starts the others, writes requests to their standard input, and
reads from their standard output what happened and when. KV is not sent this way; it
goes directly from process to process through kvwire.

Times are seconds on the system's monotonic clock, which all processes of a machine
share.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Final

import msgspec

# Both sides compute while they connect, and the machine may be busy otherwise.
PATIENCE_S: Final = 60.0


class Connect(msgspec.Struct, tag=True):
    """Order, the first one for decode: the address on which prefill listens."""

    address: str


class Prompt(msgspec.Struct, tag=True):
    """Order: compute the KV of a prompt and publish it; or fetch it and generate.

    Its name is shown to people, and is the id of the transfer.
    """

    name: str
    tokens: list[int]
    # The number of tokens that decode generates.
    new: int
    # The block positions that prefill withholds, first to before last.
    lose: tuple[int, int] = (0, 0)


Order = Connect | Prompt


class Up(msgspec.Struct, tag=True):
    """Event: the model is loaded, and prefill listens at this address."""

    role: str
    address: str = ""


class LayerSpan(msgspec.Struct, array_like=True):
    """Event: a layer of a forward pass over ``tokens`` tokens was computed."""

    layer: int
    tokens: int
    start: float
    stop: float


class Prefilled(msgspec.Struct, tag=True):
    """Event: prefill has finished a prompt, and marked the layers at these times."""

    request: str
    spans: list[LayerSpan]
    marked: list[float]


class LayerLanded(msgspec.Struct, tag=True):
    """Event: a layer of every block has landed in the decode process."""

    request: str
    layer: int
    at: float


class Arrived(msgspec.Struct, tag=True):
    """Event: the transfer of this many blocks and tokens has ended."""

    request: str
    at: float
    blocks: int
    tokens: int
    # The positions of blocks that did not arrive, and the reason for the first of them.
    missing: list[int]
    why: str
    # The leading tokens that need not be computed again, and the token ranges that this
    # process computes.
    usable_tokens: int
    to_prefill: list[tuple[int, int]]
    nbytes: int
    # The time from the first to the last byte, and from there to the end.
    wire_s: float
    commit_s: float
    layers_grouped: int
    transport: str


class Recomputed(msgspec.Struct, tag=True):
    """Event: decode has computed the tokens that did not arrive."""

    request: str
    spans: list[LayerSpan]


class NewToken(msgspec.Struct, tag=True):
    """Event: one more token of the continuation."""

    request: str
    token: int


class Single(msgspec.Struct, tag=True):
    """Event: the tokens that one process alone generates, without kvwire."""

    request: str
    tokens: list[int]


Event = Up | Prefilled | LayerLanded | Arrived | Recomputed | NewToken | Single


def encode(said: Order | Event) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(said) + b"\n"


def say(event: Event) -> None:
    """Write an event as a line to standard output."""
    sys.stdout.buffer.write(encode(event))
    sys.stdout.buffer.flush()


async def orders() -> AsyncIterator[Order]:
    """Read orders from standard input until it is closed."""
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        yield _ORDERS.decode(line)


async def events(reader: asyncio.StreamReader) -> AsyncIterator[Event]:
    """Yield a process's events until it ends."""
    async for line in reader:
        yield _EVENTS.decode(line)


# A prompt of 500 tokens is 3 kB as JSON.
LINE_BYTES_MAX: Final = 1 << 20
_ORDERS: Final = msgspec.json.Decoder(Order)
_EVENTS: Final = msgspec.json.Decoder(Event)
