"""Matches the two ends of KV transfers, in either order of arrival.

One side names a transfer with ``publish`` or ``expect`` and waits; the other requests
it with ``pull`` or ``push``. Each name and role has a *slot*, where the first to arrive
waits: our end until its lease ends, a peer's request until the peer gives up.

Ended transfers are remembered, so that a peer with a late request gets the reason
instead of waiting. If a leg has ended and its peer may not know how, the leg stays in
its slot until the peer knows or has given up.

One rule holds between any two calls: a question waits only in a slot that has no end,
or whose end can answer only LATER.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.errors import (
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    PeerError,
    RequestCancelled,
    RequestError,
    UsageError,
    WireCode,
)
from kvwire.limits import KIB, MIB, WAITING_LOG_S
from kvwire.proto.events import TransferOpened
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestKind
from kvwire.transfers.leg import Leg
from kvwire.transfers.offer import TransferOffer
from kvwire.transfers.options import transfer_key
from kvwire.transfers.ports import SharedServices
from kvwire.transfers.state import OFF_LINK, UNNOTIFIED, LegState, TransferState
from kvwire.transfers.transfer import Transfer, TransferView

# Ids of failed transfers, which are kept to answer late requests.
TOMBSTONES_MAX: Final = 4096
# Memory for the descriptions and records of waiting transfers, per connection and in
# total: 8 KiB for each, enough for about a hundred groups or a partial redial.
WAITING_BYTES_MAX: Final = 8 * MIB
WAITING_BYTES_ALL_MAX: Final = 64 * MIB
# The memory of one record besides its description.
WAITING_RECORD_BYTES: Final = 2 * KIB

logger: logging.Logger = logging.getLogger("kvwire.transfers")

Key = tuple[bytes, bool]
"""A name on the wire, and whether this side is the producer."""


class Answer(enum.Enum):
    """The possible reactions to a peer's request for a transfer."""

    YES = "yes"
    NO = "no"
    LATER = "later"
    """Not yet: this side has to lose the link that the peer has lost, or needs memory
    for the outcome of an ended transfer.
    """


class Question(NamedTuple):
    """A peer's request for a transfer, while it waits for the answer.

    Attributes:
        key: The slot where it waits.
        link: The connection on which it arrived.
        event: The peer's request, with its description of the transfer.
    """

    key: Key
    link: ConnectionDriver
    event: TransferOpened

    @property
    def nbytes(self) -> int:
        """Return the memory of the question, in bytes."""
        return len(self.event.description) + WAITING_RECORD_BYTES


class Past(NamedTuple):
    """Remembers how a use of a name ended, for peers that may not know yet.

    Attributes:
        code: The code for a peer that asks too late, the same as for a peer in time.
        reason: Why it ended, as text, because an error's traceback would keep caches
            alive.
        endpoint_id: The id of this side's end, which peers that met it send.
        unseen: The number of peers that never requested it.
        known: The ids of peers' ends that met it, and may not know how it ended.
    """

    code: WireCode
    reason: str
    endpoint_id: bytes
    unseen: int
    known: frozenset[bytes]


_UNKNOWN: Final = Past(WireCode.OTHER, "nothing is known about it", b"", 0, frozenset())


class Slot:
    """Holds the end, the questions and the owed legs of one name and role.

    Attributes:
        end: This side's waiting or running transfer, if any.
        asked: The waiting questions of peers.
        owed: Legs that have ended here, but whose peers may not know that.
    """

    __slots__ = ("asked", "end", "owed")

    def __init__(self) -> None:
        self.end: Transfer | None = None
        self.asked: dict[RequestRecord, Question] = {}
        self.owed: list[Leg] = []


class TransferRegistry:
    """Matches the KV transfers of one communicator with peers' requests.

    Attributes:
        live: Transfers that have not ended.
        all_settled: Set while every producer knows the landed parts, or has given up.
    """

    def __init__(self) -> None:
        # An ordered set, so that actions on several transfers happen in their order.
        self.live: dict[Transfer, None] = {}
        self._slots: dict[Key, Slot] = {}
        # By (name, b""), and by (name, peer's end) for ends that were sent the reason:
        # such an end asks again if its link is lost before the reason arrives. Oldest
        # first.
        self._past: OrderedDict[tuple[Key, bytes], Past] = OrderedDict()
        # The bytes of waiting questions, by connection.
        self._waiting_bytes: Counter[ConnectionDriver] = Counter()
        # The owed legs in all slots, as an ordered set.
        self._owed: dict[Leg, None] = {}
        # Those whose producer may not know the landed parts.
        self._unsettled: set[Leg] = set()
        self.all_settled: asyncio.Event = asyncio.Event()
        self.all_settled.set()
        # The timer of the next check for long-open transfers; None while none is open.
        self._look: asyncio.TimerHandle | None = None

    # --- our side ---------------------------------------------------------------------

    def offer(self, end: Transfer) -> None:
        """Offer a transfer to peers (``publish``, ``expect``), waiting ones first.

        Raises:
            UsageError: The name is in use, or too much memory is in quarantine.
        """
        key = end._slot_key
        slot = self._slots.get(key)
        if slot is not None and slot.end is not None:
            verb = "published" if key[1] else "expected"
            raise UsageError(
                f"transfer {end.id!r} is {verb} already and has not ended; use "
                "another id, or wait for the end"
            )
        if end._services.buffers.holds.retired:
            _check_room(end)
        end._offer().encode()
        past = self._past.get((key, b""))
        if past is not None:
            # From now on only peers that met the last use get the reason for its end.
            self._remember(key, past._replace(unseen=0))
        if slot is None:
            slot = self._slots[key] = Slot()  # at most one per transfer of the caller
        slot.end = end
        self._take_on(end)
        end._begin()
        end._watch_lease()
        if slot.asked:
            self._ask_again(key)

    def ask(self, end: Transfer, link: ConnectionDriver) -> None:
        """Request a transfer from the peer (``pull``, ``push``).

        If the connection is closed or lost, the transfer ends with an outcome.

        Raises:
            UsageError: Too much memory is in quarantine, or the peer has too many
                transfers to answer already.
        """
        if end._services.buffers.holds.retired:
            _check_room(end)
        self._take_on(end)
        try:
            end._ask(link)
        except ConnectionClosed as exc:
            end._stop(exc, WireCode.GOING_AWAY)
        except KVWireError:
            self.live.pop(end, None)
            raise
        end._begin()

    def defer(self, end: Transfer, unasked: Callable[[], str]) -> None:
        """Begin a transfer whose request is sent once its peer is connected.

        Args:
            end: The transfer.
            unasked: Returns the reason why its peer is not connected yet.
        """
        if end._services.buffers.holds.retired:
            _check_room(end)
        end._unasked = unasked
        self.live[end] = None
        end._begin()
        end._watch_lease()

    def connecting(self, end: Transfer, task: asyncio.Task[None]) -> None:
        """Record the task that connects a deferred transfer, to cancel it later."""
        end._asking = task

    def ask_deferred(self, end: Transfer, link: ConnectionDriver) -> None:
        """Request a deferred transfer from its peer, unless the transfer has ended.

        Raises:
            UsageError: The peer has too many transfers to answer already.
            ConnectionClosed: The connection is closing or closed.
        """
        end._unasked = None
        end._asking = None
        end._ask(link)

    def give_up(self, end: Transfer, error: KVWireError) -> None:
        """End a transfer whose peer cannot be reached."""
        end._stop(error, WireCode.GOING_AWAY)

    def over(self, end: Transfer, cause: KVWireError) -> None:
        """Remove a transfer that has ended; keep the cause for late peers."""
        self.live.pop(end, None)
        for leg in end._legs:
            gave_up = isinstance(cause, RequestCancelled) and leg.state in OFF_LINK
            # Two peers may not know the end yet: a producer whose segments have all
            # landed, and a peer that we asked on a link that was lost.
            if (end._receives and leg.state is LegState.SETTLED) or (
                gave_up and leg.asks and leg.peer_id
            ):
                self.owe(leg)
        key = end._slot_key
        slot = self._slots.get(key)
        if slot is None or slot.end is not end:
            return
        slot.end = None
        known = frozenset(leg.peer_id for leg in end._legs if leg.state in UNNOTIFIED)
        code = _code_of(cause)
        unseen = end._peers - len(end._legs)
        self._remember(key, Past(code, str(cause), end._endpoint_id, unseen, known))
        self._ask_again(key)

    def _take_on(self, end: Transfer) -> None:
        self.live[end] = None
        if self._look is None:
            self._look_later(end._loop)

    def _name_open(self) -> None:
        """Log, once, each transfer that was already open at the previous check."""
        self._look = None
        for end in self.live:
            if end._seen_open and not end._named_in_log:
                end._named_in_log = True
                logger.warning(
                    "transfer %r is open for more than %g s: %s",
                    end.id,
                    WAITING_LOG_S,
                    end._next_move.text,
                )
            end._seen_open = True
        if self.live:
            self._look_later(next(iter(self.live))._loop)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        # It is set again and again, so it has no variables of a request.
        self._look = loop.call_later(
            WAITING_LOG_S, self._name_open, context=contextvars.Context()
        )

    # --- the peer's side --------------------------------------------------------------

    def opened(self, link: ConnectionDriver, event: TransferOpened) -> None:
        """Answer a peer's request for a transfer, or let it wait.

        Three candidates are checked in this order: an owed leg, whose peer does not
        know that it ended; an ended use of the name; the current end.
        """
        request = event.request
        if request.over:
            return
        try:
            offer = TransferOffer.decode(event.description)
        except KVWireError as exc:
            _refuse(link, request, exc, WireCode.PROFILE)
            return
        key = (event.id, request.kind is RequestKind.OUTGOING)
        slot = self._slots.get(key)
        if slot is not None and slot.owed:
            owed = [leg for leg in slot.owed if leg.peer_id == offer.endpoint_id]
            if owed and owed[0].state is LegState.WAITING:
                owed[0].answer(link, request, offer)
                return
            if owed:  # the answer may still arrive on its last link
                self._let_wait(key, link, event)
                return
        if offer.peer_id or self._past:
            past = self._ended(key, offer)
            if past is not None:
                error = PeerError(f"it has ended: {past.reason}")
                _refuse(link, request, error, past.code)
                return
        end = None if slot is None else slot.end
        answer = Answer.LATER if end is None else answer_of(end, link, offer)
        if answer is Answer.LATER:
            self._let_wait(key, link, event)
        elif answer is Answer.NO:
            _refuse(
                link,
                request,
                PeerError("another peer's request has already taken it"),
                WireCode.OTHER,
            )
        else:
            assert end is not None
            end._matched(link, request, offer)

    def _let_wait(
        self, key: Key, link: ConnectionDriver, event: TransferOpened
    ) -> None:
        """Let a peer wait for an answer, if there is room for its description."""
        question = Question(key, link, event)
        waiting = self._waiting_bytes
        ours = waiting[link] + question.nbytes
        everyones = waiting.total() + question.nbytes
        if ours > WAITING_BYTES_MAX or everyones > WAITING_BYTES_ALL_MAX:
            which = "of this connection" if ours > WAITING_BYTES_MAX else "of all peers"
            error = PeerError(
                f"the descriptions {which} that wait for an answer have reached their "
                "memory limit; retry when some have been answered"
            )
            if not waiting[link]:
                del waiting[link]
            _refuse(link, event.request, error, WireCode.OTHER)
            return
        waiting[link] = ours
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot()
        # bounded: TRANSFERS_WAITING_MAX per connection, by the core
        slot.asked[event.request] = question
        event.request.context = question

    def _waits_no_more(self, question: Question) -> None:
        """Subtract a question, taken out of its slot, from the waiting bytes."""
        question.event.request.context = None
        self._waiting_bytes[question.link] -= question.nbytes
        if not self._waiting_bytes[question.link]:
            del self._waiting_bytes[question.link]

    def request_over(self, request: RequestRecord, link: ConnectionDriver) -> None:
        """Remove a question after a refusal, or because its peer gave up or is gone."""
        question = request.context
        if isinstance(question, Question):
            del self._slots[question.key].asked[request]
            self._waits_no_more(question)
            self._tidy(question.key)
        link.transfers.forget(request)

    def _ask_again(self, key: Key) -> None:
        """Answer again the peers that wait for a transfer of this name."""
        slot = self._slots.get(key)
        if slot is None:
            return
        if slot.asked:
            asked = slot.asked
            slot.asked = {}
            for question in asked.values():
                self._waits_no_more(question)
            for question in asked.values():
                self.opened(question.link, question.event)
        self._tidy(key)

    def _tidy(self, key: Key) -> None:
        """Remove a slot if it is empty."""
        slot = self._slots.get(key)
        if slot is not None and slot.end is None and not (slot.asked or slot.owed):
            del self._slots[key]

    # --- what has ended ---------------------------------------------------------------

    def _ended(self, key: Key, offer: TransferOffer) -> Past | None:
        """Return how a requested transfer ended; None if it has not ended.

        If a peer was sent the reason, but its link was lost before the reason arrived,
        it gets the reason again.
        """
        past = self._past.get((key, offer.endpoint_id))
        if past is not None:
            return past
        past = self._last_use(key, offer)
        if past is not None:
            known = past.known - {offer.endpoint_id}
            never_came = known == past.known and not offer.peer_id
            unseen = past.unseen - never_came
            self._remember(key, past._replace(known=known, unseen=unseen))
        elif offer.peer_id:
            slot = self._slots.get(key)
            end = None if slot is None else slot.end
            if end is None or end._endpoint_id != offer.peer_id:
                past = _UNKNOWN
        if past is not None:
            self._keep((key, offer.endpoint_id), past)
        return past

    def _last_use(self, key: Key, offer: TransferOffer) -> Past | None:
        """Return how a name's last use ended, if a peer requests that use.

        A peer that had never requested it gets the reason once. Its next request goes
        to the next transfer with this name.
        """
        past = self._past.get((key, b""))
        if past is None:
            return None
        met = offer.endpoint_id in past.known or offer.peer_id == past.endpoint_id
        return past if met or (past.unseen and not offer.peer_id) else None

    def _remember(self, key: Key, past: Past) -> None:
        """Keep the last use of a name as long as a peer may request it."""
        self._past.pop((key, b""), None)
        if past.unseen or past.known:
            self._keep((key, b""), past)

    def _keep(self, what: tuple[Key, bytes], past: Past) -> None:
        self._past[what] = past  # bounded: TOMBSTONES_MAX
        if len(self._past) > TOMBSTONES_MAX:
            self._past.popitem(last=False)

    # --- legs whose peers may not know ------------------------------------------------

    def owe(self, leg: Leg) -> None:
        """Keep an ended leg until its peer knows how it ended.

        Without a link it is kept for one lease, because the peer waits that long.
        """
        end = leg.transfer
        key = end._slot_key
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot()
        if leg not in self._owed:
            self._owed[leg] = None  # a leg of one of the caller's transfers
            slot.owed.append(leg)
            if end._given_up is None:
                self._unsettled.add(leg)  # one of the owed legs
                self.all_settled.clear()
        if leg.state in OFF_LINK:
            end._loop.call_later(end._lease_s, self._forget, key, leg)
            self._ask_again(key)  # the peer may have asked on another link already

    def peer_knows(self, leg: Leg) -> None:
        """Drop a leg whose peer knows how it ended, or has stopped waiting."""
        if leg in self._owed:
            self._forget(leg.transfer._slot_key, leg)

    def _forget(self, key: Key, leg: Leg) -> None:
        if leg not in self._owed:
            return
        del self._owed[leg]
        self._unsettled.discard(leg)
        self._slots[key].owed.remove(leg)
        if not self._unsettled:
            self.all_settled.set()
        self._ask_again(key)

    # --- connections ------------------------------------------------------------------

    def connection_lost(self, link: ConnectionDriver) -> None:
        """Release the legs of a lost link, which no longer touches memory."""
        for end in list(self.live):
            for leg in end._legs:
                if leg.link is link and leg.state is LegState.LOST:
                    end._release(leg)
        for leg in list(self._owed):
            if leg.link is link and leg.state is LegState.LOST:
                leg.transfer._release(leg)
        # A peer may have asked on its new link before we knew that the old one is gone.
        # Questions for names that are not in use here wait on, however many there are.
        for key, slot in list(self._slots.items()):
            if slot.asked and (slot.end is not None or slot.owed):
                self._ask_again(key)

    def interrupted(self, origin: bytes) -> bool:
        """Return whether a transfer with a peer waits for another link."""
        return any(leg.state in OFF_LINK for _, leg in self._legs_of(origin))

    def _legs_of(self, origin: bytes) -> Iterator[tuple[Transfer | None, Leg]]:
        """Yield a peer's legs, each with its transfer if this is still live.

        A leg of a live transfer may itself be over, and refers to no transfer then.
        """
        for end in list(self.live):
            for leg in end._legs:
                if leg.origin == origin and leg not in self._owed:
                    yield end, leg
        for leg in list(self._owed):
            if leg.origin == origin:
                yield None, leg

    @property
    def unmet(self) -> bool:
        """Whether a transfer here still waits for a peer's request."""
        ends = (slot.end for slot in self._slots.values())
        return any(end is not None and not end._legs for end in ends)

    def peer_gone(self, origin: bytes, why: str) -> None:
        """End the transfers with a peer that has ended, or has forgotten them."""
        error = ConnectionLost(why)
        for end, leg in list(self._legs_of(origin)):
            if leg.state not in OFF_LINK:
                continue
            if end is None:
                self.peer_knows(leg)
            else:
                end._stop(error, WireCode.GOING_AWAY)

    def peer_missed(self, origin: bytes, why: str) -> None:
        """Note why a peer was not reached again, for transfers whose lease will end."""
        for end, _ in self._legs_of(origin):
            if end is not None:
                end._missed = why

    def reattach(self, link: ConnectionDriver) -> None:
        """Repeat this side's transfer requests to a peer on a new link.

        If this link fails too, or the peer has too many requests to answer, they wait
        for the next link.
        """
        for end, leg in list(self._legs_of(link.peer.origin)):
            if end is not None:
                end._missed = ""
            if not leg.asks or leg.state is not LegState.WAITING:
                continue
            with suppress(ConnectionClosed, UsageError):
                if end is None:
                    leg.ask(link)
                else:
                    end._ask(link)

    # --- the end ----------------------------------------------------------------------

    def end(self, id: str | bytes | int, reason: str) -> None:
        """Abort every open transfer of this name."""
        key = transfer_key(id)
        for end in list(self.live):
            if end._key == key:
                end.abort(reason)

    def closing(self, link: ConnectionDriver | None = None) -> None:
        """End the transfers of one connection, or of all, for a graceful close.

        Transfers that only wait for delivery are delivered; all others are ended.
        """
        error = ClosedOK("this side has closed")
        for end in list(self.live):
            here = link is None or any(
                leg.link is link and leg.state is not LegState.OVER for leg in end._legs
            )
            if here and not end._finishing:
                end._stop(error, WireCode.GOING_AWAY)

    def stop(self, error: KVWireError) -> None:
        """End every transfer: the communicator is closed."""
        if self._look is not None:
            self._look.cancel()
        for end in list(self.live):
            end._stop(error, WireCode.GOING_AWAY)

    # --- what snapshots show ----------------------------------------------------------

    def views(self, limit: int | None = None) -> list[TransferView]:
        """Return views of the open transfers, oldest first."""
        return [end._view() for end in islice(self.live, limit)]

    @property
    def unanswered(self) -> list[str]:
        """Return the ids that peers requested but this side has not offered."""
        return [
            key[0][1:].decode(errors="replace")
            for key, slot in self._slots.items()
            if slot.asked and slot.end is None
        ]


class TransferServices(SharedServices):
    """The services of a communicator, with its registry of transfers."""

    registry: TransferRegistry


def answer_of(end: Transfer, link: ConnectionDriver, offer: TransferOffer) -> Answer:
    """Return the answer to a peer's request for a transfer."""
    if end._state is not TransferState.OPEN:
        return Answer.LATER
    known = end._known(link, offer)
    if known is None:
        return Answer.YES if len(end._legs) < end._peers else Answer.NO
    match known.state:
        case LegState.WAITING:
            return Answer.YES
        case LegState.OVER:
            return Answer.NO
    return Answer.LATER


def _check_room(end: Transfer) -> None:
    """Refuse a transfer while too much memory is in quarantine.

    Raises:
        UsageError: Too much memory is in quarantine.
    """
    quarantined = end._services.buffers.quarantined_bytes
    limit = end._services.config.quarantine_bytes
    if quarantined > limit:
        raise UsageError(
            f"{quarantined} bytes of ended transfers have not drained, more than "
            f"quarantine_bytes={limit}: wait until some have drained()"
        )


def _code_of(cause: KVWireError) -> WireCode:
    """Return the wire code of the error that ended a transfer."""
    if isinstance(cause, RequestCancelled):
        return WireCode.CANCELLED
    return cause.code if isinstance(cause, RequestError) else WireCode.OTHER


def _refuse(
    link: ConnectionDriver, request: RequestRecord, error: KVWireError, code: WireCode
) -> None:
    link.core.refuse(request, error, code)
    link.run()
