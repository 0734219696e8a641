"""How links end: cleanly, by an error, by us, by the peer, by a bug of the handler."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import pytest

from kvwire.errors import ConnectionLost
from kvwire.limits import MIB, WAKEUP_BYTES
from kvwire.types import Address
from kvwire_tcp import duplex as duplex_module
from kvwire_tcp.link import TcpLink
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import (
    DROP,
    PIECES,
    VIEW,
    Recorder,
    against_a_socket,
    header,
)

MORE_THAN_FITS = 24 * MIB


@pytest.mark.parametrize("by_peer", [False, True])
@pytest.mark.parametrize("kind", [VIEW, PIECES])
async def test_a_destination_is_let_go_when_the_link_ends_in_mid_frame(
    kind: int, by_peer: bool
) -> None:
    async with against_a_socket() as (link, recorder, peer):
        peer.sendall(header(MIB, 1, kind) + bytes(9))
        await recorder.until(lambda: recorder.landings)
        if by_peer:
            reset(peer)
            await recorder.end()  # the recorder keeps the error, and what that keeps
        else:
            link.abort()
        landing = recorder.landings[0]
        landing.payload = None
        landing.arena.clear()  # refused while there is a view of it
        assert isinstance(await recorder.end(), ConnectionLost)


@pytest.mark.parametrize("length", [0, 9, 3 * WAKEUP_BYTES])
async def test_a_reset_that_comes_with_the_last_bytes_is_not_missed(
    length: int,
) -> None:
    """libuv reports the error once, together with what can still be received."""
    async with against_a_socket() as (_, recorder, peer):
        peer.settimeout(0)
        frame = memoryview(header(length, 1, DROP) + bytes(length))
        with contextlib.suppress(BlockingIOError):
            while frame:
                frame = frame[peer.send(frame) :]
        reset(peer)
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert isinstance(error.__cause__, ConnectionResetError)
        assert recorder.headers == 1


async def test_a_peer_that_does_not_read_is_given_up_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duplex_module, "LINGER_S", 0.05)
    async with against_a_socket() as (link, recorder, _):
        link.send(header(MORE_THAN_FITS), memoryview(bytes(MORE_THAN_FITS)), 1)
        link.close()
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert "bytes unsent" in str(error)


async def test_a_slow_peer_is_waited_for_while_it_takes_something() -> None:
    async with against_a_socket() as (link, recorder, peer):
        link.close()
        first = link._linger
        link._on_linger(link._queue.sent_bytes - 1)
        assert not recorder.closed
        assert link._linger is not first
        first.cancel()  # type: ignore[union-attr]
        peer.close()
        assert await recorder.end() is None


async def test_abort_after_the_loop_has_closed_only_closes_the_socket() -> None:
    loop = asyncio.new_event_loop()
    near, far = socket.socketpair()
    with far:
        near.setblocking(False)
        link = TcpLink(PlainWire(near), Address("tcp", "::1", 1), loop)
        recorder = Recorder()
        link.start(recorder)
        loop.close()
        link.abort()
        assert near.fileno() == -1
        assert recorder.closed == []


def reset(peer: socket.socket) -> None:
    """Close with RST."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
