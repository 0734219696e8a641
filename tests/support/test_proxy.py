"""The bad network does what it is told, to the byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvwire import Address
from kvwire_certify.oracle import content
from tests.support.proxy import (
    Cut,
    Direction,
    Ending,
    Proxy,
    Toxic,
)

TO_SERVER, TO_CLIENT = Direction.TO_SERVER, Direction.TO_CLIENT
DATA = content(100_000)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def through(*toxics: Toxic) -> AsyncIterator[tuple[Ends, Ends]]:
    """A client and a server, with a proxy between them."""
    accepted: asyncio.Queue[Ends] = asyncio.Queue()

    async def accept(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Proxy(Address("tcp", "127.0.0.1", port), *toxics) as proxy:
        client = await asyncio.open_connection("127.0.0.1", proxy.address.port)
        there = await accepted.get()
        yield client, there
        for _, writer in (client, there):
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    server.close()
    await server.wait_closed()


async def expect_reset(reading: Awaitable[bytes]) -> None:
    with pytest.raises(ConnectionResetError):
        await reading


async def expect_end(reading: Awaitable[bytes]) -> None:
    assert await reading == b""


async def expect_silence(reading: Awaitable[bytes]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reading, 0.02)


# --- damage ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize(
    ("ending", "receiver", "sender"),
    [
        (Ending.FIN, expect_end, expect_end),
        (Ending.RST, expect_reset, expect_reset),
        (Ending.HALF_CLOSE, expect_end, expect_silence),
        (Ending.SILENCE, expect_silence, expect_silence),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 5, 70_000])
async def test_a_cut_lets_exactly_so_many_bytes_through(
    at: int,
    ending: Ending,
    receiver: Callable[[Awaitable[bytes]], Awaitable[None]],
    sender: Callable[[Awaitable[bytes]], Awaitable[None]],
    way: Direction,
) -> None:
    async with through(Cut(way, at, ending)) as (client, server):
        near, far = (client, server) if way is TO_SERVER else (server, client)
        near[1].write(DATA[: at + 1])
        if ending is not Ending.RST:
            # A reset may destroy what was received and not read.
            assert await far[0].readexactly(at) == DATA[:at]
            await receiver(far[0].read(1))
        else:
            await receiver(far[0].read(-1))
        await sender(near[0].read(1))
