"""Tagged messages: their order, their receives and the memory that they land in.

A small message is sent at once (MESSAGE) if the receiver has given credit for it. Any
other message is announced (ANNOUNCE), waits until a receive with memory for it is
posted (READY), and then moves as chunks. On the receiving side both kinds wait in one
queue per tag, in order of arrival, so messages of one tag never overtake each other.

If a receive is posted, a small message lands directly in the receive's memory.
Otherwise the message is held; credit bounds the number of held messages. If a receive's
buffer is too small for the message at the head of the queue, the receive fails, and the
message stays for a larger buffer. A receive without a buffer fails as well if the
message exceeds its limit. In this case the message is refused with FAIL, and the next
receive gets the next message: otherwise one announcement would fail every receive of
its tag for ever.

A device may still be using memory that a send reads or a receive writes. So an eager
message for a device is always held until the front has copied it there, and a larger
message moves only when the front permits it. Both take their place in the queues at
once.

A receive without a buffer may *stay*: a small message that finds it posted is reported
with its bytes, and needs neither a request nor a held buffer. Any other message ends
the receive as usual.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

import msgspec

from kvwire.errors import (
    FlowControlViolation,
    IntegrityError,
    MessageTooLarge,
    RequestError,
    UnexpectedFrame,
    UsageError,
    WireCode,
)
from kvwire.limits import REQUESTS_MAX
from kvwire.proto.chunks import ChunkMover
from kvwire.proto.credits import ReceiveCredit, SendCredit
from kvwire.proto.events import (
    MemoryWanted,
    MessageArrived,
    MessageDropped,
    MessageKept,
    Outbox,
)
from kvwire.proto.holds import Holds
from kvwire.proto.records import ChunkArrival, ChunkPlace, RequestRecord
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import (
    REQUEST_TRANSITIONS,
    RequestInput,
    RequestKind,
    RequestStage,
)
from kvwire.types import BufferId, RequestId
from kvwire.wire.control import Announce, Credit, Ready
from kvwire.wire.handshake_messages import ConnectionParameters
from kvwire.wire.header import FrameType, Header

# The most tags of one connection whose messages are dropped on arrival; beyond this the
# oldest tag is forgotten. Each tag belongs to a cancelled request, whose late answer
# comes soon or never.
DISCARDED_TAGS_MAX: Final = 4096

_MESSAGE = int(FrameType.MESSAGE)
_BUFFER = ChunkPlace.BUFFER
_POSTED = RequestStage.POSTED
_TO_CORE = ChunkPlace.WHOLE
# The states of a receive that an eager message lands in; no others are possible.
_MOVING = REQUEST_TRANSITIONS[RequestKind.RECV, RequestStage.POSTED, RequestInput.GO]
_WHOLE = REQUEST_TRANSITIONS[RequestKind.RECV, _MOVING, RequestInput.MOVED]


class UnreceivedMessage(msgspec.Struct, eq=False, kw_only=True):
    """A message that no RECV has taken yet.

    Attributes:
        buffer: The memory that holds it; None if it was only announced.
        wire_id: Its request, if it was announced.
        whole: Whether all of it has arrived, or it was only announced.
        error: If it arrived damaged, the error for its receive.
    """

    nbytes: int
    buffer: BufferId | None = None
    wire_id: RequestId | None = None
    whole: bool = True
    error: RequestError | None = None


class Messages:
    """Sends and receives the messages of one connection."""

    def __init__(
        self,
        outbox: Outbox,
        requests: RequestTable,
        chunks: ChunkMover,
        holds: Holds,
        *,
        mine: ConnectionParameters,
        theirs: ConnectionParameters,
    ) -> None:
        self._outbox = outbox
        self._framing = outbox.framing
        self._requests = requests
        self._chunks = chunks
        self._holds = holds
        self._eager_bytes = min(mine.eager_bytes, theirs.eager_bytes)
        # The same limit for sending, as long as the connection is open.
        self._may_send_bytes = self._eager_bytes
        self._send_credit = SendCredit(theirs.window_messages, theirs.window_bytes)
        self._credit = ReceiveCredit(mine.window_messages, mine.window_bytes)
        # By tag, oldest first. A peer may withdraw any of its messages at any time.
        self._waiting: dict[int, OrderedDict[UnreceivedMessage, None]] = {}
        self._posted: dict[int, deque[RequestRecord]] = {}
        self._announced: dict[int, tuple[int, UnreceivedMessage]] = {}
        # Incomplete messages: the held message, or None if it lands in a receive.
        self._arriving: dict[ChunkArrival, UnreceivedMessage | None] = {}
        # Tags whose messages are discarded; a receive removes its tag.
        self._unwanted: OrderedDict[int, None] = OrderedDict()
        self._refusing = False

    # --- sending ----------------------------------------------------------------------

    def eager_header(self, tag: int, nbytes: int, check: int | None) -> bytes | None:
        """Return the header of a message to send at once; None without credit for it.

        The message is complete for its sender as soon as the link has its bytes. If
        None is returned, announce the message; that fails if the connection is not
        open.
        """
        if nbytes > self._may_send_bytes or not self._send_credit.spend(nbytes):
            return None
        return self._framing.payload(_MESSAGE, nbytes, 0, 0, tag, check)

    def end_eager(self) -> None:
        """Stop eager messages, because the connection is no longer open."""
        self._may_send_bytes = -1

    def announce(self, request: RequestRecord) -> None:
        """Send ANNOUNCE for a message; it waits until its receiver has memory."""
        self._requests.start(request)
        body = Announce(tag=request.tag.to_bytes(8, "little"), nbytes=request.nbytes)
        self._outbox.send(FrameType.ANNOUNCE, body, request=request.wire_id)

    def ready_received(self, header: Header, body: Ready) -> None:
        """Handle READY: the receiver has memory for a message that we announced."""
        request = self._requests.find(header.request)
        if request is None:
            return
        if request.kind is not RequestKind.SEND or body.nbytes != request.nbytes:
            raise UnexpectedFrame(
                "KVW-MS-02", f"READY for {body.nbytes} bytes of a {request.kind.value}"
            )
        request.advance(RequestInput.GO)
        if request.on_device:
            wanted = MemoryWanted(request=request, nbytes=request.nbytes)
            self._outbox.report(wanted)
        elif request.nbytes:
            self._chunks.begin_send(request)
        else:
            self._nothing_to_move(request)

    def credit_received(self, body: Credit) -> None:
        """Handle CREDIT: the receiver returns credit."""
        self._send_credit.add(body.messages, body.nbytes)

    # --- receiving --------------------------------------------------------------------

    def post(self, request: RequestRecord) -> None:
        """Post a receive; it takes a message of its tag now, or when one arrives."""
        self._requests.start(request)
        tag = request.tag
        if self._unwanted:
            self._unwanted.pop(tag, None)
        posted = self._posted.get(tag)
        if posted is None:
            self._posted[tag] = deque((request,))  # bounded: REQUESTS_MAX
        else:
            posted.append(request)  # bounded: REQUESTS_MAX
        if tag in self._waiting:
            self._meet(tag)

    def withdraw(self, request: RequestRecord) -> bool:
        """Withdraw a receive without a message; return whether that was possible."""
        queue = self._posted.get(request.tag)
        if (
            request.state is not RequestStage.POSTED
            or not queue
            or request not in queue
        ):
            return False
        queue.remove(request)
        if not queue:
            del self._posted[request.tag]
        return True

    def discard(self, tag: int) -> int:
        """Drop a tag's messages until it is received again.

        Returns the number of messages that were here, on their way or announced.
        """
        if tag in self._posted:
            raise UsageError(
                f"discard(tag={tag}): a receive waits for this tag; cancel that "
                "receive first"
            )
        self._unwanted[tag] = None  # bounded: DISCARDED_TAGS_MAX
        self._unwanted.move_to_end(tag)
        if len(self._unwanted) > DISCARDED_TAGS_MAX:
            self._unwanted.popitem(last=False)
        waiting = list(self._waiting.get(tag, ()))
        for message in waiting:
            if message.whole:
                self._drop(tag, message)
        return len(waiting)

    @property
    def unreceived(self) -> dict[int, int]:
        """Return the number of messages per tag that wait for a receive."""
        return {tag: len(queue) for tag, queue in self._waiting.items()}

    @property
    def oldest(self) -> dict[int, UnreceivedMessage]:
        """Return the oldest message of each tag that waits for a receive."""
        return {tag: next(iter(queue)) for tag, queue in self._waiting.items()}

    def provide(self, request: RequestRecord, buffer: BufferId) -> None:
        """Give a request memory for its message, or permit the use of device memory."""
        if request.over:
            # It ended before it got memory: no link has seen the buffer.
            self._holds.retire(buffer)
            return
        request.buffer = buffer
        if request.kind is not RequestKind.SEND:
            self._receive(request)
        elif request.nbytes:
            self._chunks.begin_send(request)
        else:
            self._nothing_to_move(request)

    def filled(self, request: RequestRecord) -> None:
        """End a receive into a device, to which the front has copied the held message.

        If the receive has ended meanwhile, drop the message instead.
        """
        self._taken(request.nbytes)
        if not request.over:
            request.advance(RequestInput.MOVED)
            self._requests.finish(request)

    def message_header(self, header: Header) -> ChunkArrival:
        """Return the place for the body of a MESSAGE: a receive, or a held buffer."""
        length = header.length
        tag = header.offset
        if length > self._eager_bytes or header.request or header.segment:
            raise UnexpectedFrame(
                "KVW-MS-01",
                f"a message of {length} bytes with request {header.request} and "
                f"segment {header.segment}; the limit is {self._eager_bytes} bytes, "
                "and both numbers must be 0",
            )
        self._credit.arrived(length)
        # Before: the peer has spent credit for this message. After: a buffer is held
        # for it, which belongs to a matched receive or to the queue; `_arriving` has
        # which. To keep a tag's order, it lands directly in a receive only if no
        # message waits before it.
        if tag not in self._waiting and (posted := self._posted.get(tag)):
            request = posted[0]
            buffer = request.buffer
            if request.stays and length <= request.nbytes:
                return ChunkArrival(_TO_CORE, header, request=request)
            if (
                buffer is not None
                and length <= request.nbytes
                and not request.on_device
            ):
                posted.popleft()
                if not posted:
                    del self._posted[tag]
                request.nbytes = length
                request.state = _MOVING
                self._holds.take(buffer)
                arrival = ChunkArrival(_BUFFER, header, buffer, request.base, request)
                self._arriving[arrival] = None  # bounded: EAGER_WINDOW_MESSAGES
                return arrival
        buffer = self._holds.new()
        self._holds.take(buffer)
        waiting = UnreceivedMessage(nbytes=length, buffer=buffer, whole=False)
        self._queue(tag, waiting)
        arrival = ChunkArrival(ChunkPlace.HOLD, header, buffer)
        self._arriving[arrival] = waiting  # bounded: EAGER_WINDOW_MESSAGES
        return arrival

    def message_landed(
        self, arrival: ChunkArrival, body: bytes | memoryview, *, intact: bool
    ) -> None:
        """Act on an eager message that has arrived."""
        if arrival.place is _TO_CORE:
            request = arrival.request
            if intact and request is not None and request.state is _POSTED:
                nbytes = arrival.header.length
                if self._credit.taken(nbytes):
                    self._give_credit_back()
                self._outbox.report(MessageArrived(request, body))
                return
            self._keep(arrival, body, intact=intact)
        error = None if intact else IntegrityError("the message arrived damaged")
        waiting = self._arriving.pop(arrival)
        if waiting is not None:
            waiting.whole = True
            waiting.error = error
            self._let_go(waiting)
            tag = arrival.header.offset
            if tag in self._unwanted:
                self._drop(tag, waiting)
            else:
                self._meet(tag)
            return
        request = arrival.request
        buffer = arrival.buffer
        assert request is not None
        assert buffer is not None
        # Return credit for every message that arrived, even if its receive has ended:
        # the sender has spent the credit, and would run out.
        if self._credit.taken(arrival.header.length):
            self._give_credit_back()
        if request.over or error:
            self._holds.drop(buffer)
            if error:
                self._requests.fail(request, error, code=None)
            return
        request.state = _WHOLE
        request.over = True
        self._requests.finish(request, in_use=True)

    def _keep(
        self, arrival: ChunkArrival, body: bytes | memoryview, *, intact: bool
    ) -> None:
        """Hold a message that no receive takes from the core.

        The receive that found it has ended, or it arrived damaged and ends its receive.
        """
        tag = arrival.header.offset
        buffer = self._holds.new()
        self._holds.take(buffer)
        nbytes = arrival.header.length
        waiting = UnreceivedMessage(nbytes=nbytes, buffer=buffer, whole=False)
        self._queue(tag, waiting)
        self._arriving[arrival] = waiting  # bounded: EAGER_WINDOW_MESSAGES
        if intact:
            self._outbox.report(MessageKept(buffer=buffer, body=body))

    def announced(self, header: Header, body: Announce) -> None:
        """Handle ANNOUNCE: the peer's message waits for memory here."""
        wire_id = self._requests.admit(header.request)
        if len(self._announced) >= REQUESTS_MAX:
            raise FlowControlViolation(
                "KVW-MS-03", f"more than {REQUESTS_MAX} announced messages wait"
            )
        if self._refusing:
            self._send_gone(wire_id)
            return
        tag = int.from_bytes(body.tag, "little")
        if tag in self._unwanted:
            self._send_unwanted(wire_id, tag)
            return
        waiting = UnreceivedMessage(nbytes=body.nbytes, wire_id=wire_id)
        self._announced[wire_id] = (tag, waiting)  # bounded: REQUESTS_MAX
        self._queue(tag, waiting)
        self._meet(tag)

    def withdrawn(self, wire_id: int) -> None:
        """Handle the withdrawal of a message that the sender announced."""
        found = self._announced.pop(wire_id, None)
        if found is not None:
            tag, waiting = found
            del self._waiting[tag][waiting]
            self._trim(tag)

    def refuse_announced(self) -> None:
        """Refuse present and future announced messages with FAIL.

        Otherwise two sides that close at the same time would each wait for the other's
        receives.
        """
        self._refusing = True
        for wire_id in list(self._announced):
            self.withdrawn(wire_id)
            self._send_gone(wire_id)

    def peer_closed(self) -> None:
        """Drop announcements, which cannot be answered; keep held messages."""
        for wire_id in list(self._announced):
            self.withdrawn(wire_id)

    @property
    def posted(self) -> list[RequestRecord]:
        """Return the receives without a message; a snapshot."""
        return [request for queue in self._posted.values() for request in queue]

    def link_gone(self) -> None:
        """Drop incomplete messages; keep complete ones."""
        for arrival, waiting in self._arriving.items():
            if waiting is None:
                assert arrival.buffer is not None
                self._holds.drop(arrival.buffer)
                continue
            tag = arrival.header.offset
            del self._waiting[tag][waiting]
            self._trim(tag)
            self._let_go(waiting)
        self._arriving.clear()

    def waits(self, tag: int, *, whole: bool) -> bool:
        """Return whether a message of this tag waits; if ``whole``, a complete one."""
        queue = self._waiting.get(tag)
        return queue is not None and (next(iter(queue)).whole or not whole)

    # --- matching ---------------------------------------------------------------------

    def _meet(self, tag: int) -> None:
        """Match the messages and the receives of one tag, oldest first."""
        # Each turn handles one receive. Its message leaves the queue, or stays at the
        # head if the receive was too small. After: there is no receive left, or no
        # message, or the oldest message is still arriving.
        while tag in self._posted and (queue := self._waiting.get(tag)):
            waiting = next(iter(queue))
            # An arriving message keeps its place: a later message must not overtake it.
            if not waiting.whole:
                return
            request = self._unpost(tag)
            fits = waiting.nbytes <= request.nbytes
            if not fits and request.buffer is not None:
                end = "it waits for a larger buffer, or a receive without `into`"
                self._requests.fail(request, _too_large(waiting, request, end))
                continue
            del queue[waiting]
            self._trim(tag)
            if fits:
                self._hand_over(waiting, request)
            else:
                self._refuse(waiting, request)

    def _refuse(self, waiting: UnreceivedMessage, request: RequestRecord) -> None:
        """Refuse a message that is over the limit of a receive without a buffer."""
        error = _too_large(waiting, request, "it was refused")
        if waiting.wire_id is None:
            self._taken(waiting.nbytes)
        else:
            del self._announced[waiting.wire_id]
            self._requests.send_fail(
                waiting.wire_id, WireCode.TOO_LARGE, f"the receiver: {error}"
            )
        # The front has not kept a damaged message.
        held = None if waiting.error else waiting.buffer
        self._requests.fail(request, error, held=held)

    def _drop(self, tag: int, waiting: UnreceivedMessage) -> None:
        """Drop a message of a discarded tag, and give its credit back."""
        del self._waiting[tag][waiting]
        self._trim(tag)
        if waiting.wire_id is not None:
            del self._announced[waiting.wire_id]
            self._send_unwanted(waiting.wire_id, tag)
            return
        self._taken(waiting.nbytes)
        assert waiting.buffer is not None
        if not waiting.error:
            self._outbox.report(MessageDropped(buffer=waiting.buffer))

    def _hand_over(self, waiting: UnreceivedMessage, request: RequestRecord) -> None:
        request.nbytes = waiting.nbytes
        if waiting.wire_id is not None:
            del self._announced[waiting.wire_id]
            self._requests.match(request, waiting.wire_id)
            if request.buffer is None or request.on_device:
                self._outbox.report(
                    MemoryWanted(request=request, nbytes=waiting.nbytes)
                )
            else:
                self._receive(request)
            return
        if request.on_device and not waiting.error:
            # The credit is returned once the message is in the device; until then the
            # front keeps it.
            request.advance(RequestInput.GO)
            wanted = MemoryWanted(
                request=request, nbytes=waiting.nbytes, held=waiting.buffer
            )
            self._outbox.report(wanted)
            return
        self._taken(waiting.nbytes)
        if waiting.error:
            self._requests.fail(request, waiting.error, code=None)
            return
        request.state = _WHOLE
        request.over = True
        self._requests.finish(request, held=waiting.buffer)

    def _receive(self, request: RequestRecord) -> None:
        self._outbox.send(
            FrameType.READY, Ready(nbytes=request.nbytes), request=request.wire_id
        )
        request.advance(RequestInput.GO)
        if request.nbytes:
            self._chunks.begin_receive(request)
        else:
            self._nothing_to_move(request)

    def _nothing_to_move(self, request: RequestRecord) -> None:
        """End an announced message of 0 bytes, which has no payload."""
        request.advance(RequestInput.MOVED)
        self._requests.finish(request)

    def _let_go(self, waiting: UnreceivedMessage) -> None:
        """Retire a held message's buffer, and drop the link's hold on it."""
        assert waiting.buffer is not None
        self._holds.drop_and_retire(waiting.buffer)

    def _send_gone(self, wire_id: int) -> None:
        reason = "the receiver has closed the connection"
        self._requests.send_fail(wire_id, WireCode.GOING_AWAY, reason)

    def _send_unwanted(self, wire_id: int, tag: int) -> None:
        reason = f"the receiver discards messages of tag {tag}"
        self._requests.send_fail(wire_id, WireCode.CANCELLED, reason)

    def _taken(self, nbytes: int) -> None:
        if self._credit.taken(nbytes):
            self._give_credit_back()

    def _give_credit_back(self) -> None:
        messages, returned = self._credit.give_back()
        self._outbox.send(FrameType.CREDIT, Credit(messages=messages, nbytes=returned))

    def _queue(self, tag: int, waiting: UnreceivedMessage) -> None:
        # bounded: EAGER_WINDOW_MESSAGES held and REQUESTS_MAX announced
        self._waiting.setdefault(tag, OrderedDict())[waiting] = None

    def _unpost(self, tag: int) -> RequestRecord:
        queue = self._posted[tag]
        request = queue.popleft()
        if not queue:
            del self._posted[tag]
        return request

    def _trim(self, tag: int) -> None:
        if not self._waiting[tag]:
            del self._waiting[tag]


def _too_large(
    waiting: UnreceivedMessage, request: RequestRecord, end: str
) -> MessageTooLarge:
    return MessageTooLarge(
        f"the next message of tag {request.tag} has {waiting.nbytes} bytes, the "
        f"receive takes {request.nbytes}; {end}"
    )
