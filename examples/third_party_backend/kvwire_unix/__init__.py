"""kvwire over Unix-domain sockets: a complete transport, as an example to read.

On the stream, each frame is one byte for its kind, the header, and the payload. A link
that ends cleanly sends a goodbye instead of a kind and a header, because the end of a
stream does not show whether it was intended: a killed process ends its streams just as
cleanly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Landing,
    Link,
    LinkHandler,
    Listener,
    Payload,
)
from kvwire.errors import ConnectionLost
from kvwire.limits import HEADER_BYTES, KIB
from kvwire.memory.buffers import slice_payload
from kvwire.memory.copy import copy
from kvwire.types import Address

# The bytes moved at once, before other tasks on the loop get a turn.
PIECE_BYTES = 256 * KIB
_FRAME = b"F"
_GOODBYE = b"G" + bytes(HEADER_BYTES)
_BACKLOG = 128

_log = logging.getLogger(__name__)


class UnixBackend(Backend):
    """Links between processes of one host, at ``unix:///path/to/socket``."""

    scheme: ClassVar[str] = "unix"
    capabilities: ClassVar[Capabilities] = Capabilities(same_host=True)

    @classmethod
    def availability(cls) -> Availability:
        """Available wherever the system has Unix sockets."""
        if hasattr(socket, "AF_UNIX"):
            return Availability(available=True, reason="Unix sockets of the system")
        return Availability(available=False, reason="this system has no Unix sockets")

    async def listen(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """Listen on a path; a path that ends in "/" means a free name in that folder.

        Raises:
            OSError: The path exists, or cannot be written.

        Cancel safety: safe, it never waits.
        """
        return UnixListener(_bound(address.host), accept)

    async def connect(self, address: Address) -> Link:
        """Connect to a path.

        Raises:
            OSError: Nothing listens there, or too many links wait to be accepted.

        Cancel safety: safe, it never waits: such sockets connect at once or not at all.
        """
        sock = _new_socket()
        try:
            sock.connect(address.host)
        except OSError:
            sock.close()
            raise
        return UnixLink(sock, address)


class UnixListener(Listener):
    """A bound path.

    Args:
        sock: The bound socket.
        accept: Called with each link.
    """

    def __init__(self, sock: socket.socket, accept: Callable[[Link], None]) -> None:
        self._sock = sock
        self._accept = accept
        self._path = sock.getsockname()
        self._closed = False
        sock.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(sock, self._take)

    @property
    def address(self) -> Address:
        """The path, including a chosen name."""
        return Address(UnixBackend.scheme, self._path)

    def _take(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            # the peer has gone, or descriptors are short: the next accept may succeed
            return
        sock.setblocking(False)
        link = UnixLink(sock, None)
        try:
            self._accept(link)
        except Exception:  # noqa: BLE001 - the callback's bug costs this link only
            _log.exception("%s: accept raised; the link is aborted", self.address)
            link.abort()

    async def close(self) -> None:
        """Stop accepting; links that were accepted stay open.

        Cancel safety: safe, it never waits.
        """
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        _unlink(self._path)


@dataclass(slots=True)
class _Frame:
    header: bytes
    payload: Payload | None
    token: object | None


class UnixLink(Link):
    """A link over a connected socket.

    One task receives, and another one sends. The receiving task is the parent: the link
    has ended when this task has, and :meth:`abort` cancels it.

    Args:
        sock: Connected and non-blocking.
        remote: The peer's address, on the side that connected.
    """

    _handler: LinkHandler

    def __init__(self, sock: socket.socket, remote: Address | None) -> None:
        self._sock = sock
        self._remote = remote
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._unflushed: list[_Frame] = []
        self._flushed: deque[_Frame] = deque()
        self._work = asyncio.Event()
        self._closing = self._aborted = False
        self._queued_bytes = self._received_bytes = 0

    def start(self, handler: LinkHandler) -> None:
        """See :class:`~kvwire.backend.Link`."""
        self._handler = handler
        self._task = self._loop.create_task(self._run())
        # Not a `finally` in the task, because a task that is cancelled at once never
        # runs.
        self._task.add_done_callback(self._ended)

    def send(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> None:
        """See :class:`~kvwire.backend.Link`."""
        if not (self._closing or self._aborted):
            self._unflushed.append(_Frame(header, payload, token))
            self._queued_bytes += HEADER_BYTES + (payload.nbytes if payload else 0)

    def flush(self) -> None:
        """See :class:`~kvwire.backend.Link`."""
        for frame in self._unflushed:
            if frame.token is None and frame.payload is not None:
                frame.payload = _copied(frame.payload)
        self._flushed.extend(self._unflushed)
        self._unflushed.clear()
        self._work.set()

    def close(self) -> None:
        """See :class:`~kvwire.backend.Link`."""
        if self._closing or self._aborted:
            return
        self.flush()
        self._closing = True
        if self._task is None:
            with contextlib.suppress(OSError):  # the peer has already gone
                self._sock.send(_GOODBYE)
            self._sock.close()

    def abort(self) -> None:
        """See :class:`~kvwire.backend.Link`."""
        self._aborted = True
        self._forget()
        if self._task is None:
            self._sock.close()
        else:
            self._task.cancel()

    @property
    def queued_bytes(self) -> int:
        """See :class:`~kvwire.backend.Link`."""
        return self._queued_bytes

    @property
    def received_bytes(self) -> int:
        """See :class:`~kvwire.backend.Link`."""
        return self._received_bytes

    @property
    def remote_address(self) -> Address | None:
        """See :class:`~kvwire.backend.Link`."""
        return self._remote

    # --- the two tasks ----------------------------------------------------------------

    async def _run(self) -> None:
        """Run both directions until their goodbyes; an error in one ends the other."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_all())
            await self._receive_all()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._aborted = True
        self._forget()
        # Both tasks have ended, so nothing uses this descriptor any more.
        self._sock.close()
        self._handler.link_closed(self, _error_of(task))

    async def _receive_all(self) -> None:
        head = memoryview(bytearray(len(_GOODBYE)))
        while not self._aborted:
            await self._fill(head)
            if head == _GOODBYE:
                self._answer_goodbye()
                return
            self._received_bytes += HEADER_BYTES
            await self._receive_body(head[1:].toreadonly())

    async def _receive_body(self, header: memoryview) -> None:
        # In a separate function, so that an idle link does not keep a landing in a
        # variable.
        landing = self._handler.header_received(self, header)
        # A cancelled task continues until its next await, and the following code may
        # not await.
        if not self._aborted:
            await self._receive_payload(landing)
            self._handler.body_received(self, landing)

    async def _receive_payload(self, landing: Landing) -> None:
        target = landing.payload
        if target is not None and target.nbytes != landing.length:
            raise ValueError(f"{target.nbytes} bytes of memory for {landing.length}")
        staging = memoryview(bytearray(min(landing.length, PIECE_BYTES)))
        for offset in range(0, landing.length, PIECE_BYTES):
            length = min(PIECE_BYTES, landing.length - offset)
            if isinstance(target, memoryview):
                await self._fill(target[offset : offset + length])
            else:
                await self._fill(staging[:length])
                if target is not None:
                    copy(staging[:length], target.slice(offset, length))
            self._received_bytes += length
            await _let_others_run(length)

    async def _fill(self, view: memoryview) -> None:
        while view:
            count = await self._loop.sock_recv_into(self._sock, view)
            if count == 0:
                raise ConnectionLost("the peer ended the stream without a goodbye")
            view = view[count:]

    def _answer_goodbye(self) -> None:
        """End this side's direction too; frames that were not flushed are dropped."""
        if not self._closing:
            self._closing = True
            self._forget()
        self._work.set()

    async def _send_all(self) -> None:
        while not self._aborted:
            busy = bool(self._flushed)
            while self._flushed:
                await self._send_frame(self._flushed.popleft())
            if self._closing:
                # If the peer has gone already, the other task has the error.
                with contextlib.suppress(OSError):
                    await self._loop.sock_sendall(self._sock, _GOODBYE)
                return
            if busy and not self._queued_bytes:
                self._handler.link_writable(self)
            elif not self._flushed:
                self._work.clear()
                await self._work.wait()

    async def _send_frame(self, frame: _Frame) -> None:
        await self._loop.sock_sendall(self._sock, _FRAME + frame.header)
        self._taken(HEADER_BYTES)
        payload = frame.payload
        length = payload.nbytes if payload is not None else 0
        for offset in range(0, length, PIECE_BYTES):
            assert payload is not None
            piece = slice_payload(payload, offset, min(PIECE_BYTES, length - offset))
            data = piece if isinstance(piece, memoryview) else _copied(piece)
            # Returns when the kernel has a copy: from here on, the memory is not read.
            # `StreamWriter.write` and `drain` would not show this.
            await self._loop.sock_sendall(self._sock, data)
            self._taken(data.nbytes)
            await _let_others_run(data.nbytes)
        if frame.token is not None:
            self._handler.frame_sent(self, frame.token)

    def _taken(self, count: int) -> None:
        # Bytes dropped by an abort or a goodbye are no longer counted.
        self._queued_bytes = max(0, self._queued_bytes - count)

    def _forget(self) -> None:
        self._unflushed.clear()
        self._flushed.clear()
        self._queued_bytes = 0


async def _let_others_run(moved: int) -> None:
    """Let other tasks run after a whole piece, even if the peer is fast."""
    if moved == PIECE_BYTES:
        await asyncio.sleep(0)


def _copied(payload: Payload) -> memoryview:
    data = memoryview(bytearray(payload.nbytes))
    copy(payload, data)
    return data


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    """Return why a link ended: None if both sides said goodbye."""
    if task.cancelled():
        return ConnectionLost("the link was aborted on this side")
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is None or isinstance(error, Exception)
    return error


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def _bound(path: str) -> socket.socket:
    """Return a socket bound to ``path``, or to a free name in it if it ends in "/".

    Raises:
        OSError: It cannot be bound.
    """
    chosen_here = path.endswith("/")
    for number in itertools.count():
        sock = _new_socket()
        try:
            sock.bind(f"{path}kv-{os.getpid()}-{number}" if chosen_here else path)
        except OSError as exc:
            sock.close()
            if not chosen_here or exc.errno != errno.EADDRINUSE:
                raise
        else:
            return sock
    raise AssertionError("counting never ends")
