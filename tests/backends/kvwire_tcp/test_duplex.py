"""A connected socket, whatever is read from it: what is sent when, and how it ends.

The reader here takes plain bytes, up to a mark that says whether the end may come, so
nothing of frames or lanes is in the way. Links and lanes have tests of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from kvwire.errors import ConnectionLost
from kvwire.limits import MIB
from kvwire.types import Address
from kvwire_tcp import duplex as duplex_module
from kvwire_tcp.duplex import Duplex
from kvwire_tcp.wire import PlainWire, Wire
from tests.support.logs import logged
from tests.support.pairs import until
from tests.support.sockets import tcp_sockets

REMOTE = Address("tcp", "192.0.2.7", 40000)
BULK = bytes(range(256)) * (4 * MIB // 256)
# Stands for half a frame: the peer must not end right after it.
HALF = b"<"


class Bytes:
    """A reader that keeps what comes; see Reader."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.drained = False
        self.stopped = False
        self.content = bytearray()
        self.on_bytes: Callable[[], None] = lambda: None
        self._buffer = bytearray(64 * 1024)

    @property
    def position(self) -> str:
        return "half a frame" if self.content.endswith(HALF) else ""

    def receive(self, wire: Wire) -> int:
        count = wire.recv_into(memoryview(self._buffer))
        self.received_bytes += count
        return count

    def deliver(self, count: int) -> None:
        self.content += self._buffer[:count]
        self.on_bytes()

    def stop(self) -> None:
        self.stopped = True


class Socket(Duplex):
    """Keeps what it is told.

    Attributes:
        sent: Tokens given back.
        writable: How often it was writable again.
        closed: How it ended; one entry.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(PlainWire(sock), REMOTE, asyncio.get_running_loop())
        self.reader = Bytes()
        self.sent: list[object] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.on_sent: Callable[[], None] = lambda: None
        self._over = asyncio.Event()

    def begin(self) -> None:
        self._begin(self.reader)

    def send(self, content: bytes, token: object) -> None:
        """Queue, and flush."""
        self._queue.lend(memoryview(content), token)
        self.flush()

    async def end(self) -> Exception | None:
        await self._over.wait()
        return self.closed[0]

    def _sent(self, token: object) -> None:
        self.sent.append(token)
        self.on_sent()

    def _writable(self) -> None:
        self.writable += 1

    def _closed(self, error: Exception | None) -> None:
        self.closed.append(error)
        self._over.set()


class Peer:
    """The other end: a plain socket that does what the test says."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def say(self, content: bytes) -> None:
        await self._loop.sock_sendall(self.sock, content)

    async def hear(self, count: int) -> bytes:
        """So many bytes, or fewer at the end of the stream."""
        heard = bytearray()
        while len(heard) < count:
            part = await self._loop.sock_recv(self.sock, count - len(heard))
            if not part:
                break
            heard += part
        return bytes(heard)

    def end(self) -> None:
        """Say that nothing follows."""
        self.sock.shutdown(socket.SHUT_WR)


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[tuple[Socket, Peer]]:
    """A socket that has begun, and its peer; it hears of its end once."""
    far, near = tcp_sockets()
    for sock in (near, far):
        sock.setblocking(False)
    ours = Socket(near)
    ours.begin()
    with far:
        try:
            yield ours, Peer(far)
        finally:
            ours.abort()
        await ours.end()
        await asyncio.sleep(0)
        assert len(ours.closed) == 1
        assert near.fileno() == -1
        assert ours.reader.stopped


# --- sending --------------------------------------------------------------------------


async def test_a_flush_sends_at_once() -> None:
    """Before it returns: the token is back, and the peer has the bytes."""
    async with ends() as (ours, peer):
        ours.send(b"now", "token")
        assert ours.sent == ["token"]
        assert peer.sock.recv(3) == b"now"
        assert ours.queued_bytes == 0
        assert not ours.writable


async def test_what_the_kernel_has_no_room_for_waits_and_says_when_it_is_gone() -> None:
    async with ends() as (ours, peer):
        for token in range(4):
            ours.send(BULK, token)
        assert ours.queued_bytes > 0
        assert len(ours.sent) < 4
        assert await peer.hear(4 * len(BULK)) == 4 * BULK
        await until(lambda: ours.writable)
        assert ours.sent == [0, 1, 2, 3]
        assert ours.queued_bytes == 0


async def test_a_token_s_callback_may_send_more() -> None:
    async with ends() as (ours, peer):

        def again() -> None:
            if len(ours.sent) < 50:
                ours.send(b"x", len(ours.sent))

        ours.on_sent = again
        ours.send(b"x", 0)
        assert await peer.hear(50) == 50 * b"x"
        await until(lambda: ours.sent == list(range(50)))


# --- receiving ------------------------------------------------------------------------


async def test_all_that_comes_is_delivered() -> None:
    async with ends() as (ours, peer):
        await peer.say(BULK)
        await until(lambda: ours.received_bytes == len(BULK))
        assert ours.reader.content == BULK


async def test_a_reader_that_raises_ends_this_socket_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ends() as (ours, peer):
        bug = ZeroDivisionError("a bug")

        def fail() -> None:
            raise bug

        ours.reader.on_bytes = fail
        await peer.say(b"x")
        assert await ours.end() is bug
    (record,) = logged(caplog)
    assert record.levelno == logging.ERROR
    assert "its handler raised" in record.getMessage()


# --- ends -----------------------------------------------------------------------------


async def test_a_peer_that_ends_between_two_frames_ends_cleanly() -> None:
    async with ends() as (ours, peer):
        await peer.say(b"whole")
        peer.end()
        assert await ours.end() is None
        assert ours.reader.content == b"whole"
        assert await peer.hear(1) == b""


async def test_a_peer_that_ends_within_a_frame_is_lost() -> None:
    async with ends() as (ours, peer):
        await peer.say(b"whole" + HALF)
        peer.end()
        error = await ours.end()
        assert isinstance(error, ConnectionLost)
        assert "in the middle, after half a frame" in str(error)


async def test_a_close_sends_what_is_queued_and_waits_for_the_peer() -> None:
    async with ends() as (ours, peer):
        for token in range(3):
            ours.send(BULK, token)
        ours.close()
        ours.close()
        assert await peer.hear(3 * len(BULK) + 1) == 3 * BULK
        assert not ours.closed
        await peer.say(b"the last word")
        peer.end()
        assert await ours.end() is None
        assert ours.sent == [0, 1, 2]
        assert ours.reader.content == b"the last word"


async def test_who_sees_the_peer_s_end_sends_what_it_has_first() -> None:
    async with ends() as (ours, peer):
        for token in range(3):
            ours.send(BULK, token)
        peer.end()
        assert await peer.hear(3 * len(BULK) + 1) == 3 * BULK
        assert await ours.end() is None
        assert ours.sent == [0, 1, 2]


async def test_a_peer_that_never_ends_is_waited_for_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duplex_module, "LINGER_S", 0.02)
    async with ends() as (ours, _):
        ours.close()
        error = await ours.end()
        assert isinstance(error, ConnectionLost)
        assert "within 0.02 s of our close (all was sent)" in str(error)


async def test_an_abort_resets_so_that_the_peer_never_takes_half_for_all() -> None:
    async with ends() as (ours, peer):
        ours.send(BULK, "never told")
        ours.abort()
        assert ours.queued_bytes == 0
        assert not ours.closed
        assert isinstance(await ours.end(), ConnectionLost)
        with pytest.raises(ConnectionResetError):
            await peer.hear(len(BULK) + 1)


async def test_what_the_peer_said_before_it_reset_is_heard() -> None:
    """It may say why; the reset is the end, and no frame of ours is given back."""
    async with ends() as (ours, peer):
        ours.send(BULK, "never told")
        ours.send(BULK, "nor this")
        await peer.say(b"the reason")
        await until(lambda: ours.received_bytes)
        peer.sock.close()
        error = await ours.end()
        assert isinstance(error, ConnectionLost)
        assert isinstance(error.__cause__, OSError)
        assert ours.reader.content == b"the reason"
        assert "nor this" not in ours.sent


async def test_what_has_not_begun_ends_without_a_word() -> None:
    for how in (Socket.close, Socket.abort):
        near, far = socket.socketpair()
        with far:
            ours = Socket(near)
            how(ours)
            await asyncio.sleep(0)
            assert not ours.closed
            assert near.fileno() == -1
            assert not ours.received_bytes


async def test_a_socket_can_be_given_away() -> None:
    """The bytes that nobody has read go with it; what gave it away has ended."""
    async with ends() as (ours, peer):
        reason = ConnectionLost("it was a lane's")
        sock = ours._detach(reason).sock
        await peer.say(b"for the next owner")
        assert await ours.end() is reason
        with sock:
            loop = asyncio.get_running_loop()
            assert await loop.sock_recv(sock, 100) == b"for the next owner"
        assert not ours.reader.content


async def test_an_error_at_the_very_end_is_logged_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = Socket._closed

    def fail(ours: Socket, error: Exception | None) -> None:
        closed(ours, error)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Socket, "_closed", fail)
    async with ends() as (ours, peer):
        peer.end()
        assert await ours.end() is None
    assert "its handler raised at the end" in caplog.text
