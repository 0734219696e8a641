"""How links end: cleanly, by an error, by us, by the peer, by a bug of the handler."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvwire.backend import Link
from kvwire.errors import ConnectionLost
from kvwire.limits import HEADER_BYTES, MIB, WAKEUP_BYTES
from kvwire.types import Address
from kvwire_tcp import TcpBackend
from kvwire_tcp import duplex as duplex_module
from kvwire_tcp.link import TcpLink
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import (
    ANYWHERE,
    DROP,
    PIECES,
    VIEW,
    Recorder,
    against_a_socket,
    header,
    linked,
)

MORE_THAN_FITS = 24 * MIB


async def test_what_is_queued_when_the_peer_closes_still_arrives() -> None:
    async with linked() as pair:
        body = memoryview(os.urandom(MORE_THAN_FITS))
        pair.near.send(header(len(body), 1), body, "bulk")
        pair.near.flush()
        pair.far.close()
        assert await pair.at_near.end() is None
        assert await pair.at_far.end() is None
        assert pair.at_far.frames == [(1, bytes(body))]


async def test_abort_drops_the_queue_and_resets_the_peer() -> None:
    async with linked() as pair:
        source = bytearray(MORE_THAN_FITS)
        pair.near.send(header(len(source), 1), memoryview(source), "bulk")
        pair.near.flush()
        with pair.at_near.calling("abort"):
            pair.near.abort()
            pair.near.abort()
        assert pair.near.queued_bytes == 0
        source.clear()  # refused while there is a view of it
        assert "aborted on this side" in str(await pair.at_near.end())
        error = await pair.at_far.end()
        assert isinstance(error, ConnectionLost)
        assert isinstance(error.__cause__, ConnectionResetError)
        assert pair.at_near.sent == []
        assert pair.at_far.frames == []


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


@pytest.mark.parametrize("sent", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9])
async def test_the_end_of_the_stream_within_a_frame_is_an_error(sent: int) -> None:
    async with against_a_socket() as (_, recorder, peer):
        peer.sendall((header(10) + bytes(10))[:sent])
        peer.shutdown(socket.SHUT_WR)
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert "in the middle" in str(error)
        assert recorder.frames == []


async def test_frames_sent_before_the_peer_broke_are_delivered_first() -> None:
    """A peer may say why it leaves; our own failed send must not hide it."""
    async with against_a_socket() as (link, recorder, peer):
        peer.sendall(header(3, 1) + b"why")
        reset(peer)
        link.send(header(0), None, "late")
        link.flush()
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert isinstance(error.__cause__, OSError)
        assert error.__cause__.errno in (errno.EPIPE, errno.ECONNRESET)
        assert recorder.frames == [(1, b"why")]
        assert recorder.sent == []


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


async def test_a_peer_that_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duplex_module, "LINGER_S", 0.01)
    async with against_a_socket() as (link, recorder, _):
        link.close()
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert "did not end the connection within 0.01 s" in str(error)
        assert "all was sent" in str(error)


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


@pytest.mark.parametrize(
    "callback", ["header_received", "body_received", "frame_sent", "link_writable"]
)
async def test_a_handler_that_raises_costs_its_link_only(
    callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    bug = RuntimeError("a bug of the handler")

    def broken(*_: object) -> None:
        raise bug

    async with linked() as pair, linked() as other:
        setattr(pair.at_near, callback, broken)
        body = memoryview(bytes(MORE_THAN_FITS))
        for link in (pair.near, pair.far):
            link.send(header(len(body), 1, DROP), body, "bulk")
            link.flush()
        assert await pair.at_near.end() is bug
        assert isinstance(await pair.at_far.end(), ConnectionLost)
        assert "its handler raised" in caplog.text
        assert bug in [
            record.exc_info[1] for record in caplog.records if record.exc_info
        ]
        other.near.send(header(1, 7), memoryview(b"x"))
        other.near.flush()
        await other.at_far.until(lambda: other.at_far.frames)


async def test_a_handler_that_raises_in_link_closed_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Recorder):
        def link_closed(self, link: Link, error: Exception | None) -> None:
            super().link_closed(link, error)
            raise RuntimeError("a bug of the handler")

    async with linked(start=False) as pair:
        broken, far = Broken(), Recorder()
        pair.near.start(broken)
        pair.far.start(far)
        pair.far.close()
        assert await broken.end() is None
        assert await far.end() is None
        assert "its handler raised at the end" in caplog.text


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


_PEER = """
import asyncio, sys
from kvwire.types import Address
from kvwire_tcp import TcpBackend
from tests.backends.kvwire_tcp.recorder import Recorder, header

async def main():
    link = await TcpBackend().connect(Address("tcp", "127.0.0.1", int(sys.argv[1])))
    recorder = Recorder()
    link.start(recorder)
    body = memoryview(bytes(int(sys.argv[2])))
    link.send(header(len(body), 1), body, "token")
    link.flush()
    print("sent", flush=True)
    await recorder.end()

asyncio.run(main())
"""


@pytest.mark.parametrize("length", [100, MORE_THAN_FITS])
async def test_a_killed_peer_is_known_by_the_end_of_its_stream(length: int) -> None:
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = await TcpBackend().listen(ANYWHERE, accepted.set_result)
    command = [sys.executable, "-c", _PEER, str(listener.address.port), str(length)]
    with subprocess.Popen(  # noqa: ASYNC220 - waiting for it is the point
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE
    ) as peer:
        link = await accepted
        await listener.close()
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"sent\n"
        peer.kill()
        peer.wait()
    recorder = Recorder()
    link.start(recorder)
    error = await recorder.end()
    if length == 100:
        # Nothing tells it from a peer that closed: the protocol above has to.
        assert error is None
        assert recorder.frames == [(1, bytes(length))]
    else:
        assert isinstance(error, ConnectionLost)
        assert recorder.frames == []


def reset(peer: socket.socket) -> None:
    """Close with RST."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
