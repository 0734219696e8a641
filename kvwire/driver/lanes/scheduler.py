"""The lanes of one connection at work: which of them carries the next chunk.

While none is up, the control link carries all payload. Lanes of its own transport share
the payload with it; lanes of another transport carry all of it, but for chunks that are
too small to be worth the detour. When the last lane has gone, payload travels on the
control link again, if its transport may carry data, until another lane has come up in
its place: otherwise the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.driver.checksums import ChecksumPolicy, matches
from kvwire.errors import ConnectionLost, KVWireError, ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import LINK_QUEUE_BYTES, SPAN_PIECE_BYTES, TICKET_BYTES_MAX
from kvwire.proto.chunks import Chunk, ChunkArrival
from kvwire.proto.events import LaneClosed, LaneDataReceived
from kvwire.types import BufferId, MemoryKind

if TYPE_CHECKING:
    from kvwire.driver.device_staging import DeviceStaging
    from kvwire.proto.connection import ConnectionCore


class LaneEndpoint:
    """Our half of one lane.

    Attributes:
        number: The lane's number.
        backend: What carries it.
        lane: The backend's half.
        joined: Its ``join`` has returned: ``lane_closed`` will say that it has ended.
        up: Both halves are there: it may be sent on.
        lowered: What the peer said when its half went away, or "".
    """

    __slots__ = ("backend", "joined", "lane", "lowered", "number", "up")

    def __init__(self, number: int, backend: str, lane: Lane) -> None:
        self.number = number
        self.backend = backend
        self.lane = lane
        self.joined = False
        self.up = False
        self.lowered = ""


class _Landing(Landing):
    __slots__ = ("arrival",)

    def __init__(self, arrival: ChunkArrival, payload: Payload | None) -> None:
        self.length = arrival.header.length
        self.payload = payload
        self.arrival = arrival


class LaneScheduler(LaneHandler):
    """The halves of one connection's lanes, and the choice between them.

    Attributes:
        up: Those that may be sent on.
        shared: The control link carries payload beside them.
        fallback: The control link may carry payload when none of them is left.
        on_broken: Called with the transport of a lane that has broken, and why.
        check_ended: To be called when something may have become quiet.
    """

    def __init__(
        self,
        core: ConnectionCore,
        staged: DeviceStaging,
        loop: asyncio.AbstractEventLoop,
        *,
        checks: ChecksumPolicy,
        run: Callable[[], None],
        check_ended: Callable[[], None],
    ) -> None:
        self.up: list[LaneEndpoint] = []
        self.shared = False
        self.fallback = True
        self.on_broken: Callable[[str, str], None] = _nobody_asks
        self._core = core
        self._staged = staged
        self._loop = loop
        self._checks = checks
        self._run = run
        self.check_ended = check_ended
        # bounded: LANES_MAX
        self._halves: dict[Lane, LaneEndpoint] = {}
        self._dirty: dict[Lane, None] = {}

    @property
    def quiet(self) -> bool:
        """Whether no lane can touch any memory."""
        return not self._halves

    # --- coming up --------------------------------------------------------------------

    def add(self, half: LaneEndpoint) -> None:
        """Know a half that is about to join."""
        self._halves[half.lane] = half  # bounded: LANES_MAX

    def drop(self, half: LaneEndpoint, reason: str) -> None:
        """End a half that nobody waits for any more, and forget it.

        One that had joined at the last moment may touch memory until ``lane_closed``.
        """
        half.lane.abort()
        if half.joined:
            half.lowered = half.lowered or reason
            return
        self._halves.pop(half.lane, None)
        self._core.lane_gone(half.number, reason)
        self._run()
        self.check_ended()

    def knows(self, half: LaneEndpoint) -> bool:
        """Whether a half that has joined is still there, on both sides."""
        return half.lane in self._halves and not half.lowered

    def raised(self, number: int) -> LaneEndpoint | None:
        """Both halves of a lane are there; None if ours has gone meanwhile."""
        for half in self._halves.values():
            if half.number == number and not half.lowered:
                half.up = True
                self.up.append(half)  # bounded: LANES_MAX
                return half
        return None

    # --- sending ----------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the next chunk has to wait for a lane."""
        if not self.up:
            return not self.fallback
        return not self.shared and self._roomiest() is None

    def pick(self, link_queued_bytes: int) -> LaneEndpoint | None:
        """What carries the next chunk; None for the control link."""
        half = self._roomiest()
        if half is None or not self.shared:
            return half
        return half if half.lane.queued_bytes <= link_queued_bytes else None

    def carries(self, half: LaneEndpoint, payload: Payload) -> bool:
        """Whether a lane is the way for a payload: worth it, and memory that it takes.

        A lane that takes device memory alone may be the only way that is allowed; then
        it is for the lane to say why it cannot carry what lies elsewhere.
        """
        device = payload.device if isinstance(payload, Fragments) else None
        kinds = half.lane.memory_kinds
        if device is not None:
            return device.kind in kinds
        if payload.nbytes < half.lane.bytes_min:
            return False
        return MemoryKind.HOST in kinds or not self.fallback

    def span(self, half: LaneEndpoint, buffer: BufferId) -> int:
        """Bytes of a buffer that a lane takes at once; 0 for a chunk."""
        payload = self._staged.whole(buffer)
        if isinstance(payload, Fragments) and (
            payload.device is not None
            or payload.nbytes < SPAN_PIECE_BYTES * payload.lengths.size
        ):
            return 0
        return half.lane.span_bytes if self.carries(half, payload) else 0

    def takes(self, number: int, kind: MemoryKind) -> bool:
        """Whether a lane moves this kind of memory itself."""
        return any(
            half.number == number and kind in half.lane.memory_kinds
            for half in self._halves.values()
        )

    def send(
        self, half: LaneEndpoint, chunk: Chunk, payload: Payload
    ) -> tuple[bytes, bytes]:
        """Queue a chunk on a lane; returns the frame that announces it."""
        check = self._checks.of(payload, intact=half.lane.intact)
        ticket = half.lane.send(payload, chunk)
        assert len(ticket) <= TICKET_BYTES_MAX
        self._dirty[half.lane] = None  # bounded: LANES_MAX
        return self._core.lanes.aside(chunk, half.number, ticket, check)

    def flush(self) -> bool:
        """Move what was queued; False if there was nothing."""
        if not self._dirty:
            return False
        dirty, self._dirty = self._dirty, {}
        for lane in dirty:
            if lane in self._halves:
                lane.flush()
        return True

    # --- receiving --------------------------------------------------------------------

    def receive(self, event: LaneDataReceived, payload: Payload | None) -> None:
        """Let a lane receive what the peer has announced.

        Raises:
            ProtocolError: The ticket is not one of the peer's lane.
        """
        arrival = event.arrival
        half = next(h for h in self._halves.values() if h.number == arrival.lane)
        try:
            half.lane.receive(event.ticket, _Landing(arrival, payload))
        except ProtocolError:
            if event.ticket:
                raise
            # Sent by a half that had ended and could not say so yet.
            half.lane.abort()
            return
        self._dirty[half.lane] = None  # bounded: LANES_MAX

    def lowered(self, event: LaneClosed) -> None:
        """The peer's half of a lane is gone."""
        for half in list(self._halves.values()):
            if half.number == event.lane:
                half.lowered = event.reason or "the peer ended it"
                if half in self.up:
                    self.up.remove(half)
                half.lane.abort()

    # --- the lanes --------------------------------------------------------------------

    def payload_sent(self, lane: Lane, token: object) -> None:
        """See LaneHandler."""
        assert isinstance(token, Chunk)
        self._staged.sent(token)
        self._core.chunk_sent(token)
        self._run()

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        """See LaneHandler."""
        assert isinstance(landing, _Landing)
        arrival = landing.arrival
        intact = matches(landing.payload, arrival.header)
        if self._staged.landed(arrival, self._in_place, intact=intact):
            return
        self._core.payload_landed(arrival, self._loop.time(), intact=intact)
        self._run()

    def lane_writable(self, lane: Lane) -> None:
        """See LaneHandler."""
        self._run()

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        """See LaneHandler."""
        half = self._halves.pop(lane)
        self._staged.lane_gone(half.number)
        if half in self.up:
            self.up.remove(half)
        reason = half.lowered or str(error or "this side ended it")
        self._core.lane_gone(half.number, reason)
        if self._core.error is None and half.up:
            self._broken(half, reason, error)
        self._run()
        self.check_ended()

    def end(self, *, graceful: bool = False) -> None:
        """End every lane; :attr:`quiet` tells when nothing touches memory any more."""
        self.up.clear()
        for lane in list(self._halves):
            if graceful:
                lane.close()
            else:
                lane.abort()

    # --- inside -----------------------------------------------------------------------

    def _in_place(self, arrival: ChunkArrival) -> None:
        """A staged payload has been copied to where it belongs."""
        if self._core.lanes.expects(arrival):
            self._core.payload_landed(arrival, self._loop.time(), intact=True)

    def _roomiest(self) -> LaneEndpoint | None:
        best: LaneEndpoint | None = None
        for half in self.up:
            queued_bytes = half.lane.queued_bytes
            if (
                queued_bytes < LINK_QUEUE_BYTES
                and (best is None or queued_bytes < best.lane.queued_bytes)
                and self._core.lanes.room(half.number, half.lane.window_bytes)
            ):
                best = half
        return best

    def _broken(self, half: LaneEndpoint, reason: str, error: Exception | None) -> None:
        """A lane that carried data is gone: go on without it, if that is allowed."""
        if isinstance(error, ProtocolError):
            self._core.fail(error)
        elif self.up or self.fallback:
            self.on_broken(half.backend, reason)
        else:
            self._core.fail(
                _lost(f"{half.backend} failed and no other transport is allowed", error)
            )


def _nobody_asks(backend: str, reason: str) -> None:
    """Until lanes are raised none can break."""


def _lost(text: str, error: Exception | None) -> KVWireError:
    lost = ConnectionLost(f"{text}: {error}" if error else text)
    lost.__cause__ = error
    return lost
