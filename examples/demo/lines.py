"""What the demo's processes tell each other: one JSON object a line.

The demo's own process starts the others, gives them requests on their standard input
and reads from their standard output what happened and when. No KV passes here; that
goes from process to process through kvwire.

Times are seconds of the system's monotonic clock, which is one for all processes of a
machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Final

import msgspec

# Both sides compute while they connect, and a busy machine has other things to do.
PATIENCE_S: Final = 60.0


class Connect(msgspec.Struct, tag=True):
    """Order, the first that decode gets: where prefill listens."""

    address: str


class Prompt(msgspec.Struct, tag=True):
    """Order: compute the KV of a prompt and publish it, or fetch it and go on.

    Its name is for people, and the id of its transfer.
    """

    name: str
    tokens: list[int]
    # How many tokens decode generates.
    new: int
    # Block positions, first to before last, that prefill keeps back.
    lose: tuple[int, int] = (0, 0)


Order = Connect | Prompt


class Up(msgspec.Struct, tag=True):
    """Says that the model is loaded, and where prefill listens."""

    role: str
    address: str = ""


class LayerSpan(msgspec.Struct, array_like=True):
    """Says when a layer of a forward pass was computed, over ``tokens`` tokens."""

    layer: int
    tokens: int
    start: float
    stop: float


class Prefilled(msgspec.Struct, tag=True):
    """Says that prefill is done with a prompt, and when it marked each layer."""

    request: str
    spans: list[LayerSpan]
    marked: list[float]


class LayerLanded(msgspec.Struct, tag=True):
    """Says that a layer of every block is in the decode process."""

    request: str
    layer: int
    at: float


class Arrived(msgspec.Struct, tag=True):
    """Says that the transfer of so many blocks and tokens has ended."""

    request: str
    at: float
    blocks: int
    tokens: int
    # Positions of the blocks that it did not bring, and why not the first of them.
    missing: list[int]
    why: str
    # Leading tokens that need not be computed again, and ranges that this process will.
    usable_tokens: int
    to_prefill: list[tuple[int, int]]
    nbytes: int
    # From the first to the last byte, and from that one to the end.
    wire_s: float
    commit_s: float
    layers_grouped: int
    transport: str


class Recomputed(msgspec.Struct, tag=True):
    """Says that decode has prefilled what did not arrive."""

    request: str
    spans: list[LayerSpan]


class NewToken(msgspec.Struct, tag=True):
    """Brings one more token of the continuation."""

    request: str
    token: int


class Single(msgspec.Struct, tag=True):
    """Brings what one process alone generates, without kvwire."""

    request: str
    tokens: list[int]


Event = Up | Prefilled | LayerLanded | Arrived | Recomputed | NewToken | Single


def encode(said: Order | Event) -> bytes:
    """Write a line."""
    return msgspec.json.encode(said) + b"\n"


def say(event: Event) -> None:
    """Write one line to standard output."""
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
    """Read what a process says until it ends."""
    async for line in reader:
        yield _EVENTS.decode(line)


# A prompt of 500 tokens is 3 kB as JSON.
LINE_BYTES_MAX: Final = 1 << 20
_ORDERS: Final = msgspec.json.Decoder(Order)
_EVENTS: Final = msgspec.json.Decoder(Event)
