"""What moves bytes between memory and one socket: as they are, or inside TLS.

A link and a lane decide when to send and to receive, their queue and their reader from
where and to where; a *wire* is the one thing between them and the socket. So what is
said in :mod:`kvwire_tcp.duplex` about turns and endings holds for both kinds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, final

from kvwire.limits import WAKEUP_BYTES
from kvwire.memory.iovec import Iovecs, readv, writev
from kvwire.types import PeerIdentity

Bytes = bytes | memoryview


class Wire(Protocol):
    """Moves the bytes of a connected socket, encrypted or as they are.

    Each call that moves bytes does so once, blocks for nobody, and says how many of
    *our* bytes it has moved.

    Raises:
        BlockingIOError: None can be moved now; the socket will say when.
        OSError: The connection is broken.
        AuthenticationFailed: It is not, but the peer is nobody we may talk to.
    """

    @property
    def sock(self) -> socket.socket:
        """Return the socket, which it owns."""

    @property
    def opened(self) -> bool:
        """Tell whether bytes can be sent without receiving some first."""

    @property
    def unsent(self) -> int:
        """Return the bytes that were taken from us and not yet by the kernel."""

    @property
    def more(self) -> bool:
        """Tell whether the wire holds received bytes the socket does not announce."""

    def proven(self) -> PeerIdentity | None:
        """Return the peer's identity, if this wire proves it."""

    def shake_hands(self) -> None:
        """Go on with what has to be done before it is ``opened``."""

    def send(self, data: Bytes, /) -> int:
        """Send bytes."""

    def sendmsg(self, views: Sequence[Bytes], /) -> int:
        """Send several views, one behind the other."""

    def send_list(self, part: Iovecs) -> int:
        """Send what is left of a fragment list."""

    def recv_into(self, target: memoryview, /) -> int:
        """Receive; 0 at the end of the stream."""

    def recv_two(self, target: memoryview, behind: memoryview) -> int:
        """Receive into one view, and what comes behind it perhaps into another."""

    def recv_list(self, part: Iovecs, behind: tuple[int, int] | None = None) -> int:
        """Receive into what is left of a fragment list, and perhaps behind it.

        Args:
            part: The list. How much was asked for is noted in it, and how much is left
                of it not changed.
            behind: Address and length of memory for what follows the list.
        """

    def look(self) -> bool:
        """Tell whether bytes are there, without taking them; False at the end."""

    def flush(self) -> None:
        """Send what is ``unsent``, all of it."""

    def say_end(self) -> None:
        """Prepare to tell the peer that nothing follows; this may make bytes unsent."""


@final
class PlainWire:
    """Moves bytes over the socket as they are."""

    __slots__ = ("recv_into", "send", "sendmsg", "sock")

    # The kernel takes from our memory, keeps what is not received, and says so.
    opened: ClassVar[bool] = True
    unsent: ClassVar[int] = 0
    more: ClassVar[bool] = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # Without a detour: a small message is sent and received in some microseconds.
        self.send: Callable[[Any], int] = sock.send
        self.sendmsg: Callable[[Any], int] = sock.sendmsg
        self.recv_into: Callable[[Any], int] = sock.recv_into

    def proven(self) -> PeerIdentity | None:
        return None

    def shake_hands(self) -> None:
        """Do nothing: there is no handshake."""

    def send_list(self, part: Iovecs) -> int:
        return writev(self.sock.fileno(), part.window(WAKEUP_BYTES))

    def recv_two(self, target: memoryview, behind: memoryview) -> int:
        return self.sock.recvmsg_into((target, behind))[0]

    def recv_list(self, part: Iovecs, behind: tuple[int, int] | None = None) -> int:
        return readv(self.sock.fileno(), part.window(WAKEUP_BYTES, behind))

    def look(self) -> bool:
        return bool(self.sock.recv(1, socket.MSG_PEEK))

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def say_end(self) -> None:
        """Do nothing: the end of the stream says it."""
