"""Operations of a wire as coroutines, before a link or lane uses its socket.

Coroutines that connect first perform the handshake and exchange a few bytes. None of
these may run while a link or lane uses the same socket.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from kvwire_tcp.wire import Wire

_T = TypeVar("_T")


async def hands_shaken(wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
    """Wait until the wire is open.

    Cancel safety: safe, but the wire cannot be used any more.
    """
    await _done(wire, loop, wire.shake_hands)
    if not wire.opened:
        raise ConnectionResetError(
            errno.ECONNRESET, "the connection ended before any data"
        )


async def sent(wire: Wire, data: bytes, loop: asyncio.AbstractEventLoop) -> None:
    """Send all of ``data``.

    Cancel safety: safe, but a part may have been sent.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[await _done(wire, loop, lambda: wire.send(rest)) :]  # noqa: B023
    await _done(wire, loop, wire.flush)


async def received(wire: Wire, count: int, loop: asyncio.AbstractEventLoop) -> bytes:
    """Receive ``count`` bytes; less if the stream ends before that.

    Cancel safety: safe, but a part may be lost.
    """
    place = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        rest = place[filled:]
        more = await _done(wire, loop, lambda: wire.recv_into(rest))  # noqa: B023
        if not more:
            break
        filled += more
    return bytes(place[:filled])


async def _done(
    wire: Wire, loop: asyncio.AbstractEventLoop, call: Callable[[], _T]
) -> _T:
    """Repeat a call until it does not block, whenever the socket is ready."""
    while True:
        try:
            return call()
        except BlockingIOError:
            await _ready(wire, loop)


async def _ready(wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
    """Wait until the socket is readable, or writable if something is unsent."""
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(wire.sock, wake)
    if wire.unsent:
        loop.add_writer(wire.sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(wire.sock)
        loop.remove_writer(wire.sock)
