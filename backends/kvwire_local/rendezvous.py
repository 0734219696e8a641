"""The rendezvous of a lane's two sides, in which each finds a method to read the other.

The server listens on an abstract Unix socket whose name is derived from the lane's
secret. The client connects, and three greetings go over the socket, each authenticated
with the secret::

    client                                        server
      asks the kernel for the server's pid          asks it for the client's pid
      permits the server to read it
      greeting: my cookie, what you may    ->       permits the client to read it
                                                    tries to read the client's cookie
                                           <-       greeting: my cookie, what you may,
                                                    how I read you
      tries to read the server's cookie
      greeting: how I read you             ->

Each side permits the other before the other tries to read, as Yama's scope 1 requires.
A side permits nothing to a process that may not read all of its memory
(:func:`~kvwire_local.shared_arenas.refusal`). Such a process maps one arena, in which
it gets copies.
When the client's join returns, the client has all greetings, and the last one for the
server is in the server's socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np

from kvwire.backend import keep_from_children
from kvwire.errors import BackendUnavailable
from kvwire.types import OneSidedWindows, Role
from kvwire_local.peer import PeerMemory
from kvwire_local.shared_arenas import ReadMethod, refusal
from kvwire_local.tracer_slot import TracerSlot
from kvwire_local.wire import PeerProcess, peer_process

# The address of the cookie, the methods by which this side reads the other, and the
# methods by which the other may read this side.
_GREETING: Final = struct.Struct("<QII")
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_GREETING_BYTES: Final = _GREETING.size + _PROOF_BYTES
_COOKIE_BYTES: Final = 16
# Other processes of this host may connect as well. They are served one after the other,
# each for a limited time.
_BACKLOG: Final = 8
_STRANGER_S: Final = 1.0  # a half of the time that a lane has by default


_EVERYTHING: Final = ReadMethod.MEMORY | ReadMethod.ARENA


class _Greeting(NamedTuple):
    """The other side's description of itself."""

    address: int  # of its cookie
    reads: ReadMethod  # how it reads this side
    may: ReadMethod  # how this side may read it


@dataclass(frozen=True, slots=True)
class RendezvousResult:
    """The result of a rendezvous: a socket, and each side's reading method."""

    sock: socket.socket
    peer: PeerMemory
    is_read: ReadMethod  # how the peer reads this side
    whole: bool  # whether it may read all memory of this process


class Rendezvous:
    """One side of a rendezvous."""

    def __init__(
        self,
        role: Role,
        secret: bytes,
        allowed: ReadMethod,
        tracers: TracerSlot | None,
        windows: OneSidedWindows,
    ) -> None:
        self._role = role
        self._secret = secret
        self._allowed = allowed
        self._tracers = tracers
        self._windows: OneSidedWindows = windows
        self.description = "not up"
        self._refusal = ""
        self._permitted: list[int] = []
        # Its address does not change while this object exists.
        self._cookie = np.frombuffer(bytearray(self._cookie_of(role)), np.uint8)

    def listen(self) -> socket.socket:
        """Open the server's socket, to which the client will connect.

        Raises:
            BackendUnavailable: Such a socket cannot be created here.
        """
        sock = _socket()
        try:
            sock.bind(self._name())
            sock.listen(_BACKLOG)
        except OSError as exc:
            sock.close()
            raise BackendUnavailable(f"local: no Unix socket: {exc}") from exc
        return sock

    async def wait(self, listener: socket.socket) -> RendezvousResult:
        """Wait, as the server, for the client; reject other processes."""
        while True:
            sock = await _accepted(listener)
            try:
                sock.setblocking(False)
                async with asyncio.timeout(_STRANGER_S):
                    return await self._welcome(sock)
            except (BackendUnavailable, OSError, TimeoutError):
                sock.close()
            except BaseException:
                sock.close()
                raise

    async def connect(self) -> RendezvousResult:
        """Connect, as the client, to the server.

        Raises:
            BackendUnavailable: The server is not there, or one side cannot read the
                other.
        """
        loop = asyncio.get_running_loop()
        sock = _socket()
        try:
            await loop.sock_connect(sock, self._name())
            who = peer_process(sock)
            may = self._permit(who)
            await self._greet(sock, ReadMethod(0), may)
            greeting = await self._greeting(sock)
            peer, reads = self._look_at(who, greeting)
            await self._greet(sock, reads, may)
            is_read = greeting.reads & may
        except OSError as exc:
            sock.close()
            raise BackendUnavailable(
                f"local: the server's socket is not reached: {exc}"
            ) from exc
        except BaseException:
            sock.close()
            raise
        if not reads or not is_read:
            sock.close()
            raise BackendUnavailable(
                "local: way=cma is configured, but "
                + ("the server cannot read this process" if reads else self._refusal)
            )
        return RendezvousResult(sock, peer, is_read, may == _EVERYTHING)

    def close(self) -> None:
        """Withdraw the peer's permissions."""
        while self._tracers is not None and self._permitted:
            self._tracers.withdraw(self._permitted.pop())

    async def _welcome(self, sock: socket.socket) -> RendezvousResult:
        who = peer_process(sock)
        greeting = await self._greeting(sock)
        may = self._permit(who)
        peer, reads = self._look_at(who, greeting)
        await self._greet(sock, reads, may)
        is_read = (await self._greeting(sock)).reads & may
        if not reads or not is_read:
            raise BackendUnavailable(
                f"local: a side reads in an invalid way: {reads!r}"
            )
        return RendezvousResult(sock, peer, is_read, may == _EVERYTHING)

    def _permit(self, who: PeerProcess) -> ReadMethod:
        """Give the other side its permissions; return how it may read."""
        if refusal(self._windows, who.uid):
            return ReadMethod.ARENA
        if self._tracers is not None and self._tracers.permit(who.pid):
            self._permitted.append(who.pid)
        return _EVERYTHING

    def _look_at(
        self, who: PeerProcess, greeting: _Greeting
    ) -> tuple[PeerMemory, ReadMethod]:
        """Try to read the other side; return it with the possible methods."""
        peer = PeerMemory(who, greeting.address, self._cookie_of(self._role.other))
        if ReadMethod.MEMORY not in self._allowed:
            self.description = "arena (asked for)"
            return peer, self._allowed
        if ReadMethod.MEMORY in greeting.may:
            why = peer.refusal()
        else:
            why = "the peer sends copies to this process"
        if not why:
            self.description = "cma"
            return peer, self._allowed
        self._refusal = why
        self.description = f"arena ({why})"
        return peer, self._allowed & ~ReadMethod.MEMORY

    # --- greetings --------------------------------------------------------------------

    async def _greet(
        self, sock: socket.socket, reads: ReadMethod, may: ReadMethod
    ) -> None:
        body = _GREETING.pack(self._cookie.ctypes.data, reads, may)
        greeting = body + self._proof(self._role, body)
        await asyncio.get_running_loop().sock_sendall(sock, greeting)

    async def _greeting(self, sock: socket.socket) -> _Greeting:
        """Receive a greeting.

        Raises:
            BackendUnavailable: The peer left, or does not know the secret.
        """
        loop = asyncio.get_running_loop()
        greeting = b""
        while len(greeting) < _GREETING_BYTES:
            more = await loop.sock_recv(sock, _GREETING_BYTES - len(greeting))
            if not more:
                raise BackendUnavailable(
                    "local: the peer has left before the lane was open"
                )
            greeting += more
        body = greeting[: _GREETING.size]
        proof = greeting[_GREETING.size :]
        if not hmac.compare_digest(proof, self._proof(self._role.other, body)):
            raise BackendUnavailable(
                "local: the process that answered does not know the secret"
            )
        address, reads, may = _GREETING.unpack(body)
        return _Greeting(
            address, ReadMethod(reads & _EVERYTHING), ReadMethod(may & _EVERYTHING)
        )

    def _proof(self, role: Role, body: bytes) -> bytes:
        return self._derived(b"greeting %d " % role + body)

    def _cookie_of(self, role: Role) -> bytes:
        return self._derived(b"cookie %d" % role)[:_COOKIE_BYTES]

    def _name(self) -> bytes:
        return b"\0kvwire-" + self._derived(b"name").hex()[:32].encode()

    def _derived(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, b"kvwire local " + label, "sha256")


async def _accepted(listener: socket.socket) -> socket.socket:
    """Return the next connection to a listening socket.

    asyncio's loop.sock_accept() also accepts a connection for a waiter that was
    cancelled in the same turn, then fails with InvalidStateError and leaves the socket
    open.

    Cancel safety: safe, a connection that was not accepted waits in the socket.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return keep_from_children(listener.accept()[0])
        except BlockingIOError:
            ready = asyncio.Event()
        loop.add_reader(listener, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(listener)


def _socket() -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as exc:
        raise BackendUnavailable(f"local: no Unix socket: {exc}") from exc
    sock.setblocking(False)
    return keep_from_children(sock)


# --- whether there can be a lane ------------------------------------------------------

# The boot id is random and changes with each boot of a kernel; it is the same in all
# containers of a host. An abstract Unix socket is visible within one network namespace.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")
_MAGIC: Final = b"kvwlocl1"
_BOOTSTRAP: Final = struct.Struct("<8s16sQ")


@dataclass(frozen=True, slots=True)
class Host:
    """The host and the network namespace of a process."""

    boot_id: bytes
    network: int

    @classmethod
    def here(cls, boot_id: Path = _BOOT_ID, network: Path = _NETWORK) -> Self:
        """Return this process's host and namespace.

        Raises:
            BackendUnavailable: /proc does not contain them.
        """
        try:
            host = uuid.UUID(boot_id.read_text().strip()).bytes
            namespace = network.stat().st_ino
        except (OSError, ValueError) as exc:
            raise BackendUnavailable(
                f"local: /proc does not identify this host: {exc}"
            ) from exc
        return cls(host, namespace)

    def encode(self) -> bytes:
        """Return them as the bootstrap of a lane."""
        return _BOOTSTRAP.pack(_MAGIC, self.boot_id, self.network)

    @classmethod
    def decode(cls, bootstrap: bytes) -> Self:
        """Read them from the bootstrap of a peer.

        Raises:
            BackendUnavailable: It is not a bootstrap of this version.
        """
        if len(bootstrap) != _BOOTSTRAP.size or bootstrap[:8] != _MAGIC:
            raise BackendUnavailable(
                f"local: the peer's bootstrap begins with {bootstrap[:8]!r}, not with "
                f"{_MAGIC!r}; both sides need the same kvwire"
            )
        _, boot_id, network = _BOOTSTRAP.unpack(bootstrap)
        return cls(boot_id, network)

    def require_same(self, other: Host) -> None:
        """Refuse a peer that a Unix socket cannot reach.

        Raises:
            BackendUnavailable: It is on another host or in another network namespace.
        """
        if other.boot_id != self.boot_id:
            raise BackendUnavailable(
                f"local: the peer is on another host (boot id "
                f"{other.boot_id.hex()[:8]}, here {self.boot_id.hex()[:8]})"
            )
        if other.network != self.network:
            raise BackendUnavailable(
                f"local: the peer is in another network namespace ({other.network}, "
                f"here {self.network}); run both containers in one, as a pod does"
            )
