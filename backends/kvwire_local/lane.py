"""A lane between two processes of one host: the receiver reads the sender's memory.

No payload is sent. A descriptor names the payload's place, and the receiver copies it
from there, once, to its destination: with ``process_vm_readv`` from the sender's
address space ("cma"), or from a sender's arena that is mapped here ("arena"). Beside
the lane there is a Unix socket on which the receiver reports the payloads it has read
(:mod:`kvwire_local.wire`)::

    made --join()--> WAITING --the two have met--> UP --close(), all read--> ENDED
                     (server only: places          --abort(), peer gone-->
                      of payloads follow)

**When memory is released.** ``payload_sent`` releases a payload when the peer has
reported that it has read it. One race remains: this side ends its lane while the peer
is still reading, and the owner reuses the memory at once. The peer cannot be stopped,
and this side does not wait for it. Instead, the peer is made to detect it:

* the sender shuts its end of the socket down *before* it calls ``lane_closed``;
* the receiver reads a batch of payloads, *then* asks the kernel whether the other end
  of the socket is still open, and reports the batch as received only if it is.

Why no torn payload can be reported: both sides access the receiver's end of the socket
under its lock in the kernel (Linux takes ``unix_state_lock`` in ``unix_shutdown`` and
``unix_stream_recvmsg``). Suppose the receiver found the socket open. Then its critical
section came first. Its loads of the payload precede its release of the lock; that
precedes the sender's acquisition of the lock; and that precedes the sender's next store
to the memory. So every byte was loaded before it could be overwritten, on any
processor. This is a sequence lock whose counter is a socket. It also detects a process
that has died: the kernel removes the process's memory before it closes the sockets.

**Which process may read.** A process that can read an arena, or this process, can read
all of it. So payload is read in place only by a peer that may read all memory of this
process, by the setting ``one_sided_windows`` and the user that the kernel reports.
Every other peer gets copies, in a ring of its own.

**Which process is read.** The addresses in descriptors come from the peer, and are used
only with ``process_vm_readv`` on the peer. The pid comes from the kernel, and a cookie
in the peer's memory is read again after each batch, since a pid may be reused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from kvwire.backend import Landing, Payload, WindowMemory, WindowReader
from kvwire.backend.contexts import lasting_task, without_context
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.errors import BackendUnavailable, ConnectionLost
from kvwire.limits import KIB, SPAN_BYTES_MAX
from kvwire.types import Role
from kvwire_local.received_payloads import ReceivedPayloads
from kvwire_local.rendezvous import Host, Rendezvous, RendezvousResult
from kvwire_local.sent_payloads import READ_COUNT, SentPayloads
from kvwire_local.shared_arenas import ReadMethod, SharedArenas
from kvwire_local.tracer_slot import CHOICES, tracers
from kvwire_local.windows import ExposedWindows, OpenedWindows
from kvwire_local.wire import LocalMessage, LocalMessageType, LocalWire

READ_METHODS: Final = {
    "auto": ReadMethod.MEMORY | ReadMethod.ARENA,
    "cma": ReadMethod.MEMORY,
    "arena": ReadMethod.ARENA,
}

_GONE: Final = "local: the peer's side of the lane has ended"


class LocalLane(Lane):
    """One endpoint of a lane.

    Args:
        context: The lane's parameters. Settings: ``way`` is the method by which this
            side reads the other (auto, cma, arena); for ``tracer`` (one, none) see
            :mod:`kvwire_local.tracer_slot`.

    Raises:
        BackendUnavailable: /proc does not identify this host.
    """

    # A payload on a lane costs some 140 more Python calls on both sides together, to
    # announce, read and acknowledge it. In that time the socket copies this many bytes
    # twice.
    bytes_min = 128 * KIB
    intact = True
    span_bytes = SPAN_BYTES_MAX
    # Two spans: the reader never waits for the round trip of an acknowledgement, and
    # urgent payload waits for at most these two.
    window_bytes = 2 * SPAN_BYTES_MAX
    reads_windows = True
    reads_device_windows = True

    def __init__(self, context: LaneContext) -> None:
        allowed = READ_METHODS[context.settings.get("way", "auto")]
        names_one = context.settings.get("tracer", CHOICES[0]) == CHOICES[0]
        slot = tracers() if names_one else None
        self._role = context.role
        self._host = Host.here()
        self._rendezvous = Rendezvous(
            context.role,
            context.secret,
            allowed,
            slot,
            context.windows,
        )
        self._loop = asyncio.get_running_loop()
        self._handler: LaneHandler | None = None
        self._rendezvous_task: asyncio.Task[RendezvousResult] | None = None
        self._wire: LocalWire | None = None
        self._outgoing = SentPayloads()
        self._incoming = ReceivedPayloads()
        self._exposed = ExposedWindows(context.windows)
        self._opened = OpenedWindows(context.windows)
        # Whether a flush left bytes, so that lane_writable is due when they are gone.
        self._kept = False
        # Set while callbacks run: no callback may come from inside another, although
        # each may call flush.
        self._moving = False
        self._scheduled = False
        self._closing = False
        self._ended = False

    # --- coming up --------------------------------------------------------------------

    @property
    def bootstrap(self) -> bytes:
        """Return the identity of this host."""
        return self._host.encode()

    @property
    def description(self) -> str:
        """Return the method by which this side reads the other one."""
        return self._rendezvous.description

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        try:
            if self._ended:
                raise BackendUnavailable("local: the lane was aborted")
            self._host.require_same(Host.decode(bootstrap))
            if self._role is Role.SERVER:
                listener = self._rendezvous.listen()
                self._rendezvous_task = lasting_task(self._rendezvous.wait(listener))
                self._rendezvous_task.add_done_callback(lambda _: listener.close())
                self._rendezvous_task.add_done_callback(self._on_rendezvous)
            else:
                self._rendezvous_task = lasting_task(self._rendezvous.connect())
                self._come_up(await self._rendezvous_task)
                if self._ended:  # aborted since the rendezvous ended
                    raise BackendUnavailable("local: the lane was aborted")
        except asyncio.CancelledError:
            aborted = self._ended and not _is_cancelled()
            self.abort()
            if aborted:
                raise BackendUnavailable("local: the lane was aborted") from None
            raise
        except BaseException:
            self.abort()
            raise
        self._handler = handler

    def _on_rendezvous(self, task: asyncio.Task[RendezvousResult]) -> None:
        """Handle the end of a server's rendezvous, with or without a client."""
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._come_up(task.result())
            self._run(self._go_on)
        elif isinstance(error, Exception):
            self.abort(error)

    def _come_up(self, result: RendezvousResult) -> None:
        """Start moving payloads after the rendezvous."""
        if self._ended:
            result.sock.close()
            return
        self._wire = LocalWire(result.sock)
        self._incoming.peer = result.peer
        fd = self._wire.fileno()
        without_context(self._loop.add_reader, fd, self._run, self._readable)
        arenas = SharedArenas(
            self._wire, result.is_read, whole=result.whole, wake=self._wake_sweep
        )
        self._outgoing.come_up(arenas)
        self._opened.come_up(result.peer)
        self._exposed.come_up(arenas, result.peer.uid)

    # --- moving -----------------------------------------------------------------------

    def send(self, payload: Payload, token: object) -> bytes:
        if self._ended or self._closing:
            return b""
        try:
            return self._outgoing.send(payload, token)
        except OSError as exc:
            lost = ConnectionLost(f"local: no memory or descriptor to send from: {exc}")
            self._loop.call_soon(self.abort, lost)
            return b""

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        if not self._ended:
            self._incoming.receive(descriptor, landing)

    def flush(self) -> None:
        self._kept = self._kept or bool(self._outgoing.queued_bytes)
        self._run(self._move)

    def close(self) -> None:
        self._closing = True
        self._loop.call_soon(self._run, self._go_on)

    @property
    def queued_bytes(self) -> int:
        """Return the bytes of payloads with places that the peer does not know yet."""
        return self._outgoing.queued_bytes

    @property
    def received_bytes(self) -> int:
        return self._incoming.received_bytes

    # --- windows: see kvwire_local.windows --------------------------------------------

    def expose(self, memory: WindowMemory) -> bytes:
        self._require_open()
        description = self._exposed.expose(memory)
        self._loop.call_soon(self._run, self._go_on)
        return description

    def conceal(self, memory: WindowMemory) -> None:
        if not self._ended:
            self._exposed.conceal(memory)
            self._loop.call_soon(self._run, self._go_on)

    def window(self, description: bytes, memory: WindowMemory) -> WindowReader:
        self._require_open()
        return self._opened.open(description, memory)

    def _require_open(self) -> None:
        if self._ended:
            raise BackendUnavailable("local: the lane has ended")

    # --- the loop's turns -------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        """Run a function; an exception in it ends the lane."""
        if self._ended or self._moving:
            return
        self._moving = True
        try:
            work()
            if not self._ended:
                self._go_on()
        except Exception as exc:  # noqa: BLE001 - a handler that raises loses its lane
            self.abort(exc)
        finally:
            self._moving = False

    def _move(self) -> None:
        """Read a batch, and report it if the peer was there all the time."""
        self._scheduled = False
        whole = self._incoming.read()
        if not whole:
            return
        there = self._peer_is_there()
        handler = self._handler
        wire = self._wire
        if handler is None or wire is None:
            return  # a callback has ended the lane
        if not there:
            raise ConnectionLost(_GONE)  # the batch may contain anything
        wire.send(LocalMessageType.READ, READ_COUNT.pack(self._incoming.count))
        for landing in whole:
            handler.payload_received(self, landing)
            if self._handler is None:  # the lane has ended
                return

    def _readable(self) -> None:
        if self._peer_is_there(all_of_it=False):
            return
        if self._closing and not (self._outgoing or self._incoming):
            self.abort()  # both sides were closing
        else:
            raise ConnectionLost(_GONE)

    def _peer_is_there(self, *, all_of_it: bool = True) -> bool:
        """Handle the peer's records, and return whether its side is still open."""
        assert self._wire is not None
        records, there = self._wire.receive(all_of_it=all_of_it)
        for record in records:
            self._received(self._wire, record)
            if self._ended:
                return False
        return there

    def _wake_sweep(self) -> None:
        """Let the peer unmap an arena that was closed here, on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._run, self._outgoing.sweep)

    def _received(self, wire: LocalWire, record: LocalMessage) -> None:
        if record.kind is LocalMessageType.READ:
            self._read(record.body)
        elif record.kind is LocalMessageType.PLACED:
            self._incoming.placed(record.body)
        elif record.kind is LocalMessageType.WINDOW:
            self._opened.announced(record.body)
        elif record.kind is LocalMessageType.CONCEALED:
            self._opened.concealed(record.body)
        elif self._incoming.peer is None:
            return
        elif record.kind is LocalMessageType.ARENA:
            self._incoming.peer.adopt(record.body, wire.take_fd())
        else:
            self._incoming.peer.forget(record.body)

    def _read(self, body: bytes) -> None:
        """Report our payloads that the peer has read."""
        handler = self._handler
        assert handler is not None
        for token in self._outgoing.read(body):
            handler.payload_sent(self, token)
            if self._ended:
                return
        self._outgoing.place_later()
        if self._kept and not self._outgoing.queued_bytes:
            self._kept = False
            handler.lane_writable(self)

    def _go_on(self) -> None:
        """Schedule the next step: a batch, records that wait for room, or the end."""
        wire = self._wire
        if wire is not None:
            if self._incoming.can_read and not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._run, self._move)
            if wire.has_unsent:
                self._loop.add_writer(wire.fileno(), self._run, self._send_rest)
        idle = not (self._outgoing or self._incoming)
        if self._closing and idle and not (wire is not None and wire.has_unsent):
            self.abort()

    def _send_rest(self) -> None:
        assert self._wire is not None
        self._loop.remove_writer(self._wire.fileno())
        self._wire.send_rest()

    def abort(self, error: Exception | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._rendezvous_task is not None:
            self._rendezvous_task.cancel()
            self._rendezvous_task.add_done_callback(self._close_unused)
        if self._wire is not None:
            self._loop.remove_reader(self._wire.fileno())
            self._loop.remove_writer(self._wire.fileno())
            peer_left = self._wire.peer_left()
            # Afterwards the peer reports no further payload as received.
            self._wire.close()
            self._opened.close(peer_left=peer_left)
        self._outgoing.close()
        self._incoming.close()
        self._rendezvous.close()
        handler = self._handler
        self._handler = None
        if handler is not None:
            self._loop.call_soon(handler.lane_closed, self, error)

    def _close_unused(self, task: asyncio.Task[RendezvousResult]) -> None:
        """Close the socket of a rendezvous that succeeded after the lane had ended."""
        done = not task.cancelled() and task.exception() is None
        if done and self._wire is None:
            task.result().sock.close()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
