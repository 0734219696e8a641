"""Sends and receives on one connection's lanes, and chooses a lane for each chunk.

While no lane is open, the control link carries all payload. Lanes that use the control
link's transport share the payload with it; lanes of another transport carry all
payload, except chunks that are too small to be worth the detour. When the last lane is
gone, payload returns to the control link until another lane opens, if the link's
transport may carry data; otherwise the connection ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.driver.checksums import ChecksumPolicy, matches
from kvwire.driver.lanes.state import LaneEndpoint, LaneInput, LaneState
from kvwire.driver.ports import PathOwner
from kvwire.errors import ConnectionLost, ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX, LINK_QUEUE_BYTES, SPAN_PIECES_MAX
from kvwire.proto.chunks import Chunk
from kvwire.proto.events import LaneClosed, LaneDataReceived, LaneStalled
from kvwire.proto.records import ChunkArrival
from kvwire.types import BufferId, MemoryKind

if TYPE_CHECKING:
    from kvwire.driver.device_staging import DeviceStaging

logger: logging.Logger = logging.getLogger("kvwire.lanes")


class _Landing(Landing):
    __slots__ = ("arrival",)

    def __init__(self, arrival: ChunkArrival, payload: Payload | None) -> None:
        self.length = arrival.header.length
        self.payload = payload
        self.arrival = arrival


class LaneScheduler(LaneHandler):
    """Sends and receives on the lanes of one connection, and chooses between them.

    Args:
        owner: The connection's driver.
        staging: Copies between devices and pinned memory.
        checks: Decides which payloads have checksums.

    Attributes:
        dirty: Lanes with something to flush, in order.
    """

    def __init__(
        self, owner: PathOwner, staging: DeviceStaging, checks: ChecksumPolicy
    ) -> None:
        self._owner = owner
        self._core = owner.core
        self._lanes = owner.lanes
        self._staging = staging
        self._loop = owner.services.loop
        self._buffers = owner.services.buffers
        self._checks = checks
        self.dirty: dict[Lane, None] = {}

    # --- sending ----------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the next chunk has to wait until a lane has room."""
        lanes = self._lanes
        if not lanes.open:
            return not lanes.fallback
        return not lanes.shared and self._roomiest() is None

    def pick(self, link_queued_bytes: int) -> LaneEndpoint | None:
        """Choose the lane of the next chunk; None for the control link."""
        endpoint = self._roomiest()
        if endpoint is None or not self._lanes.shared:
            return endpoint
        return endpoint if endpoint.lane.queued_bytes <= link_queued_bytes else None

    def carries(self, endpoint: LaneEndpoint, payload: Payload) -> bool:
        """Return whether a lane carries a payload, by its size and kind of memory.

        If only a lane for device memory is allowed, the answer is yes for other memory
        too; the lane then reports why it cannot carry it.
        """
        device = payload.device if isinstance(payload, Fragments) else None
        kinds = endpoint.lane.memory_kinds
        if device is not None:
            return device.kind in kinds
        if payload.nbytes < endpoint.lane.bytes_min:
            return False
        return MemoryKind.HOST in kinds or not self._lanes.fallback

    def span(self, endpoint: LaneEndpoint, buffer: BufferId) -> int:
        """Return how many bytes of a buffer a lane takes at once; 0 means one chunk."""
        payload = self._buffers.whole(buffer)
        if not self.carries(endpoint, payload):
            return 0
        span_bytes = endpoint.lane.span_bytes
        if isinstance(payload, Fragments):
            if payload.device is not None:
                return 0
            piece_bytes = payload.nbytes // len(payload)
            span_bytes = min(span_bytes, SPAN_PIECES_MAX * piece_bytes)
        return span_bytes

    def takes(self, number: int, kind: MemoryKind) -> bool:
        """Return whether a lane moves this kind of memory itself."""
        endpoint = self._lanes.find(number)
        return endpoint is not None and kind in endpoint.lane.memory_kinds

    def send(
        self, endpoint: LaneEndpoint, chunk: Chunk, payload: Payload
    ) -> tuple[bytes, bytes]:
        """Queue a chunk on a lane; return the frame that announces it."""
        check = self._checks.of(payload, intact=endpoint.lane.intact)
        descriptor = endpoint.lane.send(payload, chunk)
        assert len(descriptor) <= DESCRIPTOR_BYTES_MAX
        self.dirty[endpoint.lane] = None  # bounded: LANES_MAX
        return self._core.lanes.announce(chunk, endpoint.number, descriptor, check)

    def flush(self) -> None:
        """Flush the lanes with queued chunks."""
        dirty = self.dirty
        self.dirty = {}
        for lane in dirty:
            if self._lanes.knows(lane):
                lane.flush()

    # --- receiving --------------------------------------------------------------------

    def receive(self, event: LaneDataReceived, payload: Payload | None) -> None:
        """Let a lane receive a payload that the peer has announced."""
        arrival = event.arrival
        endpoint = self._lanes.find(arrival.lane)
        assert endpoint is not None, "the core expects it"
        try:
            endpoint.lane.receive(event.descriptor, _Landing(arrival, payload))
        except ProtocolError:
            if event.descriptor:
                raise
            # The peer's endpoint sent it when it had ended but could not yet report
            # that.
            endpoint.lane.abort()
            return
        self.dirty[endpoint.lane] = None  # bounded: LANES_MAX

    # --- the lanes --------------------------------------------------------------------

    def payload_sent(self, lane: Lane, token: object) -> None:
        assert isinstance(token, Chunk)
        self._staging.sent(token)
        if self._core.chunk_sent(token):
            # Otherwise the memory is held until LANE_ACK, and nothing is due.
            self._owner.run()

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        assert isinstance(landing, _Landing)
        arrival = landing.arrival
        intact = matches(landing.payload, arrival.header)
        if self._staging.landed(arrival, self._in_place, intact=intact):
            self._core.lanes.payload_staged(arrival)
            return
        self._core.payload_landed(arrival, self._loop.time(), intact=intact)
        self._owner.run()

    def lane_writable(self, lane: Lane) -> None:
        self._owner.run()

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        endpoint = self._lanes.of(lane)
        self._staging.lane_gone(endpoint.number)
        reason = str(error or "this side ended it")
        left = self._lanes.advance(endpoint, LaneInput.GONE, reason)
        self._core.lane_gone(endpoint.number, endpoint.reason)
        logger.debug(
            "peer %s: lane %d has ended: %s, %s",
            self._core.agreement.peer,
            endpoint.number,
            endpoint.backend,
            endpoint.reason,
        )
        self._go_on(endpoint, left, error)
        self._owner.run()
        self._owner.check_ended()

    def peer_closed(self, event: LaneClosed) -> None:
        """End a lane whose endpoint at the peer is gone."""
        self._close(event.lane, event.reason or "the peer ended it")

    def stalled(self, event: LaneStalled) -> None:
        """End a lane that has lost its path."""
        self._close(event.lane, event.reason)

    def note_bytes(self) -> None:
        """Report to the core which lanes have moved bytes."""
        for endpoint in self._lanes.open:
            lane = endpoint.lane
            self._core.lanes.note_bytes(
                endpoint.number, lane.received_bytes, lane.queued_bytes
            )

    def end(self, *, graceful: bool = False) -> None:
        """End every lane, because the connection ends."""
        for endpoint in self._lanes.end():
            if graceful:
                endpoint.lane.close()
            else:
                endpoint.lane.abort()

    # --- inside -----------------------------------------------------------------------

    def _close(self, number: int, reason: str) -> None:
        endpoint = self._lanes.find(number)
        if endpoint is not None:
            left = self._lanes.advance(endpoint, LaneInput.CLOSE, reason)
            endpoint.lane.abort()
            self._go_on(endpoint, left, None)

    def _in_place(self, arrival: ChunkArrival) -> None:
        """Report to the core that a staged payload is in its place."""
        if self._core.lanes.expects(arrival):
            self._core.payload_landed(arrival, self._loop.time(), intact=True)

    def _roomiest(self) -> LaneEndpoint | None:
        best: LaneEndpoint | None = None
        for endpoint in self._lanes.open:
            queued_bytes = endpoint.lane.queued_bytes
            if (
                queued_bytes < LINK_QUEUE_BYTES
                and (best is None or queued_bytes < best.lane.queued_bytes)
                and self._core.lanes.room(endpoint.number, endpoint.lane.window_bytes)
            ):
                best = endpoint
        return best

    def _go_on(
        self, endpoint: LaneEndpoint, left: LaneState, error: Exception | None
    ) -> None:
        """Continue without a broken lane if allowed; otherwise end the connection."""
        if self._core.error is not None or self._lanes.ended:
            return
        if isinstance(error, ProtocolError):
            self._core.fail(error)
        elif left is not LaneState.OPEN:
            return
        elif self._lanes.open or self._lanes.fallback:
            self._owner.lane_broke(endpoint)
        else:
            lost = ConnectionLost(
                f"{endpoint.backend} failed and no other transport is allowed: "
                f"{endpoint.reason}"
            )
            lost.__cause__ = error
            self._core.fail(lost)
