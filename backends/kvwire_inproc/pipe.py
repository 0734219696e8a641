"""One direction of a link: the frames in flight, still in their sender's memory.

Two links share a pipe, and may live on loops in two threads. Its fields are read and
written under one lock for both pipes of a pair, and payload is copied under it too. So
a link ends at once: after :meth:`InprocPipe.end` has returned, nothing reads the
sender's memory any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import RLock

from kvwire.backend import Payload
from kvwire.limits import HEADER_BYTES
from kvwire.memory.buffers import slice_payload
from kvwire.memory.copy import copy


class PipeFrame:
    """A sent frame that is not completely delivered."""

    __slots__ = ("header", "judged", "moved", "payload", "token")

    def __init__(
        self, header: bytes, payload: Payload | None, token: object | None
    ) -> None:
        self.header = header
        self.payload = payload if payload is not None and payload.nbytes else None
        self.token = token
        self.moved = 0
        self.judged = False  # whether its faults were drawn already

    @property
    def payload_bytes(self) -> int:
        """Return the length of the whole payload."""
        return self.payload.nbytes if self.payload is not None else 0

    @property
    def nbytes(self) -> int:
        """Return the length of header and payload."""
        return HEADER_BYTES + self.payload_bytes


@dataclass(frozen=True, slots=True)
class PipeEnd:
    """How a side ended: with an error, or cleanly with None."""

    error: Exception | None


class InprocPipe:
    """Carries frames from one link to its peer, in order."""

    def __init__(self, lock: RLock) -> None:
        self.queued_bytes = 0
        self._lock = lock
        self._frames: deque[PipeFrame] = deque()
        self._sent: list[object] = []
        self._finishing = False
        self._end: PipeEnd | None = None
        self._retired = False

    # --- the sender -------------------------------------------------------------------

    def put(self, frames: list[PipeFrame]) -> None:
        """Append frames to the queue."""
        with self._lock:
            if self._end is None and not self._retired:
                self._frames.extend(frames)
                self.queued_bytes += sum(frame.nbytes for frame in frames)

    def finish(self) -> None:
        """End cleanly, after the queued frames."""
        with self._lock:
            self._finishing = True

    def end(self, error: Exception | None) -> None:
        """Drop the queue; afterwards nothing touches the sender's memory."""
        with self._lock:
            self._clear()
            if self._end is None:
                self._end = PipeEnd(error)

    def take_sent(self) -> list[object]:
        """Return the tokens of frames delivered since the last call."""
        with self._lock:
            sent = self._sent
            self._sent = []
            return sent

    # --- the receiver -----------------------------------------------------------------

    def head(self) -> PipeFrame | None:
        """Return the frame to deliver now, if any; it stays first until done."""
        with self._lock:
            return self._frames[0] if self._frames else None

    def move(self, frame: PipeFrame, landing: Payload | None, bytes_max: int) -> int:
        """Deliver more of the first frame's payload, to the same offset in ``landing``.

        Returns:
            The number of bytes moved; 0 once the sender has ended, since its memory is
            then its own again.
        """
        with self._lock:
            if self._end is not None or frame.payload is None:
                return 0
            count = min(bytes_max, frame.payload_bytes - frame.moved)
            if landing is not None:
                source = slice_payload(frame.payload, frame.moved, count)
                copy(source, slice_payload(landing, frame.moved, count))
            frame.moved += count
            self.queued_bytes -= count
            return count

    def done(self, frame: PipeFrame) -> None:
        """Remove the first frame, which has been delivered whole."""
        with self._lock:
            if self._end is None:
                self._remove(frame)

    def outcome(self) -> PipeEnd | None:
        """Return how the sender ended, once everything it sent has been delivered."""
        with self._lock:
            if self._end is None and self._finishing and self.drained:
                return PipeEnd(None)
            return self._end

    @property
    def drained(self) -> bool:
        """Return whether no frame waits."""
        return not self._frames

    def retire(self) -> None:
        """End the receiver; drop queued and future frames."""
        with self._lock:
            self._clear()
            self._retired = True

    def _clear(self) -> None:
        self._frames.clear()
        self.queued_bytes = 0

    def _remove(self, frame: PipeFrame) -> None:
        self._frames.remove(frame)
        self.queued_bytes -= frame.nbytes - frame.moved
        if frame.token is not None:
            self._sent.append(frame.token)
