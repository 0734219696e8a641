"""A lane over UCX: payloads as tagged messages between two workers.

::

    OPENED --join()--> GREETING --hello--> UP --close()--> DRAINING --all done----+
     |                  |                |                  |                      |
     |                  |                +--- abort(), bye, endpoint or handler ---+
     +----- abort() ----+                     failed: cancel, send bye             |
     v                                                                             v
    ENDED, and no            endpoint gone, no operation open: lane_closed <--- ENDING
    lane_closed

*A payload* is sent under a tag that only this lane's peer knows, and that the
descriptor contains. The receiver posts its memory under that tag, and UCX matches the
two by rendezvous, so nothing moves before the receiver has named its memory. A send has
ended when it was matched with the receiver's operation.

*The quiet end* does not depend on time. A lane has its own worker. When the lane ends,
it closes the endpoint by force, which ends all operations, even those that only the
peer could complete. Then it destroys the worker, together with the sockets, queue pairs
and shared memory through which other processes could reach our memory. ``lane_closed``
is called after that.

*Hello.* UCX connects at the first use, so a newly created lane proves nothing. The
client sends a hello, and its join waits for the answer. Both messages prove that their
senders know the lane's secret.

*Bye.* Over shared memory UCX does not detect that a living peer has closed an endpoint,
and the peer may be reading our memory at that moment. So a side that ends with sends in
progress waits for the peer's own bye: after that, the peer reports no payload as
received. There is a time limit for this, for a peer that does not answer because it is
stopped. If such a peer continues one day, it may have read memory that was already
reused: then the payload's checksum is wrong, and the peer detects that.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Final, final

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.backend.window import WindowMemory, WindowReader
from kvwire.errors import BackendUnavailable, ConnectionLost, MalformedFrame
from kvwire.limits import KIB, MIB
from kvwire.types import Role
from kvwire_ucx.binding import ERR_MESSAGE_TRUNCATED, OK
from kvwire_ucx.bootstrap import (
    BYE,
    FIRST_PAYLOAD,
    HELLO,
    LANE_BITS,
    UcxBootstrap,
    next_message,
    parse,
)
from kvwire_ucx.context import ABANDONED_MAX
from kvwire_ucx.library import Version
from kvwire_ucx.pieces import (
    RULE,
    descriptor,
    piece_lengths,
    pieces,
    read_descriptor,
)
from kvwire_ucx.requests import MemoryHandles, UcxRequest
from kvwire_ucx.windows import VERSION_MIN, UcxWindows
from kvwire_ucx.worker import UcxEndpoint, Worker

# A rendezvous costs two messages in addition to the payload: below this size the
# control link is faster, because the payload is sent with its header.
BYTES_MIN: Final = 32 * KIB
# Four spans, so that none waits for the round trip of an acknowledgement.
SPAN_BYTES: Final = 4 * MIB
WINDOW_BYTES: Final = 4 * SPAN_BYTES
# How long a client waits for the answer to its hello on a UCX that cannot free a worker
# without one: UCX itself gives up after 30 s over UD queue pairs, and then ends the
# process.
GREETING_S: Final = 20.0
# How long the end of a lane waits until the peer has received the bye. A stopped peer
# never receives it.
LINGER_S: Final = 1.0

_GREETING_BYTES: Final = 16

_log = logging.getLogger("kvwire.ucx")


class _State(enum.Enum):
    OPENED = enum.auto()
    GREETING = enum.auto()
    UP = enum.auto()
    DRAINING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


class _MessageParts:
    """A payload in progress, with the number of its pending messages."""

    __slots__ = ("left", "what")

    def __init__(self, what: object, left: int) -> None:
        self.what = what
        self.left = left


@final
class UcxLane(Lane):
    """One endpoint of a lane."""

    bytes_min = BYTES_MIN
    window_bytes = WINDOW_BYTES
    span_bytes = SPAN_BYTES
    reads_windows = True

    _handler: LaneHandler
    _peer: UcxBootstrap

    def __init__(
        self,
        worker: Worker,
        context: LaneContext,
        on_ended: Callable[[UcxLane], None],
    ) -> None:
        self._worker = worker
        self._on_ended = on_ended
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._own = UcxBootstrap(
            lane=secrets.randbits(LANE_BITS),
            version=worker.context.library.version,
            address=worker.address,
        )
        self._bootstrap = self._own.to_bytes()
        self._state = _State.OPENED
        self._endpoint: UcxEndpoint | None = None
        self._windows: UcxWindows | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._came_up: asyncio.Future[None] = self._loop.create_future()
        # Whether the core has the lane, and so will get `lane_closed`.
        self._given = False
        self._error: Exception | None = None
        # Receives of payload, which may not be matched with their messages yet.
        self._receives: set[UcxRequest] = set()
        # The number of payload messages that have not ended.
        self._sends = 0
        self._peer_has_left = False
        # Whether it waits to send its hello, or ended while it did.
        self._is_queued = False
        self._payloads = 0
        self._next_sent = FIRST_PAYLOAD
        self._next_received = FIRST_PAYLOAD
        self._received_bytes = 0
        self._linger: asyncio.TimerHandle | None = None

    # --- coming up --------------------------------------------------------------------

    @property
    def bootstrap(self) -> bytes:
        return self._bootstrap

    @property
    def description(self) -> str:
        """Return the transports that UCX has chosen, or what the lane waited for."""
        if self._is_queued:
            return (
                f"UCX {self._own.version}, behind {ABANDONED_MAX} lanes whose peers "
                "have not answered"
            )
        if self._endpoint is None or not self._endpoint.transports:
            return f"UCX {self._own.version}"
        return f"UCX {self._own.version}: {', '.join(self._endpoint.transports)}"

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Connect the endpoint; a client returns when the server has answered.

        Cancel safety: safe, the lane is then closed without ``lane_closed``.
        """
        try:
            self._peer = parse(bootstrap)
            if self._state is not _State.OPENED:
                raise BackendUnavailable("the lane was closed before it joined")
            self._check_version(self._peer.version)
            self._handler = handler
            self._state = _State.GREETING
            self._expect(HELLO, _GREETING_BYTES, self._greeted)
            self._expect(BYE, 1, self._peer_left)
            if self._context.role is Role.CLIENT:
                await self._reserved()
                if self._state is _State.GREETING:
                    self._send_hello()
                    await self._answer()
            if self._state is not _State.GREETING:
                raise BackendUnavailable(str(self._error or "the lane was closed"))
        except BaseException:
            self.abort()
            raise
        self._state = _State.UP
        self._given = True

    async def _reserved(self) -> None:
        """If UCX cannot free unanswered lanes, wait until one more may ask."""
        worker = self._worker
        if worker.is_fragile:
            self._is_queued = True
            await worker.context.reserve(worker)
            self._is_queued = False

    async def _answer(self) -> None:
        """Wait for the server's hello."""
        limit_s = GREETING_S if self._worker.is_fragile else None
        try:
            async with asyncio.timeout(limit_s):
                await self._came_up
        except TimeoutError:
            raise BackendUnavailable(
                f"ucx: the peer did not answer within {limit_s:g} s"
            ) from None

    def _check_version(self, theirs: Version) -> None:
        """Refuse a UCX version that would connect and then fail at the first payload.

        1.13 and 1.22 are such a pair: their rendezvous protocols differ, and UCX does
        not detect that.

        Raises:
            BackendUnavailable: The minor versions differ.
        """
        ours = self._own.version
        if theirs[:2] != ours[:2]:
            raise BackendUnavailable(
                f"the peer has UCX {theirs} and this side {ours}: both sides need the "
                f"same minor version"
            )

    def _reach(self) -> UcxEndpoint:
        """Return the endpoint to the peer, created on first use.

        So a server creates its endpoint when it answers. If both sides connect at the
        same time, UCX drops one of the two sockets; with 1.22, a process that ended a
        lane at about that time often crashed with a double free.

        Raises:
            BackendUnavailable: UCX has no route to the peer.
        """
        if self._endpoint is None:
            self._endpoint = UcxEndpoint(
                self._worker, self._peer, self._endpoint_failed
            )
        return self._endpoint

    def _greeted(self, data: bytes) -> None:
        """Check the peer's hello; as the server, answer it."""
        role = self._context.role
        if self._state is _State.ENDING:
            return
        try:
            self._reach()
        except BackendUnavailable as exc:
            self.abort(exc)
            return
        if not hmac.compare_digest(data, self._greeting(role.other)):
            text = "ucx: the peer's hello does not prove the secret"
            self.abort(ConnectionLost(text))
            return
        self._worker.unpace()
        if role is Role.SERVER:
            self._send_hello()
        elif not self._came_up.done():
            self._came_up.set_result(None)
            self._worker.context.release(self._worker)

    def _send_hello(self) -> None:
        endpoint = self._reach().handle
        memory = MemoryHandles(memoryview(self._greeting(self._context.role)))
        tag = self._peer.tag(HELLO)
        self._worker.send(endpoint, memory, tag, _nothing, eager=True)

    def _greeting(self, role: Role) -> bytes:
        """Return the greeting that proves the secret, for one side of this lane."""
        if role is self._context.role:
            near = self._own.lane
            far = self._peer.lane
        else:
            near = self._peer.lane
            far = self._own.lane
        text = b"kvwire ucx hello %d %d %d" % (role, near, far)
        digest = hmac.digest(self._context.secret, text, hashlib.sha256)
        return digest[:_GREETING_BYTES]

    # --- payloads ---------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Return 0, because UCX accepts everything at once."""
        return 0

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    def send(self, payload: Payload, token: object) -> bytes:
        if self._state is not _State.UP:
            return b""
        try:
            endpoint = self._reach().handle
        except BackendUnavailable as exc:
            self._loop.call_soon(self.abort, exc)
            return b""
        lengths = piece_lengths(payload)
        described = descriptor(self._next_sent, lengths)
        parts = _MessageParts(token, max(1, len(lengths)))
        self._payloads += 1
        for piece in pieces(payload, lengths):
            tag = self._peer.tag(self._next_sent)
            self._next_sent = next_message(self._next_sent)
            self._sends += 1
            self._worker.send(
                endpoint,
                MemoryHandles(piece),
                tag,
                lambda status, _: self._piece_sent(parts, status),
            )
        return described

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        first, lengths = read_descriptor(descriptor, landing.length)
        if not self._is_live:
            return
        if first != self._next_received:
            text = f"ucx: a descriptor for message {first}, not {self._next_received}"
            raise MalformedFrame(RULE, text)
        payload = landing.payload
        if payload is None:
            payload = memoryview(bytearray(landing.length))
        parts = _MessageParts(landing, max(1, len(lengths)))
        self._payloads += 1
        for piece in pieces(payload, lengths):
            message = self._next_received
            self._next_received = next_message(message)
            self._post_receive(parts, piece, message)

    def flush(self) -> None:
        """Wake the worker; UCX has already sent as much as it could at once."""
        self._worker.wake()

    def _post_receive(self, parts: _MessageParts, piece: Payload, message: int) -> None:
        memory = MemoryHandles(piece)
        expected = memory.nbytes

        def done(status: int, nbytes: int) -> None:
            self._receives.discard(request)
            if status == OK and nbytes == expected:
                self._piece_received(parts, nbytes)
            elif status in (OK, ERR_MESSAGE_TRUNCATED):
                text = f"message {message} has {nbytes} bytes and not {expected}"
                self.abort(MalformedFrame(RULE, f"ucx: {text}"))
            else:
                self.abort(self._broken(status))

        request = self._worker.receive(memory, self._own.tag(message), done)
        self._receives.add(request)  # bounded: LANE_PAYLOADS_MAX

    def _piece_sent(self, parts: _MessageParts, status: int) -> None:
        self._sends -= 1
        parts.left -= 1
        if status != OK:
            self.abort(self._broken(status))
        elif parts.left == 0 and self._is_live:
            self._payloads -= 1
            self._call(lambda: self._handler.payload_sent(self, parts.what))
            self._check_drained()

    def _piece_received(self, parts: _MessageParts, nbytes: int) -> None:
        parts.left -= 1
        if self._is_live:
            self._received_bytes += nbytes
            if parts.left == 0:
                self._payloads -= 1
                landing = parts.what
                assert isinstance(landing, Landing)
                self._call(lambda: self._handler.payload_received(self, landing))
                self._check_drained()

    # --- windows ----------------------------------------------------------------------

    def expose(self, memory: WindowMemory) -> bytes:
        return self._trusted_windows().expose(memory)

    def conceal(self, memory: WindowMemory) -> None:
        if self._windows is not None:
            self._windows.conceal(memory)

    def window(self, description: bytes, memory: WindowMemory) -> WindowReader:
        return self._trusted_windows().window(description, memory)

    def _trusted_windows(self) -> UcxWindows:
        """Return the lane's windows.

        Raises:
            BackendUnavailable: The settings do not allow windows, the lane is not open,
                or UCX has no route to the peer.
        """
        if self._context.windows != "peers":
            raise BackendUnavailable(
                f"ucx: one_sided_windows={self._context.windows!r}, and UCX cannot "
                f'prove whose process the peer is; set one_sided_windows="peers" on '
                f"both sides if every peer may read all of a window"
            )
        if self._own.version < VERSION_MIN:
            raise BackendUnavailable(
                f"ucx: windows need UCX {'.'.join(map(str, VERSION_MIN))}, and this is "
                f"{self._own.version}"
            )
        if self._state is not _State.UP:
            raise BackendUnavailable("ucx: the lane is not open")
        if self._windows is None:
            self._windows = UcxWindows(self._worker, self._reach())
        return self._windows

    # --- ending -----------------------------------------------------------------------

    def close(self) -> None:
        if self._state is _State.UP:
            self._state = _State.DRAINING
            self._loop.call_soon(self._check_drained)
        elif not self._is_live:
            self.abort()

    @property
    def _is_live(self) -> bool:
        return self._state in (_State.UP, _State.DRAINING)

    def _check_drained(self) -> None:
        if self._state is _State.DRAINING and self._payloads == 0:
            self.abort()

    def _endpoint_failed(self, status: int) -> None:
        self.abort(self._broken(status))
        self._hang_up()

    def abort(self, error: Exception | None = None) -> None:
        """End the lane now, from any state: the first of three steps."""
        if self._state in (_State.ENDING, _State.ENDED):
            return
        came_up = self._came_up.done() and not self._came_up.cancelled()
        answered = came_up or self._peer_has_left
        unanswered = self._state is _State.GREETING and not answered
        self._state = _State.ENDING
        self._error = error
        if not self._came_up.done():
            self._came_up.set_result(None)  # join checks the state
        if unanswered and self._is_left_alone():
            self._worker.abandon()
            self._leave()
            return
        self._worker.context.release(self._worker)
        for request in self._receives:
            self._worker.cancel(request)
        if self._windows is not None:
            self._windows.end_readers()
        if self._endpoint is None:
            self._gone()  # a peer that was not answered has no open lane either
        elif self._endpoint.failed:
            self._hang_up()
        else:
            self._linger = self._loop.call_later(LINGER_S, self._hang_up)
            self._send_bye()

    def _is_left_alone(self) -> bool:
        """Return whether UCX would end the process if it had to free this lane.

        No payload was announced on it, so UCX reaches no memory but its own.
        """
        endpoint = self._endpoint
        return self._worker.is_fragile and endpoint is not None and not endpoint.failed

    def _send_bye(self) -> None:
        assert self._endpoint is not None
        memory = MemoryHandles(memoryview(b"\0"))
        tag = self._peer.tag(BYE)
        # A bye that answers the peer's bye gets no reply.
        answers = self._peer_has_left
        done = self._answered if answers else self._confirmed
        self._worker.send(self._endpoint.handle, memory, tag, done, eager=answers)

    def _answered(self, _status: int, _nbytes: int) -> None:
        # Over TCP the peer closes first, which UCX reports: 1.22 crashes if a socket is
        # reset while UCX is closing it with bytes left to send
        # (`uct_tcp_iface_handle_events`).
        assert self._endpoint is not None
        if not any(name.startswith("tcp") for name in self._endpoint.transports):
            self._hang_up()

    def _confirmed(self, _status: int, _nbytes: int) -> None:
        """Continue after the peer has received our bye and all messages before it."""
        if not self._sends:
            self._hang_up()

    def _peer_left(self, _: bytes) -> None:
        self._peer_has_left = True
        if self._state is _State.ENDING:
            self._hang_up()
        else:
            self.abort(ConnectionLost("ucx: the peer ended the lane"))

    def _hang_up(self) -> None:
        """Close the endpoint, after the peer has received our bye: the second step."""
        if self._endpoint is not None:  # otherwise this step has been done
            self._endpoint.close(self._gone)

    def _gone(self) -> None:
        """Continue with the last step, after UCX has released the endpoint."""
        self._worker.when_idle(self._finish)

    def _finish(self) -> None:
        """Destroy the worker: the last step.

        This ends even operations that UCX has not reported as ended, such as a receive
        that had begun to arrive: nothing is left that could write to its memory.
        """
        if self._state is _State.ENDED:
            return
        self._worker.close()
        if self._windows is not None:
            self._windows.unregister()
        self._leave()

    def _leave(self) -> None:
        self._state = _State.ENDED
        if self._linger is not None:
            self._linger.cancel()
        self.ended.set_result(None)
        self._on_ended(self)
        if self._given:
            self._report_closed()

    def _report_closed(self) -> None:
        try:
            self._handler.lane_closed(self, self._error)
        except Exception:  # noqa: BLE001 - there is no more to end
            _log.exception("a lane's handler raised in lane_closed")

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends its lane only
            _log.error("a lane's handler raised; the lane is aborted", exc_info=exc)
            self.abort(exc)

    def _broken(self, status: int) -> ConnectionLost:
        text = self._worker.context.library.status_text(status)
        return ConnectionLost(f"ucx: the endpoint to the peer failed: {text}")

    def _expect(
        self, message: int, nbytes: int, on_bytes: Callable[[bytes], None]
    ) -> None:
        data = bytearray(nbytes)

        def done(status: int, received: int) -> None:
            if status == OK and received == nbytes and self._state is not _State.ENDED:
                on_bytes(bytes(data))

        memory = MemoryHandles(memoryview(data))
        self._worker.receive(memory, self._own.tag(message), done)


def _nothing(_status: int, _nbytes: int) -> None:
    return
