"""The few words before there is a link: all of them, however the kernel cuts them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvwire_tcp.waiting import hands_shaken, said
from kvwire_tcp.wire import PlainWire, Wire


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets that block nobody."""
    left, right = socket.socketpair()
    with left, right:
        for sock in (left, right):
            sock.setblocking(False)
        yield left, right


Ends = tuple[socket.socket, socket.socket]


class Narrow:
    """A wire that takes three bytes, then keeps one until the socket has room."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = 0
        self.opened = False
        self.flushes = 0

    def send(self, data: memoryview) -> int:
        return self.sock.send(data[:3])

    def flush(self) -> None:
        self.flushes += 1
        self.unsent = 1 if self.flushes == 1 else 0
        if self.unsent:
            raise BlockingIOError

    def shake_hands(self) -> None:
        """The peer ends it without a word."""


def as_wire(wire: Any) -> Wire:
    return cast(Wire, wire)


async def test_all_is_said_and_flushed(ends: Ends) -> None:
    """What a wire has taken and the kernel has not is waited for as well."""
    wire = Narrow(ends[0])
    await said(as_wire(wire), b"abcdefgh", asyncio.get_running_loop())
    assert ends[1].recv(99) == b"abcdefgh"
    assert (wire.flushes, wire.unsent) == (2, 0)


async def test_a_wire_that_never_opens(ends: Ends) -> None:
    with pytest.raises(ConnectionResetError, match="without a word"):
        await hands_shaken(as_wire(Narrow(ends[0])), asyncio.get_running_loop())
    await hands_shaken(PlainWire(ends[0]), asyncio.get_running_loop())
