"""The entry point of the backend ``tcp``: listens, and connects."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Finding,
    Link,
    Listener,
    TlsFiles,
    keep_from_children,
)
from kvwire.backend.lane import Lane, LaneContext
from kvwire.backend.sockets import listening_socket
from kvwire.errors import BackendUnavailable
from kvwire.types import Address, Role
from kvwire_tcp.lane import PendingLanes, TcpLane
from kvwire_tcp.link import TcpLink
from kvwire_tcp.listener import TcpListener
from kvwire_tcp.options import address_from, findings, tune
from kvwire_tcp.tls_wire import Buffers, TlsWire
from kvwire_tcp.waiting import hands_shaken
from kvwire_tcp.wire import PlainWire, Wire

# The most that the kernel allows; to a client, a full backlog looks like packet loss.
_BACKLOG: Final = socket.SOMAXCONN
_REQUIRED: Final = ("sendmsg", "recvmsg_into")

# The family and the socket address, as getaddrinfo returns them.
_Target = tuple[int, Any]


class TcpBackend(Backend):
    """Moves frames and payload over TCP, IPv4 and IPv6."""

    scheme: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities(lanes=True, tls=True)

    def __init__(self) -> None:
        self._pending_lanes = PendingLanes()
        self._files: TlsFiles | None = None
        self._buffers: Buffers | None = None

    def use_tls(self, files: TlsFiles) -> None:
        self._files = files
        self._buffers = Buffers()

    @classmethod
    def rank(cls) -> int:
        """Return a rank after ``local``, and before transports used only on request."""
        return 30

    @classmethod
    def availability(cls) -> Availability:
        missing = [name for name in _REQUIRED if not hasattr(socket.socket, name)]
        if missing:
            return Availability(
                available=False,
                reason=f"this platform's sockets have no {', '.join(missing)}",
                remedy="run on Linux or macOS; on Windows, under WSL",
            )
        return Availability(available=True, reason="sockets of the operating system")

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """Return the sizes of the kernel's socket buffers."""
        return findings()

    async def listen(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """Listen on a numeric address.

        Cancel safety: safe, nothing stays bound.
        """
        loop = asyncio.get_running_loop()
        family, sockaddr = _numeric(address)
        accepted = partial(self._wire, role=Role.SERVER)
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(listening_socket(family, sockaddr, _BACKLOG))
            keep_from_children(sock)
            sock.setblocking(False)
            listener = TcpListener(sock, accept, accepted, self._pending_lanes, loop)
            undo.pop_all()
        return listener

    async def connect(self, address: Address) -> Link:
        """Connect to a numeric address.

        Cancel safety: safe, a half-made connection is closed.
        """
        sock, remote = await _connected(address)
        wire = self._wire(sock, Role.CLIENT, address.name)
        return TcpLink(wire, remote, asyncio.get_running_loop())

    def open_lane(self, context: LaneContext) -> Lane:
        remote = context.remote_address
        if remote is None or remote.scheme != self.scheme:
            raise BackendUnavailable(
                "a lane over tcp uses the address of the control link, which does "
                "not run over tcp here"
            )
        return TcpLane(
            context, self._pending_lanes, self._dial, asyncio.get_running_loop()
        )

    async def _dial(self, address: Address) -> tuple[Wire, Address]:
        """Connect; return a wire that is ready for use, and the address it leads to."""
        sock, remote = await _connected(address)
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            wire = self._wire(sock, Role.CLIENT, address.name)
            await hands_shaken(wire, asyncio.get_running_loop())
            undo.pop_all()
        return wire, remote

    def _wire(self, sock: socket.socket, role: Role, name: str = "") -> Wire:
        if self._files is None:
            return PlainWire(sock)
        assert self._buffers is not None
        return TlsWire(sock, self._files.current(), role, self._buffers, name)


async def _connected(address: Address) -> tuple[socket.socket, Address]:
    """Return a connected socket with its options set, and the address it leads to.

    Cancel safety: safe, a half-made connection is closed.
    """
    family, sockaddr = _numeric(address)
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        keep_from_children(sock)
        tune(sock, sockaddr[0])
        await _connect(sock, sockaddr)
        remote = sock.getpeername()
        if remote == sock.getsockname():
            # If nothing listens on a port of the ephemeral range, this very socket can
            # get that port and connect to itself (simultaneous open, RFC 9293 3.5).
            code = errno.ECONNREFUSED
            raise ConnectionRefusedError(code, os.strerror(code))
        undo.pop_all()
    return sock, replace(address_from(remote), name=address.name)


async def _connect(sock: socket.socket, sockaddr: Any) -> None:
    """Connect a non-blocking socket.

    ``loop.sock_connect`` is not used, because uvloop's version resolves the address on
    libuv's threads. A process that is forked later waits for those threads at its exit,
    although it does not have them.

    Raises:
        OSError: The address cannot be reached.

    Cancel safety: safe, the caller closes the socket.
    """
    code = sock.connect_ex(sockaddr)
    if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        loop = asyncio.get_running_loop()
        writable = asyncio.Event()
        loop.add_writer(sock, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _numeric(address: Address) -> _Target:
    """Return the socket address of a numeric host.

    Raises:
        OSError: The host is a name, which kvwire should have resolved (RFC 8305), or it
            is empty, which would mean every address of this machine.
    """
    if not address.host:
        raise OSError(errno.EADDRNOTAVAIL, f"{address}: the host is missing")
    family, _, _, _, sockaddr = socket.getaddrinfo(
        address.host,
        address.port,
        type=socket.SOCK_STREAM,
        flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
    )[0]
    return family, sockaddr
