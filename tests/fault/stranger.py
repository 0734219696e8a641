"""A peer made by hand on a real socket: it says what a test tells it to say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvwire import Address, Connection, ConnectionLost, limits
from kvwire.errors import ProtocolError
from kvwire.memory.checksum import checksum
from kvwire.proto.handshake import Handshake, Identity
from kvwire.wire.control import Body, encode_body
from kvwire.wire.handshake_messages import NONCE_BYTES, ConnectionParameters
from tests.support.core_pair.handshakes import begin, identity, receive
from tests.support.splitter import Frame, Splitter

# The limits of a kvwire peer that nobody has configured.
TERMS = ConnectionParameters(
    chunk_bytes=limits.CHUNK_BYTES,
    eager_bytes=limits.EAGER_BYTES,
    window_bytes=limits.EAGER_WINDOW_BYTES,
    window_messages=limits.EAGER_WINDOW_MESSAGES,
)
_READ_BYTES = 64 * 1024


class Stranger:
    """One end of a TCP connection, and the frames it could send if it wanted to."""

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self.handshake = handshake
        self._socket = sock
        self._splitter = Splitter()
        self._frames: list[Frame] = []
        self._loop = asyncio.get_running_loop()

    async def shake(self) -> None:
        """Carry out the handshake as an honest peer would."""
        await self._say_outgoing()
        while self.handshake.agreement is None:
            frame = await self.hear()
            receive(self.handshake, (frame.raw_header, frame.body))
            await self._say_outgoing()

    async def say(self, *frames: bytes) -> None:
        """Send bytes, whatever they are."""
        await self._loop.sock_sendall(self._socket, b"".join(frames))

    async def hear(self) -> Frame:
        """The next frame of the other side."""
        while not self._frames:
            data = await self._loop.sock_recv(self._socket, _READ_BYTES)
            if not data:
                raise EOFError
            self._frames += self._splitter.feed(data)
            assert self._splitter.broken is None, self._splitter.broken
        return self._frames.pop(0)

    async def expect_gone(self) -> None:
        """Wait for the other side to end the connection, dropping what it says."""
        with contextlib.suppress(ConnectionError):
            while await self._loop.sock_recv(self._socket, _READ_BYTES):
                pass

    def control(self, frame_type: int, body: Body, *, request: int = 0) -> bytes:
        """A control frame: the next in order, and sealed if that was agreed."""
        return self.raw_control(frame_type, encode_body(body), request=request)

    def raw_control(self, frame_type: int, body: bytes, *, request: int = 0) -> bytes:
        """A control frame with a body of any bytes."""
        framing = self.handshake.framing
        return b"".join(framing.control(frame_type, body, request=request))

    def payload(self, frame_type: int, data: bytes, **fields: Any) -> bytes:
        """A payload frame with the right check."""
        check = fields.pop("check", checksum(memoryview(data)))
        framing = self.handshake.framing
        return framing.payload(frame_type, len(data), check=check, **fields) + data

    def close(self) -> None:
        """Leave without a word."""
        self._socket.close()

    async def _say_outgoing(self) -> None:
        outgoing = self.handshake.outgoing
        await self.say(*(header + body for header, body in outgoing))
        outgoing.clear()


@contextlib.asynccontextmanager
async def dial(
    address: Address, who: Identity | None = None, *, shake: bool = True
) -> AsyncIterator[Stranger]:
    """Connect to a communicator, and shake hands with it unless told otherwise."""
    with socket.socket() as sock:
        sock.setblocking(False)
        target = (address.host, address.port)
        await asyncio.get_running_loop().sock_connect(sock, target)
        mine = who or identity("stranger", parameters=TERMS)
        nonces = (secrets.token_bytes(NONCE_BYTES), bytes(NONCE_BYTES))
        stranger = Stranger(sock, begin(mine, nonces=nonces, backends=("tcp",)).client)
        if shake:
            await stranger.shake()
        yield stranger


@contextlib.asynccontextmanager
async def answering(
    who: Identity | None = None,
) -> AsyncIterator[tuple[Address, asyncio.Queue[Stranger]]]:
    """An address where strangers answer; each comes out of the queue at once."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    loop = asyncio.get_running_loop()
    answered: asyncio.Queue[Stranger] = asyncio.Queue()
    mine = who or identity("stranger", parameters=TERMS)
    made: list[Stranger] = []

    async def answer() -> None:
        while True:
            sock, _ = await loop.sock_accept(listening)
            made.append(Stranger(sock, begin(server=mine).server))
            answered.put_nowait(made[-1])

    task = asyncio.create_task(answer())
    try:
        yield Address("tcp", *listening.getsockname()), answered
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listening.close()
        for stranger in made:
            stranger.close()


async def expect_ended_by(rule: str, connection: Connection) -> None:
    """A connection has ended because of a rule, and says so."""
    await connection.wait_closed()
    with pytest.raises(ConnectionLost, match=rule) as caught:
        await connection.send(1, b"x")
    cause: BaseException | None = caught.value
    while not isinstance(cause, ProtocolError | None):
        cause = cause.__cause__
    assert cause is not None
    assert cause.rule == rule
