"""Where the two ends of KV transfers meet, in either order of arrival.

One side names a transfer with ``publish`` or ``expect`` and waits; the other asks for
it with ``pull`` or ``push``. Who comes first is stashed: our side until its lease ends,
a peer's question until the peer gives up. A transfer that has failed here leaves its
reason behind, so that a peer who asks too late gets an answer and not a wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

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
from kvwire.limits import (
    TOMBSTONES_MAX,
    WAITING_BYTES_ALL_MAX,
    WAITING_BYTES_MAX,
    WAITING_LOG_S,
    WAITING_RECORD_BYTES,
)
from kvwire.proto.events import TransferOpened
from kvwire.proto.state import RequestKind
from kvwire.transfers.base import Answer, Attempt, UnnotifiedPeers, transfer_key
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.outgoing import OutgoingState
from kvwire.transfers.ports import ConnectionPort
from kvwire.transfers.settle import SettleAttempt
from kvwire.transfers.state import OFF_LINK

if TYPE_CHECKING:
    from kvwire.proto.records import RequestRecord

logger: logging.Logger = logging.getLogger("kvwire.transfers")

End = OutgoingState | IncomingState
Key = tuple[bytes, bool]
Question = tuple[ConnectionPort, TransferOpened]


class Tombstone(NamedTuple):
    """Remembers a transfer that ended before all of its peers knew.

    Attributes:
        code: The code for a peer that asks too late, the same as for one in time.
        reason: Why it ended. Not the error, whose traceback has frames and caches.
        endpoint_id: Its name over all links, as peers who met it know it.
        unnotified: The peers who may still ask.
    """

    code: WireCode
    reason: str
    endpoint_id: bytes
    unnotified: UnnotifiedPeers


_UNKNOWN: Final = Tombstone(
    WireCode.OTHER, "nothing is known of it", b"", UnnotifiedPeers(0, frozenset())
)


class TransferRegistry:
    """Matches the KV transfers of one communicator with peers that ask.

    Attributes:
        live: Transfers that have not ended.
    """

    def __init__(self) -> None:
        # Ordered sets, so that what happens to several happens in their order.
        self.live: dict[End, None] = {}
        self._waiting: dict[Key, End] = {}
        self._asked: dict[Key, dict[RequestRecord, Question]] = {}
        # Under which name each of these questions waits.
        self._stashed: dict[RequestRecord, Key] = {}
        # Bytes of the waiting requests, by connection.
        self._stashed_bytes: Counter[ConnectionPort] = Counter()
        # Settled here on links that we take for alive; by key and end.
        self._settling: dict[tuple[bytes, bytes], None] = {}
        self._settle_retries: dict[tuple[bytes, bytes], SettleAttempt] = {}
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self._tombstones: OrderedDict[Key, Tombstone] = OrderedDict()
        # What ends were told, by their name over all links: they ask again if their
        # link is lost before they hear it.
        self._told: OrderedDict[tuple[Key, bytes], Tombstone] = OrderedDict()
        # The next look at what is open for long; there is none while nothing is.
        self._look: asyncio.TimerHandle | None = None

    # --- our side ---------------------------------------------------------------------

    def offer(self, end: End) -> None:
        """Wait for the peer (``publish``, ``expect``), or match one that waits."""
        key = end.role_key
        if key in self._waiting:
            verb = "published" if key[1] else "expected"
            raise UsageError(
                f"transfer {end.id!r} is {verb} already, and has not ended; ids may be "
                f"used again only after that"
            )
        end.check_room()
        end.description().encode()
        self._begin_anew(key)
        self._waiting[key] = end
        self._take_on(end)
        end.begin()
        end.start_lease()
        if key in self._asked:
            self._ask_again(key)

    def ask(self, end: End, connection: ConnectionPort) -> None:
        """Ask the peer (``pull``, ``push``).

        On a connection that is closed or lost the transfer ends, with an outcome.

        Raises:
            UsageError: Too much memory is in quarantine, or the peer has too many
                transfers to answer already.
        """
        end.check_room()
        self._take_on(end)
        try:
            end.ask(connection)
        except ConnectionClosed as exc:
            end.stop(exc, WireCode.GOING_AWAY)
        except KVWireError:
            self.live.pop(end, None)
            raise
        end.begin()

    def defer(self, end: End) -> None:
        """Begin a transfer whose peer is asked as soon as it is connected."""
        end.check_room()
        self.live[end] = None
        end.begin()
        end.start_lease()

    def _take_on(self, end: End) -> None:
        self.live[end] = None
        if self._look is None:
            self._look = end.loop.call_later(WAITING_LOG_S, self._name_open, end.loop)

    def _name_open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name in the log, once, each transfer that was open at the last look too."""
        self._look = None
        for end in self.live:
            if end.seen_open and not end.named_in_log:
                end.named_in_log = True
                logger.warning(
                    "transfer %r is open for more than %g s: %s",
                    end.id,
                    WAITING_LOG_S,
                    end.waits_for,
                )
            end.seen_open = True
        if self.live:
            self._look = loop.call_later(WAITING_LOG_S, self._name_open, loop)

    def over(self, end: End, cause: KVWireError, attempts: Iterable[Attempt]) -> None:
        """Remove a transfer that has ended; keep the cause for late peers.

        Peers whose link is lost, and whom this side would have asked again, are told
        over the next one that it was given up.
        """
        self.live.pop(end, None)
        if isinstance(end, IncomingState) and end.settling:
            self._settling[end.key, end.endpoint_id] = None
            self._all_settled.clear()
        if isinstance(cause, RequestCancelled):
            for attempt in attempts:
                if attempt.asks and attempt.peer_id and attempt.state in OFF_LINK:
                    self.unconfirmed(SettleAttempt(end, attempt, error=cause))
        key = end.role_key
        if self._waiting.get(key) is not end:
            return
        del self._waiting[key]
        unnotified = end.unnotified
        if any(unnotified) or key in self._tombstones:
            code, reason = _code_of(cause), str(cause)
            tombstone = Tombstone(code, reason, end.endpoint_id, unnotified)
            self._add_tombstone(key, tombstone, unnotified)
        if key in self._asked:
            self._ask_again(key)

    # --- the peer's side --------------------------------------------------------------

    def opened(self, connection: ConnectionPort, event: TransferOpened) -> None:
        """Match a peer that asks, answer it, or let it wait."""
        request = event.request
        if request.over:
            return
        try:
            description = TransferOffer.decode(event.description)
        except KVWireError as exc:
            _refuse(connection, request, exc, WireCode.PROFILE)
            return
        key = (event.id, request.kind is RequestKind.OUTGOING)
        retry = self._retry_for(key, description) if self._settle_retries else None
        if retry is not None and retry.waits:
            retry.matched(connection, request)
            return
        settling = not key[1] and (event.id, description.peer_id) in self._settling
        if settling or retry is not None:
            # What is said of that on its last link comes first.
            self._stash(key, connection, event)
            return
        ended = None
        if description.peer_id or key in self._tombstones or self._told:
            ended = self._ended(key, description)
        if ended is not None:
            error = PeerError(f"it has ended: {ended.reason}")
            _refuse(connection, request, error, ended.code)
            return
        end = self._waiting.get(key)
        match end.answer_to(connection, description) if end else Answer.LATER:
            case Answer.YES:
                assert end is not None
                end.matched(connection, request, description)
            case Answer.NO:
                _refuse(connection, request, PeerError("it is taken"), WireCode.OTHER)
            case Answer.LATER:
                self._stash(key, connection, event)

    def _stash(
        self, key: Key, connection: ConnectionPort, event: TransferOpened
    ) -> None:
        """Let a peer wait for an answer, if there is room for its description."""
        nbytes = _stash_bytes(event)
        ours = self._stashed_bytes[connection] + nbytes
        if ours > WAITING_BYTES_MAX or (
            self._stashed_bytes.total() + nbytes > WAITING_BYTES_ALL_MAX
        ):
            which = "of this connection" if ours > WAITING_BYTES_MAX else "of all peers"
            error = PeerError(
                f"the descriptions {which} that wait for an answer take as much memory "
                f"as they may; ask again when some have met their transfer"
            )
            _refuse(connection, event.request, error, WireCode.OTHER)
            return
        # bounded: TRANSFERS_WAITING_MAX per connection, by the core
        self._stashed[event.request] = key
        self._stashed_bytes[connection] = ours
        self._asked.setdefault(key, {})[event.request] = (connection, event)

    def _unstash(self, connection: ConnectionPort, event: TransferOpened) -> None:
        """Forget a request that no longer waits."""
        del self._stashed[event.request]
        self._stashed_bytes[connection] -= _stash_bytes(event)
        if not self._stashed_bytes[connection]:
            del self._stashed_bytes[connection]

    def request_over(self, request: RequestRecord, connection: ConnectionPort) -> None:
        """Remove a question that was refused, or whose peer gave up or is gone."""
        key = self._stashed.get(request)
        if key is not None:
            asked = self._asked[key]
            self._unstash(*asked.pop(request))
            if not asked:
                del self._asked[key]
        connection.transfers.forget(request)

    def _ended(self, key: Key, description: TransferOffer) -> Tombstone | None:
        """Return why the transfer that a peer asks for has ended; None if it has not.

        An end that was told, and lost its link before it heard, is told again.
        """
        asker = key, description.endpoint_id
        ended = self._told.get(asker)
        if ended is None:
            ended = self._last_use(key, description)
            if ended is not None:
                self._told[asker] = ended  # bounded: TOMBSTONES_MAX
                if len(self._told) > TOMBSTONES_MAX:
                    self._told.popitem(last=False)
        return ended

    def _last_use(self, key: Key, description: TransferOffer) -> Tombstone | None:
        """Return how the last use of an id has ended, if a peer asks for that.

        A peer that never came is told once. After that the id can be used anew,
        untainted by its last use.
        """
        end, tombstone = self._waiting.get(key), self._tombstones.get(key)
        if tombstone is not None:
            unseen, known = tombstone.unnotified
            if description.endpoint_id in known:
                self._add_tombstone(
                    key,
                    tombstone,
                    UnnotifiedPeers(unseen, known - {description.endpoint_id}),
                )
                return tombstone
            if description.peer_id == tombstone.endpoint_id:
                return tombstone
            if unseen and not description.peer_id:
                self._add_tombstone(key, tombstone, UnnotifiedPeers(unseen - 1, known))
                return tombstone
        if description.peer_id and (
            end is None or end.endpoint_id != description.peer_id
        ):
            return _UNKNOWN
        return None

    def _begin_anew(self, key: Key) -> None:
        """Use an id anew: only peers that came for its last use hear how that ended."""
        tombstone = self._tombstones.get(key)
        if tombstone is not None:
            self._add_tombstone(
                key, tombstone, UnnotifiedPeers(0, tombstone.unnotified.known)
            )

    def _add_tombstone(
        self, key: Key, tombstone: Tombstone, unnotified: UnnotifiedPeers
    ) -> None:
        """Keep the reason for as long as a peer may ask for it."""
        self._tombstones.pop(key, None)
        if any(unnotified):
            # bounded: TOMBSTONES_MAX
            self._tombstones[key] = tombstone._replace(unnotified=unnotified)
            if len(self._tombstones) > TOMBSTONES_MAX:
                self._tombstones.popitem(last=False)

    def _ask_again(self, key: Key) -> None:
        """Look again at the peers that wait for a transfer of this name."""
        for connection, event in self._asked.pop(key, {}).values():
            self._unstash(connection, event)
            self.opened(connection, event)

    # --- connections ------------------------------------------------------------------

    def connection_lost(self, connection: ConnectionPort) -> None:
        """Release a connection whose link has touched memory for the last time."""
        for end in list(self.live):
            end.lost(connection)
        # A peer may have asked on its new link before we knew that the old one is gone.
        # What nobody here has named gets no other answer, however much of it there is.
        said = {retry.end.role_key for retry in self._settle_retries.values()}
        for key in [key for key in self._asked if key in self._waiting or key in said]:
            self._ask_again(key)

    def interrupted(self, origin: bytes) -> bool:
        """Tell whether some transfer with a peer waits for another link."""
        return any(end.interrupted(origin) for end in self.live) or any(
            retry.origin == origin for retry in self._settle_retries.values()
        )

    @property
    def unmet(self) -> bool:
        """Tell whether something waits here that no peer has asked for yet."""
        return any(not end.connections for end in self._waiting.values())

    def peer_gone(self, origin: bytes, why: str) -> None:
        """End the transfers with a peer that has ended, or has forgotten them."""
        error = ConnectionLost(why)
        for end in list(self.live):
            if end.interrupted(origin):
                end.stop(error, WireCode.GOING_AWAY)
        for retry in list(self._settle_retries.values()):
            if retry.origin == origin:
                self.confirmed(retry)

    def end(self, id: str | bytes | int, reason: str) -> None:
        """Abort whatever here has this name and waits for its peer."""
        key = transfer_key(id)
        for end in list(self.live):
            if end.key == key:
                end.abort(reason)

    def settled(self, end: IncomingState) -> None:
        """Note that the producer of a settled transfer knows, or its link is lost."""
        if (end.key, end.endpoint_id) in self._settling:
            del self._settling[end.key, end.endpoint_id]
            self._note_settled()
            if end.role_key in self._asked:
                self._ask_again(end.role_key)

    def unconfirmed(self, retry: SettleAttempt) -> None:
        """Keep a settle retry: the peer of a transfer may not know how it ended here.

        Kept for as long as the peer would wait for another link.
        """
        self._settle_retries[retry.key] = retry
        end = retry.end
        if self.unsettled:
            self._all_settled.clear()
        end.loop.call_later(end.lease_s, self.confirmed, retry)

    def notify_again(self, retry: SettleAttempt) -> None:
        """Answer a producer that has asked on another link already."""
        self._ask_again(retry.end.role_key)

    def confirmed(self, retry: SettleAttempt) -> None:
        """Remove a settle retry: its peer knows, or has stopped waiting."""
        if self._settle_retries.get(retry.key) is retry:
            del self._settle_retries[retry.key]
            self._note_settled()
            self._ask_again(retry.end.role_key)

    @property
    def unsettled(self) -> bool:
        """Tell whether a producer may not know what has landed here."""
        retries = self._settle_retries.values()
        return bool(self._settling) or any(retry.error is None for retry in retries)

    @property
    def unanswered(self) -> list[str]:
        """Return the ids that peers ask for and that nobody here has named."""
        keys = [key for key in self._asked if key not in self._waiting]
        return [key[0][1:].decode(errors="replace") for key in keys]

    async def all_settled(self) -> None:
        """Wait until every producer knows what has landed here, or has given up.

        Cancel safety: safe, it only watches.
        """
        await self._all_settled.wait()

    def _note_settled(self) -> None:
        if not self.unsettled:
            self._all_settled.set()

    def closing(self, connection: ConnectionPort | None = None) -> None:
        """End the transfers of a connection, or of all, that is closed gracefully.

        What the producer has finished is delivered; every other transfer ends.
        """
        error = ClosedOK("this side has closed")
        for end in list(self.live):
            here = connection is None or end.runs_on(connection)
            if here and not end.finishing:
                end.stop(error, WireCode.GOING_AWAY)

    def stop(self, error: KVWireError) -> None:
        """End every transfer: the communicator is closed."""
        if self._look is not None:
            self._look.cancel()
        for end in list(self.live):
            end.stop(error, WireCode.GOING_AWAY)

    def reattach(self, connection: ConnectionPort) -> None:
        """Ask again, on a new link to a peer, for what this side had asked for.

        If this link is gone again, or full, the next one is the same to them.
        """
        origin = connection.peer.origin
        for end in list(self.live):
            if end.asks(origin):
                with suppress(ConnectionClosed, UsageError):
                    end.ask(connection)
        for retry in list(self._settle_retries.values()):
            if retry.asks and retry.origin == origin and retry.waits:
                with suppress(ConnectionClosed, UsageError):
                    retry.ask_again(connection)

    def _retry_for(self, key: Key, description: TransferOffer) -> SettleAttempt | None:
        """Return the settle retry for a producer that pushes again, or None."""
        for retry in self._settle_retries.values():
            same = retry.peer_id == description.endpoint_id
            if same and retry.end.role_key == key and not retry.asks:
                return retry
        return None


def _stash_bytes(event: TransferOpened) -> int:
    return len(event.description) + WAITING_RECORD_BYTES


def _code_of(cause: KVWireError) -> WireCode:
    """Return the number of what ended a transfer, as peers that are there hear it."""
    if isinstance(cause, RequestCancelled):
        return WireCode.CANCELLED
    return cause.code if isinstance(cause, RequestError) else WireCode.OTHER


def _refuse(
    connection: ConnectionPort,
    request: RequestRecord,
    error: KVWireError,
    code: WireCode,
) -> None:
    connection.refuse(request, error, code)
    connection.run()
