"""The requests of one connection: numbers, states, deadlines, and exactly one end each.

Each side numbers the requests it starts (the client odd, the server even), one after
the other and never twice the same. So any number is either open, or was open and is
over, or was never given: frames for one that is over are late and are dropped, frames
for one that was never given break the protocol.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

import msgspec

from kvwire.errors import (
    DeadlineExceeded,
    FlowControlViolation,
    KVWireError,
    UnexpectedFrame,
    UsageError,
    WireCode,
    sayable,
)
from kvwire.limits import REQUEST_ID_MAX, REQUESTS_MAX
from kvwire.proto.events import Outbox, RequestDone
from kvwire.proto.holds import Holds
from kvwire.proto.state import (
    REQUEST_TRANSITIONS,
    TERMINAL,
    RequestInput,
    RequestKind,
    RequestStage,
)
from kvwire.types import BufferId, RegionId, RequestId, Role
from kvwire.wire.control import Fail, Fin
from kvwire.wire.header import FrameType

SENDING: Final = frozenset({RequestKind.SEND, RequestKind.PUT, RequestKind.SERVE_GET})
SERVING: Final = frozenset({RequestKind.SERVE_PUT, RequestKind.SERVE_GET})
_UNMATCHED: Final = RequestId(0)
# A member of an enum takes several times as long to look up.
_RECV: Final = RequestKind.RECV


class ChunkSet:
    """Knows which chunks of one movement have come; needs no memory in order.

    A bitmap would be as long as the peer's number of bytes says, before one of them has
    come. Here all below ``_next`` have come, and each number kept beyond it was paid
    for with the payload of a whole chunk.
    """

    __slots__ = ("_beyond", "_holes", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._beyond: set[int] = set()
        self._holes: set[int] = set()

    def note(self, number: int) -> bool:
        """Note a chunk; False if it had come before."""
        if number in self._holes:
            self._holes.remove(number)
            return True
        if number < self._next or number in self._beyond:
            return False
        if number > self._next:
            # Not more than there are chunks of CHUNK_BYTES_MIN in REQUEST_BYTES_MAX.
            self._beyond.add(number)  # bounded: REQUEST_BYTES_MAX, CHUNK_BYTES_MIN
            return True
        self._next += 1
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        return True

    def forget(self, number: int) -> None:
        """Remove a chunk that got lost with its lane: it may come again."""
        if number in self._beyond:
            self._beyond.remove(number)
        else:
            self._holes.add(number)  # bounded: LANE_PAYLOADS_MAX, LANES_MAX


class RequestRecord(msgspec.Struct, eq=False, kw_only=True):
    """Holds one movement of bytes, from this side's view. The core changes it.

    Attributes:
        kind: What it does.
        wire_id: Its number on the wire; 0 for a RECV that has no match yet.
        tag: Of a message.
        buffer: Its memory; None for a RECV that was posted without any.
        base: Where in the buffer its bytes begin.
        nbytes: How many; for a posted RECV, how many it could take.
        region: The region it works on, for SERVE_PUT and SERVE_GET.
        state: How far it is; of a new one, FIRST_STATE of its kind.
        moved: Bytes handed to the link (sending) or verified (receiving).
        in_flight: Frames handed to the link that it still works on.
        arrived: Receiving: the chunks whose headers were seen.
        confirmed: The peer's FIN came before our link said that all was sent.
        over: Whether it is done or has failed.
        turn_bytes: What it may still send in this turn; below 0 it has sent too much.
        context: The front's own object for it.
    """

    kind: RequestKind
    wire_id: RequestId = _UNMATCHED
    buffer: BufferId | None
    nbytes: int
    tag: int = 0
    base: int = 0
    region: RegionId | None = None
    deadline: float | None = None
    state: RequestStage
    moved: int = 0
    in_flight: int = 0
    arrived: ChunkSet | None = None
    confirmed: bool = False
    over: bool = False
    turn_bytes: int = 0
    context: object = None

    def advance(self, event: RequestInput) -> None:
        """Take one step of the table."""
        new = REQUEST_TRANSITIONS.get((self.kind, self.state, event))
        if new is None:
            raise UnexpectedFrame(
                "KVW-RQ-01",
                f"request {self.wire_id}: {event.value} while a {self.kind.value} is "
                f"{self.state.value}",
            )
        self.state = new
        self.over = new in TERMINAL


# When, a number that makes entries of one time comparable, and what.
_Deadline = tuple[float, int, RequestRecord]


class RequestTable:
    """Holds the open requests of one connection."""

    def __init__(self, role: Role, outbox: Outbox, holds: Holds) -> None:
        self._next_id, self._next_theirs = (1, 2) if role is Role.CLIENT else (2, 1)
        self._outbox = outbox
        self._holds = holds
        # By their numbers: those numbered here, and those numbered by the peer.
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
        """Return when the earliest open request expires."""
        while self._deadlines and not _stands(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def start(self, request: RequestRecord) -> None:
        """Keep a request of our own until it is over, and number it.

        A RECV gets the number of the message that it meets. What the peer has started
        does not count: it cannot take our room.

        Raises:
            UsageError: It would be one more than the table holds.
        """
        if len(self._ours) + len(self._unmatched) >= REQUESTS_MAX:
            raise UsageError(
                f"{REQUESTS_MAX} requests are open on this connection already; wait "
                f"for some of them"
            )
        if self._next_id > REQUEST_ID_MAX:
            raise UsageError(
                "this connection has used all of its 2**31 request numbers; reconnect"
            )
        if request.kind is _RECV:
            self._unmatched[id(request)] = request  # bounded: REQUESTS_MAX
        else:
            request.wire_id = RequestId(self._next_id)
            self._ours[self._next_id] = request  # bounded: REQUESTS_MAX
            self._next_id += 2
        if request.deadline is not None:
            self._note_deadline(request)

    def match(self, request: RequestRecord, wire_id: RequestId) -> None:
        """Give a RECV the number of the message it has met."""
        self._unmatched.pop(id(request), None)
        request.wire_id = wire_id
        self._theirs[wire_id] = request  # bounded: REQUESTS_MAX

    def admit(self, wire_id: int) -> RequestId:
        """Check the number of a request that the peer starts.

        The peer may have forgotten a get whose last frame our link still works on, so
        twice as many are let in as it may have open by its own count.
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
        """Return the open request with this number; None if it is over."""
        if (wire_id ^ self._next_theirs) % 2 == 0:
            request, due = self._theirs.get(wire_id), self._next_theirs
        else:
            request, due = self._ours.get(wire_id), self._next_id
        if request is None and not 0 < wire_id < due:
            raise UnexpectedFrame(
                "KVW-RQ-04", f"a frame for request {wire_id}, which never was"
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
        """Remove a request that is over, and report its end.

        ``in_use``: its memory has a hold, which ends with it.
        """
        assert request.over
        wire_id, buffer = request.wire_id, request.buffer
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
        tell: WireCode | None = None,
        held: BufferId | None = None,
    ) -> None:
        """End a request with an error; does nothing if it is over.

        Args:
            request: Which one.
            error: What its owner gets.
            tell: What the peer is told, if it knows of the request.
            held: A message that was held, and that nobody will take any more.
        """
        if request.over:
            return
        request.advance(RequestInput.FAIL)
        if tell is not None and request.wire_id:
            self.tell_failed(request.wire_id, tell, str(error))
        self.finish(request, error=error, held=held)

    def tell_failed(self, wire_id: int, code: WireCode, reason: str) -> None:
        """Send FAIL for a request, open here or not."""
        body = Fail(code=code, reason=sayable(reason))
        self._outbox.send(FrameType.FAIL, body, request=wire_id)

    def tell_done(self, request: RequestRecord) -> None:
        """Send FIN: every byte of a put is in place."""
        body = Fin(nbytes=request.nbytes)
        self._outbox.send(FrameType.FIN, body, request=request.wire_id)

    def expire(self, now: float) -> list[RequestRecord]:
        """Return the requests past their deadline; the caller fails them."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if _stands(entry):
                due.append(entry[2])
        return due

    @staticmethod
    def expired(request: RequestRecord) -> DeadlineExceeded:
        """Return the error of a request past its deadline."""
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
    """Tell whether a deadline is still to be met."""
    return not entry[2].over
