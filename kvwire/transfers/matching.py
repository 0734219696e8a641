"""Where the two ends of KV transfers meet, in either order of arrival.

One side names a transfer with ``publish`` or ``expect`` and waits; the other asks for
it with ``pull`` or ``push``. Who comes first is stashed: our side until its lease ends,
a peer's question until the peer gives up. A transfer that has failed here leaves its
reason behind, so that a peer who asks too late gets an answer and not a wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvwire.errors import (
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    PeerError,
    UsageError,
    WireCode,
)
from kvwire.limits import TOMBSTONES_MAX
from kvwire.proto.events import TransferOpened
from kvwire.proto.state import RequestKind
from kvwire.transfers.base import Answer, UnnotifiedPeers, transfer_key
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.outgoing import OutgoingState
from kvwire.transfers.ports import ConnectionPort
from kvwire.transfers.settle import SettleAttempt

if TYPE_CHECKING:
    from kvwire.proto.requests import RequestRecord

End = OutgoingState | IncomingState
# A producer and a consumer of one name may live in one communicator, in tests above
# all.
Key = tuple[bytes, bool]
Question = tuple[ConnectionPort, TransferOpened]


class Tombstone(NamedTuple):
    """A transfer that ended before all of its peers knew.

    Attributes:
        reason: Why it ended.
        end: Its name over all links, as peers who met it know it.
        unheard: The peers who may still ask.
    """

    reason: str
    end: bytes
    unheard: UnnotifiedPeers


class TransferRegistry:
    """The KV transfers of one communicator.

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
        # Settled here on links that we take for alive; by key and end.
        self._settling: dict[tuple[bytes, bytes], None] = {}
        self._last_words: dict[tuple[bytes, bytes], SettleAttempt] = {}
        self._all_said = asyncio.Event()
        self._all_said.set()
        self._tombstones: OrderedDict[Key, Tombstone] = OrderedDict()

    # --- our side ---------------------------------------------------------------------

    def offer(self, end: End) -> None:
        """``publish`` or ``expect``: wait for the peer, or meet one that waits.

        Raises:
            UsageError: The id is in use, the transfer is too large to be described, or
                too much memory is in quarantine.
        """
        key = _key(end)
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
        self.live[end] = None
        end.begin()
        end.start_lease()
        self._ask_again(key)

    def ask(self, end: End, connection: ConnectionPort) -> None:
        """``pull`` or ``push``: ask the peer.

        Raises:
            UsageError: Too much memory is in quarantine, or the peer has too many
                transfers to answer already.
            ConnectionClosed: The connection is closing or closed.
        """
        end.check_room()
        self.live[end] = None
        try:
            end.ask(connection)
        except KVWireError:
            self.live.pop(end, None)
            raise
        end.begin()

    def over(self, end: End, reason: str) -> None:
        """A transfer has ended."""
        self.live.pop(end, None)
        if isinstance(end, IncomingState) and end.settling:
            self._settling[end.key, end.end] = None
            self._all_said.clear()
        key = _key(end)
        if self._waiting.get(key) is not end:
            return
        del self._waiting[key]
        self._bury(key, Tombstone(reason, end.end, end.unheard), end.unheard)
        self._ask_again(key)

    # --- the peer's side --------------------------------------------------------------

    def opened(self, connection: ConnectionPort, event: TransferOpened) -> None:
        """A peer asks: match it, answer it, or let it wait."""
        request = event.request
        if request.over:
            return
        try:
            description = TransferOffer.decode(event.description)
        except KVWireError as exc:
            _refuse(connection, request, exc, WireCode.PROFILE)
            return
        key = (event.id, request.kind is RequestKind.OUTGOING)
        word = self._heard_before(key, description)
        if word is not None and word.waits:
            word.meet(connection, request)
            return
        settling = not key[1] and (event.id, description.met) in self._settling
        if settling or word is not None:
            # What is said of that on its last link comes first.
            self._stash(key, connection, event)
            return
        reason = self._ended(key, description)
        if reason:
            error = PeerError(f"it has ended: {reason}")
            _refuse(connection, request, error, WireCode.OTHER)
            return
        end = self._waiting.get(key)
        match end.answer_to(connection, description) if end else Answer.LATER:
            case Answer.YES:
                assert end is not None
                end.meet(connection, request, description)
            case Answer.NO:
                _refuse(connection, request, PeerError("it is taken"), WireCode.OTHER)
            case Answer.LATER:
                self._stash(key, connection, event)

    def _stash(
        self, key: Key, connection: ConnectionPort, event: TransferOpened
    ) -> None:
        """Let a peer wait for an answer."""
        # bounded: TRANSFERS_WAITING_MAX per connection, by the core
        self._stashed[event.request] = key
        self._asked.setdefault(key, {})[event.request] = (connection, event)

    def request_over(self, request: RequestRecord, connection: ConnectionPort) -> None:
        """A question has ended: refused, or the peer gave up, or is gone."""
        key = self._stashed.pop(request, None)
        if key is not None:
            asked = self._asked[key]
            del asked[request]
            if not asked:
                del self._asked[key]
        connection.transfers.forget(request)

    def _ended(self, key: Key, description: TransferOffer) -> str:
        """Why the transfer that a peer asks for has ended; "" if it has not.

        A peer that never came is told once. After that the id can be used anew,
        untainted by its last use.
        """
        end, grave = self._waiting.get(key), self._tombstones.get(key)
        if grave is not None:
            strangers, known = grave.unheard
            if description.end in known:
                self._bury(
                    key, grave, UnnotifiedPeers(strangers, known - {description.end})
                )
                return grave.reason
            if description.met == grave.end:
                return grave.reason
            if strangers and not description.met:
                self._bury(key, grave, UnnotifiedPeers(strangers - 1, known))
                return grave.reason
        if description.met and (end is None or end.end != description.met):
            return "nothing is known of it"
        return ""

    def _begin_anew(self, key: Key) -> None:
        """An id is used again: only those who came for its last use hear of that."""
        grave = self._tombstones.get(key)
        if grave is not None:
            self._bury(key, grave, UnnotifiedPeers(0, grave.unheard.known))

    def _bury(self, key: Key, grave: Tombstone, unheard: UnnotifiedPeers) -> None:
        """Keep the reason for as long as somebody may ask for it."""
        self._tombstones.pop(key, None)
        if any(unheard):
            # bounded: TOMBSTONES_MAX
            self._tombstones[key] = grave._replace(unheard=unheard)
            if len(self._tombstones) > TOMBSTONES_MAX:
                self._tombstones.popitem(last=False)

    def _ask_again(self, key: Key) -> None:
        """Ask once more for those who wait for a transfer of this name."""
        for connection, event in self._asked.pop(key, {}).values():
            del self._stashed[event.request]
            self.opened(connection, event)

    # --- connections ------------------------------------------------------------------

    def connection_lost(self, connection: ConnectionPort) -> None:
        """A link has touched memory for the last time."""
        for end in list(self.live):
            end.lost(connection)
        # A peer may have asked on its new link before we knew that the old one is gone.
        # What nobody here has named gets no other answer, however much of it there is.
        said = {(word.incoming.key, False) for word in self._last_words.values()}
        for key in [key for key in self._asked if key in self._waiting or key in said]:
            self._ask_again(key)

    def interrupted(self, origin: bytes) -> bool:
        """Whether some transfer with a peer waits for another link."""
        return any(end.interrupted(origin) for end in self.live) or any(
            word.origin == origin for word in self._last_words.values()
        )

    def peer_restarted(self, origin: bytes) -> None:
        """The start of the peer that had our transfers is gone for good."""
        error = ConnectionLost("the peer has restarted; its side of it is gone")
        for end in list(self.live):
            if end.interrupted(origin):
                end.stop(error, WireCode.GOING_AWAY)
        for word in list(self._last_words.values()):
            if word.origin == origin:
                self.confirmed(word)

    def end(self, id: str | bytes | int, reason: str) -> None:
        """Abort whatever here has this name and waits for its peer."""
        key = transfer_key(id)
        for end in list(self.live):
            if end.key == key:
                end.abort(reason)

    def settled(self, end: IncomingState) -> None:
        """The producer of a settled transfer knows that, or its link is lost."""
        if (end.key, end.end) in self._settling:
            del self._settling[end.key, end.end]
            self._note_said()
            self._ask_again(_key(end))

    def unconfirmed(self, last_word: SettleAttempt) -> None:
        """A transfer is settled here, and its producer may not know.

        Kept for as long as the producer would wait for another link.
        """
        self._last_words[last_word.key] = last_word
        self._all_said.clear()
        end = last_word.incoming
        end.loop.call_later(end.lease_s, self.confirmed, last_word)

    def notify_again(self, last_word: SettleAttempt) -> None:
        """Say it to the producer if that has asked on another link already."""
        self._ask_again(_key(last_word.incoming))

    def confirmed(self, last_word: SettleAttempt) -> None:
        """Its producer knows, or has stopped waiting."""
        if self._last_words.get(last_word.key) is last_word:
            del self._last_words[last_word.key]
            self._note_said()
            self._ask_again(_key(last_word.incoming))

    @property
    def unsaid(self) -> bool:
        """Whether a producer may not know what has landed here."""
        return bool(self._settling or self._last_words)

    async def all_said(self) -> None:
        """Wait until every producer knows what has landed here, or has given up.

        Cancel safety: safe, it only watches.
        """
        await self._all_said.wait()

    def _note_said(self) -> None:
        if not self.unsaid:
            self._all_said.set()

    def closing(self, connection: ConnectionPort | None = None) -> None:
        """A connection, or the communicator, is closed gracefully.

        What the producer has finished is delivered; every other transfer ends.
        """
        error = ClosedOK("this side has closed")
        for end in list(self.live):
            here = connection is None or end.runs_on(connection)
            if here and not end.finishing:
                end.stop(error, WireCode.GOING_AWAY)

    def stop(self, error: KVWireError) -> None:
        """The communicator is closed: every transfer ends."""
        for end in list(self.live):
            end.stop(error, WireCode.GOING_AWAY)

    def reattach(self, connection: ConnectionPort) -> None:
        """There is a new link to a peer: ask again for what was ours to ask for.

        If this link is gone again, or full, the next one is the same to them.
        """
        origin = connection.peer.origin
        for end in list(self.live):
            if end.asks(origin):
                with suppress(ConnectionClosed, UsageError):
                    end.ask(connection)
        for word in list(self._last_words.values()):
            if word.asks and word.origin == origin and word.waits:
                with suppress(ConnectionClosed, UsageError):
                    word.pull(connection)

    def _heard_before(
        self, key: Key, description: TransferOffer
    ) -> SettleAttempt | None:
        """The last word that a producer which pushes again has not heard."""
        for word in self._last_words.values():
            same = word.incoming.key == key[0] and word.peer_end == description.end
            if same and not key[1] and not word.asks:
                return word
        return None


def _key(end: End) -> Key:
    return end.key, isinstance(end, OutgoingState)


def _refuse(
    connection: ConnectionPort,
    request: RequestRecord,
    error: KVWireError,
    code: WireCode,
) -> None:
    connection.refuse(request, error, code)
    connection.run()
