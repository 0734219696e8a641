"""A lane over TCP: a second socket to the address of the control link.

The client connects to the address of the control link, and sends a preamble that proves
which lane the socket is for. The listener finds the lane by it and proves itself in
turn (:mod:`kvwire_tcp.preamble`). From then on payloads follow one another, in each
direction in the order of ``send`` and of ``receive``, so descriptors are empty::

    made --join--> WAITING --socket--> OPEN --close()--> ... --> ENDED: lane_closed
                   (listener's side only;
                    payloads are queued)

If the control link is inside TLS, the lane is inside a separate TLS connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from kvwire.backend import Landing, Payload
from kvwire.backend.contexts import without_context
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.errors import (
    AuthenticationFailed,
    BackendUnavailable,
    ConnectionLost,
    ProtocolError,
)
from kvwire.limits import CONNECTIONS_MAX
from kvwire.types import Address, Role
from kvwire_tcp.duplex import Duplex
from kvwire_tcp.options import reset_on_close
from kvwire_tcp.payloads import PayloadReader
from kvwire_tcp.preamble import (
    ANSWER_BYTES,
    NONCE_BYTES,
    answer_to,
    is_proof,
    make_preamble,
    token_in,
    token_of,
)
from kvwire_tcp.waiting import received, sent
from kvwire_tcp.wire import Wire
from kvwire_tcp.writer import SendQueue

# The client knows the address already. The number is the version of the preamble's
# layout.
BOOTSTRAP: Final = b"tcp lane 1"

Dial = Callable[[Address], Awaitable[tuple[Wire, Address]]]
"""Connects to an address; returns a wire ready for use, and the address it leads to."""


class TcpLane(Lane):
    """One endpoint of a lane."""

    _handler: LaneHandler

    def __init__(
        self,
        context: LaneContext,
        pending_lanes: PendingLanes,
        dial: Dial,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._context = context
        self._pending_lanes = pending_lanes
        self._dial = dial
        self._loop = loop
        self._queue = SendQueue()
        self.reader = PayloadReader(self._received, self._early)
        self._socket: LaneSocket | None = None
        self._joined = False
        # close() or abort() was called, or the lane has ended.
        self._ending = False
        self._aborted = False

    @property
    def bootstrap(self) -> bytes:
        return BOOTSTRAP

    @property
    def description(self) -> str:
        return "a separate socket"

    @property
    def queued_bytes(self) -> int:
        return self._queue.nbytes if self._socket is None else self._socket.queued_bytes

    @property
    def received_bytes(self) -> int:
        return self.reader.received_bytes

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Open the lane. The listener's side does not wait for the client's socket.

        Cancel safety: safe, a half-made lane is closed.
        """
        assert not self._joined, "a lane is joined once"
        self._check_open()
        if bootstrap != BOOTSTRAP:
            self._ending = True
            raise BackendUnavailable(
                f"tcp: the peer's bootstrap of the lane is {bootstrap[:32]!r} and this "
                f"side's {BOOTSTRAP!r}; both sides need the same kvwire"
            )
        self._handler = handler
        if self._context.role is Role.SERVER:
            self._pending_lanes.expect(token_of(self._context.secret), self)
            self._joined = True
            return
        wire, remote = await self._connect()
        self._joined = True
        self._open(wire, remote)

    def send(self, payload: Payload, token: object) -> bytes:
        if not self._ending and (self._socket is None or self._socket.takes_more):
            self._queue.lend(payload, token)
        return b""

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        if descriptor:
            raise ProtocolError(
                "KVW-LN-07",
                f"the descriptor has {len(descriptor)} bytes; over tcp it must be "
                "empty",
            )
        if self.reader.stopped:
            return
        self.reader.expect(landing)
        if self._socket is not None:
            self._socket.resume()

    def flush(self) -> None:
        if self._socket is not None:
            self._socket.flush()

    def close(self) -> None:
        if self._socket is None:
            self.abort()
        elif not self._ending:
            self._ending = True
            self._socket.close()

    def abort(self) -> None:
        ending = self._ending
        self._ending = True
        self._aborted = True
        if self._socket is not None:
            self._socket.abort()
        elif not ending:
            self._queue.clear()
            self.reader.stop()
            if self._joined:
                self._pending_lanes.forget(token_of(self._context.secret))
                self._loop.call_soon(self._handler.lane_closed, self, None)

    # --- coming up --------------------------------------------------------------------

    def admits(self, wire: Wire, preamble: bytes) -> bool:
        """Return whether a preamble proves that its socket belongs to this lane."""
        try:
            binding = _binding(wire)
        except AuthenticationFailed:
            return False
        secret = self._context.secret
        number = self._context.number
        return is_proof(preamble, secret, number, binding)

    def arrived(self, wire: Wire, remote: Address, preamble: bytes) -> None:
        """Use a socket with its options set, which has received nothing else."""
        # Its send buffer is empty, so the answer fits. If the peer is gone, the next
        # receive reports that.
        with contextlib.suppress(OSError):
            wire.send(answer_to(preamble, self._context.secret, _binding(wire)))
        self._open(wire, remote)

    async def _connect(self) -> tuple[Wire, Address]:
        """Connect, prove our identity, and check the peer's proof.

        Raises:
            BackendUnavailable: It cannot be reached, or does not prove the secret.
        """
        context = self._context
        assert context.remote_address is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_up)
            try:
                wire, remote = await self._dial(context.remote_address)
                undo.enter_context(wire.sock)
                binding = _binding(wire)
                preamble = make_preamble(context.secret, context.number, nonce, binding)
                await sent(wire, preamble, self._loop)
                answer = await received(wire, ANSWER_BYTES, self._loop)
            except (OSError, AuthenticationFailed) as exc:
                raise BackendUnavailable(
                    f"{context.remote_address} cannot be reached: {exc}"
                ) from exc
            expected = answer_to(preamble, context.secret, binding)
            if not secrets.compare_digest(answer, expected):
                raise BackendUnavailable(
                    f"{remote} admits no lane of this connection: it is another host, "
                    "or too late"
                )
            self._check_open()
            undo.pop_all()
        return wire, remote

    def _open(self, wire: Wire, remote: Address) -> None:
        """Start moving payload."""
        self._socket = LaneSocket(
            wire, remote, self._loop, self._queue, self, self._handler
        )

    def _give_up(self) -> None:
        self._ending = True

    def _check_open(self) -> None:
        """Refuse to continue after ``close``.

        Raises:
            BackendUnavailable: The lane was closed.
        """
        if self._ending:
            raise BackendUnavailable("the lane was closed before it was open")

    # --- from the socket --------------------------------------------------------------

    def closed(self, error: Exception | None) -> None:
        """Handle the end of the socket, which no longer touches memory."""
        if self._aborted:
            error = None
        elif error is None and not self._ending:
            error = ConnectionLost("the peer ended the lane")
        self._ending = True
        self._handler.lane_closed(self, error)

    def _received(self, landing: Landing) -> None:
        self._handler.payload_received(self, landing)

    def _early(self) -> None:
        assert self._socket is not None
        self._socket.pause()


class LaneSocket(Duplex):
    """The socket of an open lane."""

    def __init__(
        self,
        wire: Wire,
        remote: Address,
        loop: asyncio.AbstractEventLoop,
        queue: SendQueue,
        lane: TcpLane,
        handler: LaneHandler,
    ) -> None:
        super().__init__(wire, remote, loop, queue)
        self._lane = lane
        self._handler = handler
        self._paused = False
        self._begin(lane.reader)
        if queue.nbytes:
            self._wait_for_room()

    def pause(self) -> None:
        """Stop receiving; data stays in the kernel."""
        self._paused = True
        self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Receive again, if it was paused."""
        if self._paused and not self._ended:
            self._paused = False
            without_context(self._loop.add_reader, self._sock, self._on_readable)
            self._receive_more()

    @property
    def takes_more(self) -> bool:
        """Return whether more may be queued, because neither side has ended."""
        return not self._closing

    @property
    def _listens(self) -> bool:
        return super()._listens and not self._paused

    def _sent(self, token: object) -> None:
        self._handler.payload_sent(self._lane, token)

    def _writable(self) -> None:
        self._handler.lane_writable(self._lane)

    def _closed(self, error: Exception | None) -> None:
        self._lane.closed(error)


def _binding(wire: Wire) -> bytes:
    """Return the bytes that bind a proof to this wire."""
    proven = wire.proven()
    return b"" if proven is None else proven.binding


_log = logging.getLogger("kvwire.tcp")


class PendingLanes:
    """The lanes of one backend that wait for their sockets, by token.

    An incoming socket is untrusted until the proof in its preamble was verified. If no
    lane waits for it, it is reset without an answer, so that a scanner learns nothing.
    The protocol's limits for unauthenticated connections bound the number of such
    sockets, and their time.
    """

    def __init__(self) -> None:
        self._lanes: dict[bytes, TcpLane] = {}

    def expect(self, token: bytes, lane: TcpLane) -> None:
        """Add a lane that waits.

        Raises:
            BackendUnavailable: Too many lanes wait.
        """
        # A connection opens its lanes one after the other.
        if len(self._lanes) >= CONNECTIONS_MAX:
            raise BackendUnavailable(
                f"{CONNECTIONS_MAX} lanes wait for their sockets already"
            )
        self._lanes[token] = lane  # bounded: CONNECTIONS_MAX

    def forget(self, token: bytes) -> None:
        """Remove a lane that no longer waits."""
        self._lanes.pop(token, None)

    def claim_socket(self, wire: Wire, remote: Address, preamble: bytes) -> None:
        """Give a socket to its lane, once; reset any other socket."""
        token = token_in(preamble)
        lane = self._lanes.get(token)
        if lane is not None and lane.admits(wire, preamble):
            del self._lanes[token]
            lane.arrived(wire, remote, preamble)
            return
        _log.info("%s: a lane arrived that no connection waits for", remote)
        with contextlib.suppress(OSError):
            reset_on_close(wire.sock)
        wire.sock.close()
