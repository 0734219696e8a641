"""The requests of one connection: numbers, states, deadlines, and exactly one end each.

Each side numbers its requests consecutively (the client odd, the server even) and never
reuses a number. So every number belongs to an open request, to an ended request, or to
none yet. A frame for an ended request is late, and is dropped; a frame for an unused
number breaks the protocol.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from kvwire.errors import (
    DeadlineExceeded,
    FlowControlViolation,
    KVWireError,
    UnexpectedFrame,
    UsageError,
    WireCode,
    sayable,
)
from kvwire.limits import REQUESTS_MAX
from kvwire.proto.events import Outbox, RequestDone
from kvwire.proto.holds import Holds
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.types import BufferId, RequestId, Role
from kvwire.wire.control import Fail, Fin
from kvwire.wire.header import FrameType

# Request numbers are 32 bits and never reused within a connection.
REQUEST_ID_MAX: Final = 2**32 - 1

SENDING: Final = frozenset(
    {
        RequestKind.SEND,
        RequestKind.PUT,
        RequestKind.SERVE_GET,
        RequestKind.SERVE_READ,
    }
)
SERVING: Final = frozenset({RequestKind.SERVE_PUT, RequestKind.SERVE_GET})
_RECV: Final = RequestKind.RECV
_SEND: Final = RequestKind.SEND

_NO_NUMBERS: Final = (
    "this connection has used all of its 2**31 request numbers; reconnect"
)

# The time, a number that makes entries with equal times comparable, and the request.
_Deadline = tuple[float, int, RequestRecord]


class RequestTable:
    """Holds the open requests of one connection."""

    def __init__(self, role: Role, outbox: Outbox, holds: Holds) -> None:
        self._next_id, self._next_theirs = (1, 2) if role is Role.CLIENT else (2, 1)
        self._outbox = outbox
        self._holds = holds
        # By number: this side's requests, and the peer's.
        self._ours: dict[int, RequestRecord] = {}
        self._theirs: dict[int, RequestRecord] = {}
        self._unmatched: dict[int, RequestRecord] = {}
        self._deadlines: list[_Deadline] = []
        self._deadlines_max = REQUESTS_MAX
        self._deadline_count = 0

    def __iter__(self) -> Iterator[RequestRecord]:
        """Iterate over a snapshot of all open requests, oldest first."""
        yield from list(self._ours.values())
        yield from list(self._theirs.values())
        yield from list(self._unmatched.values())

    def __len__(self) -> int:
        return len(self._ours) + len(self._theirs) + len(self._unmatched)

    @property
    def next_deadline(self) -> float | None:
        """Return the earliest deadline of an open request."""
        while self._deadlines and not _stands(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def start(self, request: RequestRecord) -> None:
        """Give this side's request a number, and keep it until it ends.

        A RECV gets its number when it is matched with a message; a put or get of device
        memory when it asks the peer. The peer's requests do not count towards the
        limit.

        Raises:
            UsageError: The table is full.
        """
        if len(self._ours) + len(self._unmatched) >= REQUESTS_MAX:
            raise UsageError(
                f"{REQUESTS_MAX} requests are open on this connection, which is the "
                "limit; wait for some of them"
            )
        if self._next_id > REQUEST_ID_MAX:
            raise UsageError(_NO_NUMBERS)
        if request.kind is _RECV or (request.on_device and request.kind is not _SEND):
            self._unmatched[id(request)] = request  # bounded: REQUESTS_MAX
        else:
            request.wire_id = RequestId(self._next_id)
            self._ours[self._next_id] = request  # bounded: REQUESTS_MAX
            self._next_id += 2
        if request.deadline is not None:
            self._note_deadline(request)

    def number(self, request: RequestRecord) -> None:
        """Give a put or get of device memory its number, when it asks the peer.

        Raises:
            UsageError: No number is left.
        """
        if self._next_id > REQUEST_ID_MAX:
            raise UsageError(_NO_NUMBERS)
        self._unmatched.pop(id(request), None)
        request.wire_id = RequestId(self._next_id)
        self._ours[self._next_id] = request  # bounded: REQUESTS_MAX
        self._next_id += 2

    def match(self, request: RequestRecord, wire_id: RequestId) -> None:
        """Give a RECV the number of its message."""
        self._unmatched.pop(id(request), None)
        request.wire_id = wire_id
        self._theirs[wire_id] = request  # bounded: REQUESTS_MAX

    def admit(self, wire_id: int) -> RequestId:
        """Check and return the number of a request that the peer starts.

        A get may have ended at the peer while our link has not finished its last frame,
        so the limit is twice the number of requests that the peer may have open.
        """
        if wire_id != self._next_theirs:
            raise UnexpectedFrame(
                "KVW-RQ-02",
                f"request number {wire_id}; the peer's next one is {self._next_theirs}",
            )
        if len(self._theirs) >= 2 * REQUESTS_MAX:
            raise FlowControlViolation(
                "KVW-RQ-03", f"more than {REQUESTS_MAX} requests open at once"
            )
        self._next_theirs += 2
        return RequestId(wire_id)

    def serve(self, request: RequestRecord) -> None:
        """Keep a request that the peer has started."""
        self._theirs[request.wire_id] = request  # bounded: REQUESTS_MAX

    def find(self, wire_id: int) -> RequestRecord | None:
        """Return the open request with this number, or None."""
        if (wire_id ^ self._next_theirs) % 2 == 0:
            request = self._theirs.get(wire_id)
            due = self._next_theirs
        else:
            request = self._ours.get(wire_id)
            due = self._next_id
        if request is None and not 0 < wire_id < due:
            raise UnexpectedFrame(
                "KVW-RQ-04", f"a frame for request {wire_id}, which was never started"
            )
        return request

    def finish(
        self,
        request: RequestRecord,
        *,
        error: KVWireError | None = None,
        held: BufferId | None = None,
        in_use: bool = False,
    ) -> None:
        """Remove an ended request, and report its end.

        If ``in_use``, its memory has a hold, which is dropped now.
        """
        assert request.over
        wire_id = request.wire_id
        buffer = request.buffer
        if not wire_id:
            self._unmatched.pop(id(request), None)
        elif (wire_id ^ self._next_theirs) % 2 == 0:
            self._theirs.pop(wire_id, None)
        else:
            self._ours.pop(wire_id, None)
        if in_use:
            assert buffer is not None
            self._holds.drop_and_retire(buffer)
        elif buffer is not None and request.kind not in SERVING:
            self._holds.retire(buffer)
        nbytes = request.nbytes if error is None else 0
        self._outbox.report(
            RequestDone(request=request, error=error, nbytes=nbytes, held=held)
        )

    def fail(
        self,
        request: RequestRecord,
        error: KVWireError,
        *,
        code: WireCode | None = None,
        held: BufferId | None = None,
    ) -> None:
        """End a request with an error; does nothing if it has ended.

        Args:
            request: The request.
            error: The error that its owner gets.
            code: The code of the FAIL to send; None sends none.
            held: The buffer of the held message that the request would have taken.
        """
        if request.over:
            return
        request.advance(RequestInput.FAIL)
        if code is not None and request.wire_id:
            self.send_fail(request.wire_id, code, str(error))
        self.finish(request, error=error, held=held)

    def send_fail(self, wire_id: int, code: WireCode, reason: str) -> None:
        """Send FAIL for a request number, which need not be open here."""
        body = Fail(code=code, reason=sayable(reason))
        self._outbox.send(FrameType.FAIL, body, request=wire_id)

    def send_fin(self, request: RequestRecord) -> None:
        """Send FIN, because every byte of a put is in place."""
        body = Fin(nbytes=request.nbytes)
        self._outbox.send(FrameType.FIN, body, request=request.wire_id)

    def expire(self, now: float) -> list[RequestRecord]:
        """Return the requests past their deadline, which the caller must fail."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if _stands(entry):
                due.append(entry[2])
        return due

    @staticmethod
    def expired(request: RequestRecord) -> DeadlineExceeded:
        """Return the error for a request past its deadline, with its progress."""
        what = request.kind.value
        if request.kind in (RequestKind.SEND, RequestKind.RECV):
            what += f" of tag {request.tag}"
        if request.state is RequestStage.POSTED:
            return DeadlineExceeded(
                f"the deadline passed while the {what} waited for the peer"
            )
        return DeadlineExceeded(
            f"the deadline passed while the {what} was {request.state.value}, "
            f"{request.moved} of {request.nbytes} bytes moved"
        )

    def _note_deadline(self, request: RequestRecord) -> None:
        assert request.deadline is not None
        if len(self._deadlines) >= self._deadlines_max:
            # Most requests end long before their deadlines.
            self._deadlines = [entry for entry in self._deadlines if _stands(entry)]
            heapq.heapify(self._deadlines)
            self._deadlines_max = max(REQUESTS_MAX, 2 * len(self._deadlines))
        self._deadline_count += 1
        entry = (request.deadline, self._deadline_count, request)
        heapq.heappush(self._deadlines, entry)  # bounded: twice REQUESTS_MAX


def _stands(entry: _Deadline) -> bool:
    """Return whether the request of a deadline is still open."""
    return not entry[2].over
