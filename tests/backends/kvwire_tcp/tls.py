"""Two wires inside TLS over a network in memory, which takes as much as a test says."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import cast

from kvwire.config import Config
from kvwire.security.tls import Credentials
from kvwire.types import Role
from kvwire_tcp.tls_wire import Buffers, TlsWire
from tests.support.certificates import FAR, NEAR, Authority

ALL = 1 << 30


class Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.held = bytearray()
        self.room = ALL
        self.ended = False


class FakeSocket:
    """One end; of a socket only what a wire uses."""

    def __init__(self, out: Pipe, into: Pipe) -> None:
        self.out, self.into = out, into
        self.split: Callable[[int], int] = lambda most: most

    def send(self, data: memoryview) -> int:
        most = min(len(data), self.out.room)
        count = self.split(most) if most else 0
        if not count:
            raise BlockingIOError
        self.out.held += data[:count]
        self.out.room -= count
        return count

    def recv_into(self, target: memoryview) -> int:
        most = min(len(target), len(self.into.held))
        if not most and self.into.ended:
            return 0
        count = self.split(most) if most else 0
        if not count:
            raise BlockingIOError
        target[:count] = self.into.held[:count]
        del self.into.held[:count]
        return count


class Wires:
    """A client's and a server's wire, connected."""

    def __init__(self, authority: Authority, *, accepted: bool = True) -> None:
        pipes = Pipe(), Pipe()
        self.socks = {
            Role.CLIENT: FakeSocket(pipes[0], pipes[1]),
            Role.SERVER: FakeSocket(pipes[1], pipes[0]),
        }
        peers = NEAR if accepted else "nobody"
        configs = {
            Role.CLIENT: authority.config(NEAR, FAR),
            Role.SERVER: authority.config(FAR, peers),
        }
        buffers = Buffers()
        self.wires = {
            role: TlsWire(
                cast("socket.socket", sock),
                Credentials(Config(**configs[role])),
                role,
                buffers,
            )
            for role, sock in self.socks.items()
        }

    @property
    def client(self) -> TlsWire:
        return self.wires[Role.CLIENT]

    @property
    def server(self) -> TlsWire:
        return self.wires[Role.SERVER]

    def shake(self) -> None:
        """Let both go on with the handshake until it is over."""
        while not (self.client.opened and self.server.opened):
            for wire in self.wires.values():
                if not blocked(wire.shake_hands):
                    blocked(wire.flush)


def blocked(call: Callable[[], object]) -> bool:
    """Whether a call would block."""
    try:
        call()
    except BlockingIOError:
        return True
    return False
