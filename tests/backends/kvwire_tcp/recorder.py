"""A link handler that writes down what it is told, and pairs of links to try it on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Final, Generic, TypeVar

import numpy as np

from kvwire.backend import Backend, Landing, Link, LinkHandler, Payload
from kvwire.kv.fragments import Fragments
from kvwire.limits import HEADER_BYTES
from kvwire.memory.copy import address_of
from kvwire.types import Address
from kvwire_tcp import TcpBackend
from kvwire_tcp.link import TcpLink
from tests.backends.recorders import Told

ANYWHERE: Final = Address("tcp", "127.0.0.1", 0)

# How the receiver of a frame takes its payload.
VIEW, PIECES, DROP, BRING = range(4)
PIECE_BYTES: Final = 7
_HEADER = struct.Struct("<QQB15x")


def header(length: int, number: int = 0, kind: int = VIEW) -> bytes:
    """A header that says what :class:`Recorder` is to do with the payload."""
    return _HEADER.pack(length, number, kind)


def pieces_of(arena: bytearray, length: int) -> Fragments:
    """Fragments of ``length`` bytes in all, with a gap of one byte after each."""
    count = -(-length // PIECE_BYTES)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(PIECE_BYTES + 1)
    lengths = np.full(count, PIECE_BYTES, np.uint64)
    if length % PIECE_BYTES:
        lengths[-1] = length % PIECE_BYTES
    addresses = np.uint64(address_of(arena) if length else 0) + starts
    return Fragments(addresses, lengths, owner=arena, writable=True)


def gathered(arena: bytearray | bytes, length: int) -> bytes:
    """The bytes that :func:`pieces_of` leads to."""
    starts = range(0, len(arena), PIECE_BYTES + 1)
    return b"".join(arena[i : i + PIECE_BYTES] for i in starts)[:length]


class Body(Landing):
    """Where one payload goes; keeps what the header said."""

    __slots__ = ("arena", "number")

    def __init__(self, length: int, number: int, kind: int) -> None:
        self.number = number
        self.arena = bytearray()
        payload: Payload | None = None
        if kind == VIEW:
            self.arena = bytearray(length)
            payload = memoryview(self.arena)
        elif kind == PIECES:
            self.arena = bytearray(2 * length + 1)
            payload = pieces_of(self.arena, length)
        super().__init__(length, payload)

    @property
    def content(self) -> bytes | None:
        """The payload as it arrived; None if it was dropped."""
        if isinstance(self.payload, Fragments):
            return gathered(self.arena, self.length)
        return None if self.payload is None else bytes(self.payload)


class Brought(Body):
    """A payload that the link hands over in its own memory."""

    __slots__ = ()

    anywhere = True


class Recorder(Told, LinkHandler):
    """Notes every callback, and refuses one that comes from inside a call of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[int, bytes | None]] = []
        self.landings: list[Body] = []
        self._calling = ""

    def header_received(self, link: Link, header: memoryview) -> Landing:
        self._note("header_received")
        assert header.readonly
        assert len(header) == HEADER_BYTES
        landing = self.body_of(header)
        self.landings.append(landing)
        return landing

    def body_of(self, header: memoryview) -> Body:
        """Where a header has the payload go."""
        length, number, kind = _HEADER.unpack(header)
        return (Brought if kind == BRING else Body)(length, number, kind)

    @property
    def numbers(self) -> list[int]:
        """Those of the frames that were received."""
        return [number for number, _ in self.frames]

    @property
    def headers(self) -> int:
        """How many headers were received."""
        return len(self.landings)

    def body_received(self, link: Link, landing: Landing) -> None:
        self._note("body_received")
        assert isinstance(landing, Body)
        self.frames.append((landing.number, landing.content))

    def frame_sent(self, link: Link, token: object) -> None:
        self._note("frame_sent")
        self.sent.append(token)

    def link_writable(self, link: Link) -> None:
        self._note("link_writable")
        assert link.queued_bytes == 0
        self.writable += 1

    def link_closed(self, link: Link, error: Exception | None) -> None:
        self._note("link_closed")
        self.closed.append(error)

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """No callback may come before this ends."""
        self._calling = name
        yield
        self._calling = ""

    async def received(self, count: int) -> None:
        """Wait for so many frames."""
        await self.until(lambda: len(self.frames) >= count)

    def _note(self, callback: str) -> None:
        assert not self._calling, f"{callback} from inside {self._calling}"
        super()._note(callback)


AnyLink = TypeVar("AnyLink", bound=Link)


class Pair(Generic[AnyLink]):
    """Two links that lead to each other, and what each was told."""

    def __init__(self, near: AnyLink, far: AnyLink) -> None:
        self.near, self.far = near, far
        self.at_near, self.at_far = Recorder(), Recorder()
        near.start(self.at_near)
        far.start(self.at_far)


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[Pair[TcpLink]]:
    """A pair over loopback."""
    backend = TcpBackend()
    async with linked_by(backend, backend, ANYWHERE, TcpLink) as pair:
        yield pair


@contextlib.asynccontextmanager
async def linked_by(
    connecting: Backend, accepting: Backend, address: Address, kind: type[AnyLink]
) -> AsyncIterator[Pair[AnyLink]]:
    """A pair; aborted at the end, with one ``link_closed`` for each."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = await accepting.listen(address, accepted.set_result)
    try:
        near, far = await connecting.connect(listener.address), await accepted
    finally:
        await listener.close()
    assert isinstance(near, kind)
    assert isinstance(far, kind)
    pair = Pair(near, far)
    try:
        yield pair
    finally:
        near.abort()
        far.abort()
    await pair.at_near.end()
    await pair.at_far.end()
    await asyncio.sleep(0)
    assert len(pair.at_near.closed) == len(pair.at_far.closed) == 1


@contextlib.asynccontextmanager
async def against_a_socket() -> AsyncIterator[tuple[TcpLink, Recorder, socket.socket]]:
    """A started link, and the plain blocking socket that is its peer."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = await TcpBackend().listen(ANYWHERE, accepted.set_result)
    where = listener.address
    with socket.create_connection((where.host, where.port)) as peer:
        link = await accepted
        await listener.close()
        assert isinstance(link, TcpLink)
        recorder = Recorder()
        link.start(recorder)
        yield link, recorder, peer
        link.abort()
        await recorder.end()
        await asyncio.sleep(0)
        assert len(recorder.closed) == 1
