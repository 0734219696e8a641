"""The producer's end of a KV transfer: marks go in, segments go out.

One transfer may serve several consumers, such as the ranks of a
tensor-parallel group, each with its own plan: a
:class:`~kvwire.transfers.sender.SendAttempt`. They all read the same log of marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvwire.errors import (
    KVWireError,
    PeerCancelled,
    ProfileMismatch,
    RequestCancelled,
    UsageError,
    WireCode,
    shown,
)
from kvwire.kv.blocks import BlockLists, Blocks
from kvwire.kv.geometry import checked_tokens
from kvwire.kv.outcome import join_outcomes
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import TransferPlan
from kvwire.limits import GROUP_BYTES, KV_BLOCKS_MAX
from kvwire.transfers.base import (
    UNMARKED,
    Answer,
    KVTransfer,
    Progress,
    UnnotifiedPeers,
    recoverable,
)
from kvwire.transfers.dedup import digest, listed_hashes
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.options import SendOptions
from kvwire.transfers.ports import ConnectionPort, TransferServices
from kvwire.transfers.ready_log import Encoder, ReadyLog
from kvwire.transfers.sender import SendAttempt
from kvwire.transfers.state import (
    ATTEMPT_TRANSITIONS,
    OFF_LINK,
    ON_LINK,
    OVER,
    UNNOTIFIED,
    AttemptInput,
    AttemptState,
    TransferState,
)


class OutgoingState(KVTransfer):
    """Holds the state of a transfer that this side produces."""

    def __init__(
        self,
        communicator: TransferServices,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        options: SendOptions,
        consumers: int = 1,
    ) -> None:
        self.growing: bool = options.get("growing", False)
        super().__init__(communicator, id, cache, blocks, options)
        if type(consumers) is not int or consumers < 1:
            raise UsageError(f"consumers={consumers!r}: a number, at least 1")
        self.consumers = consumers
        group_bytes = options.get("group_bytes")
        number = type(group_bytes) is int
        if group_bytes is not None and not (number and group_bytes > 0):
            raise UsageError(
                f"group_bytes={group_bytes!r}: at least 1, for layer by layer; a "
                f"number of bytes"
            )
        if "hashes" in options or "content" in options:
            listed = listed_hashes(options.get("hashes"), self.geometry)
            self.hashes: bytes = digest(listed, options.get("content"))
        self.group_bytes: int = GROUP_BYTES if group_bytes is None else group_bytes
        self.ready_log: ReadyLog = ReadyLog(
            self.cache,
            self.lists,
            self.loop,
            self._marked,
            self.communicator.devices,
            self.encoder(),
        )
        self.attempts: list[SendAttempt] = []

    def encoder(self) -> Encoder | None:
        """Return what has to be done with a part before it may be sent, if anything."""
        return None

    def extend(self, blocks: Blocks) -> None:
        """Name blocks that were not known before."""
        if not self.growing:
            raise UsageError("extend: this transfer was not begun with growing=True")
        self.ready_log.name(self.cache.block_lists(blocks))

    def padded(self, lists: BlockLists) -> BlockLists:
        if self.tokens is None:
            raise UsageError(
                "growing=True: tokens= says how many the whole transfer will have"
            )
        room: dict[str, int] = {}
        for name, ids in lists.items():
            tokens = checked_tokens(self.tokens, self.cache)
            if isinstance(tokens, Mapping):
                if name not in tokens:
                    raise UsageError(f"growing=True: tokens= lacks group {name!r}")
                tokens = tokens[name]
            room[name] = -(-tokens // self.cache.groups[name].spec.block_tokens)
            if room[name] < ids.size:
                raise UsageError(
                    f"growing=True: {ids.size} blocks of group {name!r} are more than "
                    f"the {room[name]} that tokens={tokens} need"
                )
        if sum(room.values()) > KV_BLOCKS_MAX:
            raise UsageError(
                f"growing=True: tokens={self.tokens} need {sum(room.values())} blocks; "
                f"a transfer has 1 to {KV_BLOCKS_MAX}"
            )
        return lists.padded(room)

    # --- for the registry -------------------------------------------------------------

    def answer_to(
        self, connection: ConnectionPort, description: TransferOffer
    ) -> Answer:
        """Tell whether a peer that asks may have the transfer."""
        if self.state is not TransferState.OPEN:
            return Answer.LATER
        known = self._known(connection, description) if self.attempts else None
        if known is None:
            return Answer.YES if len(self.attempts) < self.consumers else Answer.NO
        match known.state:
            case AttemptState.WAITING:
                return Answer.YES
            case AttemptState.OVER:
                return Answer.NO
        return Answer.LATER

    @property
    def unnotified(self) -> UnnotifiedPeers:
        """Return the consumers that may still ask once the transfer is over."""
        return UnnotifiedPeers(
            self.consumers - len(self.attempts),
            frozenset(d.peer_id for d in self._in(*UNNOTIFIED)),
        )

    @property
    def waits_for(self) -> str:
        peers = [shown(d.connection.peer.name) for d in self._in(*OFF_LINK)]
        if peers:
            return f"the connection to {', '.join(peers)} is lost"
        peers = [shown(d.connection.peer.name) for d in self._in(AttemptState.ASKED)]
        if peers:
            return f"the peer {', '.join(peers)} has not expected it"
        if len(self.attempts) < self.consumers:
            return f"{len(self.attempts)} of {self.consumers} consumers have pulled it"
        marked, layers = self.ready_log.layers
        if not self.ready_log.finished:
            said = f"{marked} of {layers} layers are marked"
            return f"finish() has not been called: {said}"
        if not self.ready_log.all_in:
            return "an event that a mark is behind has not fired"
        said = ", ".join(
            f"{shown(d.connection.peer.name)} has {d.landed.layers} of {layers} layers"
            for d in self.attempts
            if d.planned and d.state is not AttemptState.OVER
        )
        return f"the consumer has not taken all of it: {said}"

    @property
    def progress(self) -> Progress:
        marked, layers = self.ready_log.layers
        met = [d for d in self.attempts if d.planned]
        if not met:
            return Progress(layers, marked)
        slowest = min(met, key=lambda d: d.landed.nbytes)
        return Progress(
            layers,
            marked,
            slowest.landed.layers,
            slowest.plan.nbytes,
            slowest.landed.nbytes,
        )

    @property
    def connections(self) -> tuple[ConnectionPort, ...]:
        return tuple(attempt.connection for attempt in self.attempts)

    def interrupted(self, origin: bytes) -> bool:
        """Tell whether the transfer waits for another link to a peer."""
        return any(d.origin == origin for d in self._in(*OFF_LINK))

    def asks(self, origin: bytes) -> bool:
        """Tell whether this side asks that peer again on another link."""
        if self.state is not TransferState.OPEN:
            return False
        waiting = self._in(AttemptState.WAITING)
        return any(d.asks and d.origin == origin for d in waiting)

    def description(self, peer_id: bytes = b"", plan: bytes = b"") -> TransferOffer:
        return TransferOffer(
            geometry=self.geometry.encoded,  # type: ignore[arg-type]
            endpoint_id=self.endpoint_id,
            peer_id=peer_id,
            hashes=self.hashes,
            plan=plan,
            trace=self.trace,
        )

    def ask(self, connection: ConnectionPort) -> None:
        """Push: ask the peer of a connection to take the transfer."""
        if self.state in OVER:
            return
        self.phases.phase = "memory_wait"
        waiting = self._in(AttemptState.WAITING)
        known = waiting[0] if waiting else None
        attempt = self._attempt_on(connection, known, asks=True)
        try:
            attempt.ask(connection, self)
        except KVWireError:
            if known is None:
                self.attempts.remove(attempt)
            self._watch()
            raise

    def matched(
        self, connection: ConnectionPort, core: Any, description: TransferOffer
    ) -> None:
        """Pull: answer the peer of a connection that asks for the transfer."""
        known = self._known(connection, description) if self.attempts else None
        attempt = self._attempt_on(connection, known, asks=False)
        attempt.core, core.context = core, attempt
        transfer = connection.transfers.records[core]
        # Chunks are scheduled here, for whichever side is in the greater hurry.
        transfer.priority = max(transfer.priority, self.priority)
        try:
            attempt.plan_with(description)
        except KVWireError as exc:
            attempt.refuse(exc, WireCode.PROFILE)
            return
        answer = self.description(plan=attempt.plan.digest)
        connection.transfers.agree(core, answer.encode())
        attempt.begin(settled=description.settled)

    def stop(self, error: KVWireError, code: WireCode) -> None:
        for attempt in list(self.attempts):
            attempt.refuse(error, code)
        self.end(error)

    @property
    def finishing(self) -> bool:
        return self.ready_log.finished and bool(self.attempts)

    def runs_on(self, connection: ConnectionPort) -> bool:
        return any(
            attempt.connection is connection
            for attempt in self.attempts
            if attempt.state is not AttemptState.OVER
        )

    def lost(self, connection: ConnectionPort) -> None:
        for attempt in self._in(*OFF_LINK):
            if attempt.connection is connection:
                self.release(attempt)

    # --- inside -----------------------------------------------------------------------

    def attempt_ended(self, attempt: SendAttempt, error: KVWireError | None) -> None:
        """Take in the end of an attempt: its consumer is served, or its link lost."""
        going_on = self.state is TransferState.OPEN
        lost = error is not None and recoverable(error)
        if going_on and lost and self.communicator.config.resume:
            attempt.note_lost()
            attempt.state = ATTEMPT_TRANSITIONS[attempt.state, AttemptInput.LOSE]
            if self.ring is not None:
                self.note("lost")
            self._watch()
            return
        attempt.state = ATTEMPT_TRANSITIONS[attempt.state, AttemptInput.END]
        if not going_on:
            return
        attempt.reason = "" if error is None else str(error)
        if error is not None:
            # What one rank of a group lacks, the group cannot use.
            for other in self._in(*ON_LINK):
                other.refuse(RequestCancelled(str(error)), WireCode.CANCELLED)
            self.end(error)
        elif self.consumers == 1 or len(self._in(AttemptState.OVER)) == self.consumers:
            self.end(PeerCancelled(UNMARKED))
        else:
            attempt.note_served()
            self.renew_lease()

    def require_same_tokens(self, plan: TransferPlan) -> None:
        """Refuse a consumer whose list is for more or fewer tokens than another's.

        Raises:
            ProfileMismatch: It is.
        """
        mine = plan.template.tokens
        for other in self.attempts:
            theirs = other.plan.template.tokens if other.planned else mine
            if mine != theirs:
                raise ProfileMismatch(
                    f"the consumers of one transfer want other tokens: {theirs} and "
                    f"{mine}",
                    fields=("tokens",),
                )

    def _known(
        self, connection: ConnectionPort, description: TransferOffer
    ) -> SendAttempt | None:
        """Return the attempt that a peer asks to go on with, or None."""
        for attempt in self.attempts:
            same_peer = attempt.origin == connection.peer.origin
            if same_peer and attempt.peer_id == description.endpoint_id:
                return attempt
        return None

    def _attempt_on(
        self, connection: ConnectionPort, known: SendAttempt | None, *, asks: bool
    ) -> SendAttempt:
        """Return the attempt of a new consumer, or resume that of a known one."""
        if known is None:
            attempt = SendAttempt(self, connection, asks=asks)
            self.attempts.append(attempt)  # bounded by `consumers`
            # As renew_lease; the timer is set again below, if it has to run.
            armed = self._lease is not None
            self._lease_until = self.loop.time() + self.lease_s if armed else None
        else:
            attempt = known
            attempt.resume(connection)
        self._watch()
        return attempt

    def _watch(self) -> None:
        """Let the lease run while a consumer is missing."""
        self.stop_lease()
        if len(self.attempts) - len(self._in(*OFF_LINK)) < self.consumers:
            self.start_lease()

    def _in(self, *states: AttemptState) -> list[SendAttempt]:
        """Return the attempts in one of these states."""
        return [d for d in self.attempts if d.state in states]

    def _marked(self) -> None:
        if self.ready_log.failed and self.outcome is None:
            self.abort(self.ready_log.failed)
        if self.ring is not None:
            self.note("marked", *self.ready_log.layers)
        for attempt in self.attempts:
            attempt.send_ready()

    def end_now(self, cause: KVWireError) -> None:
        reason = str(cause)
        outcomes = [d.outcome(reason) for d in self.attempts if d.planned]
        if len(outcomes) < self.consumers:
            # Those who never came have nothing.
            tokens = dict(outcomes[0].tokens) if outcomes else None
            outcomes.append(self.nothing(reason, tokens))
        outcome = join_outcomes(outcomes)
        self.registry.over(self, cause, self.attempts)
        self.record(outcome, self.attempts)
        self.ready_log.close()
