"""Moves bytes between memory and one socket, plain or inside TLS.

A link or lane decides when to send and to receive; its queue and its reader provide the
memory. A *wire* is the only object between them and the socket. So the rules in
:mod:`kvwire_tcp.duplex` about turns and ends apply to both kinds of wires.
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
    """Moves the bytes of a connected socket, encrypted or plain.

    Each call that moves bytes does so once, never blocks, and returns how many of *our*
    bytes it has moved.

    Raises:
        BlockingIOError: No bytes can be moved now; the socket will become ready.
        OSError: The connection is broken.
        AuthenticationFailed: The connection works, but the peer is not accepted.
    """

    @property
    def sock(self) -> socket.socket:
        """Return the socket, which the wire owns."""

    @property
    def opened(self) -> bool:
        """Return whether the handshake has ended, so that bytes can be sent."""

    @property
    def unsent(self) -> int:
        """Return the number of bytes that wait in the wire for the kernel."""

    @property
    def more(self) -> bool:
        """Return whether it holds received bytes that the socket does not signal."""

    def proven(self) -> PeerIdentity | None:
        """Return the peer's identity, if this wire proves it."""

    def shake_hands(self) -> None:
        """Continue the handshake that makes the wire ``opened``."""

    def send(self, data: Bytes, /) -> int:
        """Send bytes."""

    def sendmsg(self, views: Sequence[Bytes], /) -> int:
        """Send several views, one directly after another."""

    def send_list(self, part: Iovecs) -> int:
        """Send the rest of a fragment list."""

    def recv_into(self, target: memoryview, /) -> int:
        """Receive; return 0 at the end of the stream."""

    def recv_two(self, target: memoryview, behind: memoryview) -> int:
        """Receive into one view and, if the wire can, into a second one."""

    def recv_list(self, part: Iovecs, behind: tuple[int, int] | None = None) -> int:
        """Receive into the rest of a fragment list and, if the wire can, beyond it.

        Args:
            part: The list. The call sets ``asked`` and leaves ``rest`` unchanged.
            behind: Address and length of memory that follows the list.
        """

    def look(self) -> bool:
        """Return whether bytes are available, without reading; False at the end."""

    def flush(self) -> None:
        """Send everything that is ``unsent``."""

    def send_end(self) -> None:
        """Prepare to send the end of the stream; this may add unsent bytes."""


@final
class PlainWire:
    """Moves plain bytes over the socket."""

    __slots__ = ("recv_into", "send", "sendmsg", "sock")

    # The wire has no buffers, so these values never change.
    opened: ClassVar[bool] = True
    unsent: ClassVar[int] = 0
    more: ClassVar[bool] = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # Bound directly, because sending and receiving a small message takes only a few
        # microseconds.
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
        """Do nothing: no bytes are held back."""

    def send_end(self) -> None:
        """Do nothing: shutting the socket down is enough."""
