"""Where the two ends of KV transfers meet, in either order of arrival.

One side names a transfer with ``publish`` or ``expect`` and waits; the other asks for
it with ``pull`` or ``push``. Who comes first is stashed: our side until its lease ends,
a peer's question until the peer gives up. A transfer that has failed here leaves its
reason behind, so that a peer who asks too late gets an answer and not a wait.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from kvwire.description import Description
from kvwire.errors import (
    ClosedOK,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    PeerError,
    UsageError,
    WireCode,
)
from kvwire.incoming import Incoming
from kvwire.last_word import LastWord
from kvwire.limits import TOMBSTONES_MAX
from kvwire.outgoing import Outgoing
from kvwire.proto.events import TransferOpened
from kvwire.proto.state import Kind
from kvwire.transfer import Answer, transfer_key

if TYPE_CHECKING:
    from kvwire.connection import Connection
    from kvwire.proto.requests import Request as CoreRequest

End = Outgoing | Incoming
# A producer and a consumer of one name may live in one communicator, in tests above
# all.
Key = tuple[bytes, bool]


class Exchange:
    """The KV transfers of one communicator.

    Attributes:
        live: Transfers that have not ended.
    """

    def __init__(self) -> None:
        self.live: set[End] = set()
        self._waiting: dict[Key, End] = {}
        self._asked: dict[Key, list[tuple[Connection, TransferOpened]]] = {}
        self._last_words: dict[tuple[bytes, bytes], LastWord] = {}
        self._tombstones: OrderedDict[Key, tuple[str, int]] = OrderedDict()

    # --- our side ---------------------------------------------------------------------

    def offer(self, end: End) -> None:
        """``publish`` or ``expect``: wait for the peer, or meet one that waits.

        Raises:
            UsageError: The id is in use.
        """
        key = _key(end)
        if key in self._waiting:
            verb = "published" if key[1] else "expected"
            raise UsageError(
                f"transfer {end.id!r} is {verb} already, and has not ended; ids may be "
                f"used again only after that"
            )
        self._tombstones.pop(key, None)
        self._waiting[key] = end
        self.live.add(end)
        end.start_lease()
        for connection, opened in self._asked.pop(key, []):
            self.opened(connection, opened)

    def ask(self, end: End, connection: Connection) -> None:
        """``pull`` or ``push``: ask the peer."""
        self.live.add(end)
        try:
            end.ask(connection)
        except KVWireError:
            self.live.discard(end)
            raise

    def over(self, end: End, reason: str) -> None:
        """A transfer has ended."""
        self.live.discard(end)
        key = _key(end)
        if self._waiting.get(key) is end:
            del self._waiting[key]
            if end.unmet:
                # bounded: TOMBSTONES_MAX
                self._tombstones[key] = (reason, end.unmet)
                if len(self._tombstones) > TOMBSTONES_MAX:
                    self._tombstones.popitem(last=False)

    # --- the peer's side --------------------------------------------------------------

    def opened(self, connection: Connection, event: TransferOpened) -> None:
        """A peer asks: match it, answer it, or let it wait."""
        request = event.request
        key = (event.id, request.kind is Kind.OUTGOING)
        if request.over:
            connection.core.transfers.forget(request)
            return
        try:
            description = Description.decode(event.description)
        except KVWireError as exc:
            _refuse(connection, request, exc, WireCode.PROFILE)
            return
        word = self._heard_before(key, description)
        end = self._waiting.get(key)
        answer = end.answer_to(connection, description) if end else Answer.LATER
        if word is not None:
            word.meet(connection, request)
        elif end is not None and answer is Answer.YES:
            end.meet(connection, request, description)
        elif answer is Answer.NO:
            _refuse(connection, request, PeerError("it is taken"), WireCode.OTHER)
        elif end is None and (key in self._tombstones or _goes_on(description)):
            error = PeerError(f"it has ended: {self._last_reason(key)}")
            _refuse(connection, request, error, WireCode.OTHER)
        else:
            # bounded: TRANSFERS_WAITING_MAX per connection, by the core
            self._asked.setdefault(key, []).append((connection, event))

    def request_over(self, request: CoreRequest, connection: Connection) -> None:
        """A question that still waited has ended: the peer gave up, or is gone."""
        for key, asked in list(self._asked.items()):
            left = [pair for pair in asked if pair[1].request is not request]
            if left:
                self._asked[key] = left
            else:
                del self._asked[key]
        connection.core.transfers.forget(request)

    # --- connections ------------------------------------------------------------------

    def connection_lost(self, connection: Connection) -> None:
        """A link has touched memory for the last time."""
        for end in list(self.live):
            end.lost(connection)
        # A peer may have asked on its new link before we knew that the old one is gone.
        asked, self._asked = self._asked, {}
        for pairs in asked.values():
            for asker, event in pairs:
                self.opened(asker, event)

    def interrupted(self, incarnation: bytes) -> bool:
        """Whether some transfer with a peer waits for another link."""
        return any(end.interrupted(incarnation) for end in self.live) or any(
            word.incarnation == incarnation for word in self._last_words.values()
        )

    def peer_restarted(self, incarnation: bytes) -> None:
        """The start of the peer that had our transfers is gone for good."""
        error = ConnectionLost("the peer has restarted; its side of it is gone")
        for end in list(self.live):
            if end.interrupted(incarnation):
                end.stop(error, WireCode.GOING_AWAY)

    def end(self, id: str | bytes | int, reason: str) -> None:
        """Abort whatever here has this name and waits for its peer."""
        key = transfer_key(id)
        for end in list(self.live):
            if end.key == key:
                end.abort(reason)

    def unconfirmed(self, last_word: LastWord) -> None:
        """A transfer is settled here, and its producer may not know.

        Kept for as long as the producer would wait for another link.
        """
        self._last_words[last_word.key] = last_word
        end = last_word.incoming
        end.loop.call_later(end.lease_s, self.confirmed, last_word)

    def confirmed(self, last_word: LastWord) -> None:
        """Its producer knows, or has stopped waiting."""
        if self._last_words.get(last_word.key) is last_word:
            del self._last_words[last_word.key]

    def closing(self, connection: Connection | None = None) -> None:
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

    def reattach(self, connection: Connection) -> None:
        """There is a new link to a peer: ask again for what was ours to ask for."""
        for end in list(self.live):
            if end.asks(connection.peer.incarnation):
                # If this link is gone again, the next one is the same to it.
                with suppress(ConnectionClosed):
                    end.ask(connection)
        for word in list(self._last_words.values()):
            same_peer = word.incarnation == connection.peer.incarnation
            if word.asks and same_peer and word.core is None:
                with suppress(ConnectionClosed):
                    word.ask(connection)

    def _last_reason(self, key: Key) -> str:
        """Why a transfer ended that the peer asks for; said once to each who may ask.

        After that the id can be used anew, untainted by its last use.
        """
        reason, answers = self._tombstones.pop(key, ("nothing is known of it", 0))
        if answers > 1:
            self._tombstones[key] = (reason, answers - 1)  # bounded: TOMBSTONES_MAX
        return reason

    def _heard_before(self, key: Key, description: Description) -> LastWord | None:
        """The last word that a producer which pushes again has not heard."""
        for word in self._last_words.values():
            same = word.incoming.key == key[0] and word.peer_end == description.end
            if same and not key[1] and not word.asks:
                return word
        return None


def _key(end: End) -> Key:
    return end.key, isinstance(end, Outgoing)


def _goes_on(description: Description) -> bool:
    """Whether a consumer goes on with what this side has begun to send before."""
    return description.settled or bool(description.landed)


def _refuse(
    connection: Connection, request: CoreRequest, error: KVWireError, code: WireCode
) -> None:
    connection.core.refuse(request, error, code)
    connection.core.transfers.forget(request)
    connection.run()
