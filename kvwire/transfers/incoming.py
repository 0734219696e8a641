"""The consumer's end of a KV transfer: segments land and layers open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import (
    ConnectionClosed,
    IntegrityError,
    KVWireError,
    PeerCancelled,
    ProfileMismatch,
    RequestCancelled,
    RequestError,
    UsageError,
    WireCode,
    shown,
)
from kvwire.kv.blocks import Blocks
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, outcome_of
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, Segment, TransferPlan
from kvwire.limits import LANDED_BOXES_MAX
from kvwire.proto.records import SegmentRecord
from kvwire.transfers.base import (
    DAMAGED,
    Answer,
    KVTransfer,
    Progress,
    UnnotifiedPeers,
    damaged_of,
    note_silence,
    recoverable,
)
from kvwire.transfers.dedup import digest, held, listed_hashes
from kvwire.transfers.description import TransferOffer, pack_have
from kvwire.transfers.options import ReceiveOptions
from kvwire.transfers.ports import ConnectionPort, TransferServices
from kvwire.transfers.receiver import ReceiveAttempt, missing_chunks
from kvwire.transfers.settle import SettleAttempt
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
from kvwire.types import whole

if TYPE_CHECKING:
    from kvwire.kv.blocks import Bits


_OF_CONTENT: Final = frozenset({"hashes", "content", "have"})


class IncomingState(KVTransfer):
    """Holds the state of a transfer that this side consumes."""

    plan: TransferPlan
    landed: Landed

    receives: bool = True
    # The layers that may be read; None while none may.
    _readable: Landed | None = None

    def __init__(
        self,
        communicator: TransferServices,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        options: ReceiveOptions,
    ) -> None:
        super().__init__(communicator, id, cache, blocks, options)
        if not self.cache.writable:
            raise UsageError(
                "this cache has a tensor that is not writable: nothing can land in it"
            )
        self.have: dict[str, Bits] = {}
        if options.keys() & _OF_CONTENT:
            listed = listed_hashes(options.get("hashes"), self.geometry)
            self.have = held(options.get("have"), listed, self.lists)
            self.hashes: bytes = digest(listed, options.get("content"))
        self.attempt: ReceiveAttempt | None = None
        self.peer_id: bytes = b""
        self.reported: list[Segment] = []
        # The most layers of a segment.
        self.layers_grouped: int = 1
        self._damaged: list[Segment] = []
        # Something was on its way, which another link need not bring again.
        self.has_moved: bool = False
        self._error: KVWireError | None = None
        self._gates: dict[tuple[int, str | None], list[asyncio.Future[None]]] = {}

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer is here.

        Cancel safety: safe, it only watches.
        """
        try:
            if self.layer_landed(layer, group):
                return
        except UsageError:
            await asyncio.sleep(0)  # one turn of the loop: see kvwire.aio
            raise
        if self.outcome is None:
            gate: asyncio.Future[None] = self.loop.create_future()
            gates = self._gates.setdefault((layer, group), [])
            gates.append(gate)
            try:
                await gate
            finally:
                if gate in gates:
                    gates.remove(gate)
        if self.outcome is not None and not self.layer_landed(layer, group):
            await asyncio.sleep(0)
            assert self._error is not None
            raise _not_landed(layer, self.outcome, self._error) from self._error

    def layer_event(self, layer: int, group: str | None = None) -> Any:
        """Return an event that fires when a layer is here."""
        landed, device = self.layer_landed(layer, group), self.cache.device
        if device is None:
            raise UsageError(
                "layer_event: this cache lies in host memory; await layer(n)"
            )
        if not landed:
            raise UsageError(f"layer_event: layer {layer} has not landed yet")
        return self.communicator.devices.copy_engine(device).landed

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Tell whether a layer is here.

        Raises:
            UsageError: There is no such layer or group.
        """
        groups = self.cache.groups
        if type(layer) is not int and whole(layer) is None:
            raise UsageError(f"layer {layer!r}: a number, by the model's index")
        if group is not None and group not in groups:
            raise UsageError(f"no group {group!r}; there is {', '.join(groups)}")
        named = groups.values() if group is None else (groups[group],)
        for part in named:
            first = part.spec.first_layer
            if layer in range(first, first + part.spec.layers):
                readable = self._readable
                return readable is not None and readable.layer(layer, group)
        held = {part.spec.layer_indices for part in named}
        there = ", ".join(f"{one.start} to {one.stop - 1}" for one in held)
        raise UsageError(f"layer {layer} is not in this cache: there is {there}")

    # --- for the registry -------------------------------------------------------------

    def answer_to(
        self, connection: ConnectionPort, description: TransferOffer
    ) -> Answer:
        """Tell whether a peer that offers the transfer may send it."""
        attempt = self.attempt
        if self.state is not TransferState.OPEN:
            return Answer.LATER
        if attempt is None:
            return Answer.YES
        same_peer = attempt.origin == connection.peer.origin
        if not same_peer or self.peer_id != description.endpoint_id:
            return Answer.NO
        if attempt.state is AttemptState.WAITING:
            return Answer.YES
        return Answer.LATER

    @property
    def planned(self) -> bool:
        """Tell whether a producer was met, on this link or an earlier one."""
        return bool(self.peer_id)

    @property
    def settling(self) -> bool:
        """Tell whether all is here and the producer does not know that yet."""
        return self._in(AttemptState.SETTLED)

    @property
    def unnotified(self) -> UnnotifiedPeers:
        """Return the producer if it may still ask once the transfer is over."""
        attempt = self.attempt
        if attempt is None:
            return UnnotifiedPeers(1, frozenset())
        known = [attempt.peer_id] if attempt.state in UNNOTIFIED else []
        return UnnotifiedPeers(0, frozenset(known))

    @property
    def waits_for(self) -> str:
        if self.attempt is None:
            return "no peer has pushed it"
        peer = shown(self.attempt.connection.peer.name)
        if self._in(AttemptState.ASKED):
            return f"the peer {peer} has not published it"
        if self._in(*OFF_LINK):
            return f"the connection to {peer} is lost"
        layers, marked, landed, _, _ = self.progress
        said = "all that was marked has landed, and the commit is missing"
        if landed < marked:
            said = f"{landed} of {marked} marked layers have landed, of {layers}"
        elif marked < layers:
            said = f"it has marked {marked} of {layers} layers"
        return f"the peer {peer} has not finished it: {said}"

    @property
    def progress(self) -> Progress:
        if not self.planned or self.attempt is None:
            return Progress()
        layers = sum(len(walk.layers) for walk in self.plan.groups)
        landed = self.landed.layers
        return Progress(
            layers,
            max(self.attempt.marked_layers, landed),
            landed,
            self.plan.nbytes,
            self.landed.nbytes,
        )

    @property
    def connections(self) -> tuple[ConnectionPort, ...]:
        return () if self.attempt is None else (self.attempt.connection,)

    def interrupted(self, origin: bytes) -> bool:
        """Tell whether the transfer waits for another link to a peer."""
        attempt = self.attempt
        return self._in(*OFF_LINK) and attempt is not None and attempt.origin == origin

    def asks(self, origin: bytes) -> bool:
        """Tell whether this side asks that peer again on another link."""
        attempt = self.attempt
        if attempt is None or not self._in(AttemptState.WAITING):
            return False
        return (
            self.state is TransferState.OPEN
            and attempt.asks
            and attempt.origin == origin
        )

    def ask(self, connection: ConnectionPort) -> None:
        """Pull: ask the peer of a connection for the transfer."""
        if self.state in OVER:
            return
        before, attempt = self.attempt, self._new_attempt(connection, asks=True)
        try:
            attempt.ask(connection, self)
        except KVWireError:
            self.attempt = before
            if before is not None:
                self.start_lease()
            raise

    def matched(
        self, connection: ConnectionPort, core: Any, description: TransferOffer
    ) -> None:
        """Push: answer the peer of a connection that offers the transfer."""
        attempt = self._new_attempt(connection, asks=False)
        attempt.core, core.context = core, attempt
        attempt.peer_id = description.endpoint_id
        try:
            self.plan_with(description)
        except KVWireError as exc:
            attempt.refuse(exc, WireCode.PROFILE)
            return
        answer = self.description(self.peer_id, self.plan.digest)
        attempt.begin()
        connection.transfers.agree(core, answer.encode())
        connection.run()

    def stop(self, error: KVWireError, code: WireCode) -> None:
        if self.attempt is not None:
            self.attempt.refuse(error, code)
        self.end(error)

    def runs_on(self, connection: ConnectionPort) -> bool:
        return self.attempt is not None and self.attempt.connection is connection

    def lost(self, connection: ConnectionPort) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.connection is connection:
            self.release(attempt)

    # --- the attempt ------------------------------------------------------------------

    def plan_with(self, description: TransferOffer) -> None:
        """Plan against the producer's half.

        Raises:
            ProfileMismatch: The two halves do not fit; names the fields.
            BackendUnavailable: This connection cannot move memory of the device.
        """
        self.phases.enter("handshake")
        assert self.attempt is not None
        if description.trace or self.ring is not None:
            self.note_peer(self.attempt.connection, description.trace)
        if self.memory.device is not None:
            self.attempt.connection.staging.open(self.memory.device)
        description.require_same_hashes(self.hashes)
        if self.peer_id not in (b"", description.endpoint_id):
            raise ProfileMismatch(
                "the peer has another transfer of this name now", fields=("end",)
            )
        # Without hashes on both sides nobody knows that it has the same blocks.
        comparable = self.hashes and description.hashes
        plan = TransferPlan(
            self.memory,
            self.memory_lists,
            description.read_geometry(),
            PlanSide.CONSUMER,
            tokens=self.tokens,
            have=self.have if comparable else None,
            local=self.geometry,
            named=self.lists,
        )
        first = not self.peer_id
        self.peer_id = self.attempt.peer_id = description.endpoint_id
        if first:
            self.plan, self.landed = plan, Landed(plan)
            self._readable = self.landed
            # What is not carried, or was here before, is not waited for.
            if self._gates:
                self._open_gates()
        self.phases.enter("mark_wait")

    def segment_landed(self, core: SegmentRecord, segment: Segment) -> None:
        """Note a segment that is here in whole, and open the gates it opens."""
        if core.damaged:
            self._damaged.append(segment)  # bounded: SEGMENTS_MAX
            assert self.attempt is not None
            missing = missing_chunks(core, self.attempt.chunk_bytes())
            self.landed.mark_but(segment, missing)
            return
        self.landed.mark(segment)
        if self.ring is not None:
            self.note("landed", segment.layer, segment.layers, core.nbytes)
        self._lease_until = None
        if self._lease is not None:
            self.renew_lease()
        if self._gates:
            self._open_gates()

    def attempt_ended(self, error: KVWireError | None) -> None:
        """Take in the end of the attempt's request."""
        attempt = self.attempt
        assert attempt is not None
        lost = recoverable(error) and self.communicator.config.resume
        if lost and self.state is TransferState.OPEN:
            self._name_phase(attempt)
            self.phases.enter("lost")
            attempt.state = ATTEMPT_TRANSITIONS[attempt.state, AttemptInput.LOSE]
            if self.ring is not None:
                self.note("lost")
            self.start_lease()
            return
        attempt.state = ATTEMPT_TRANSITIONS[attempt.state, AttemptInput.END]
        if self.state in OVER:
            if self.outcome is not None:
                attempt.release()
            if lost:
                self.registry.unconfirmed(
                    SettleAttempt(self, attempt, plan=self.plan.digest)
                )
            self.registry.settled(self)
        elif self.state is TransferState.OPEN:
            assert error is not None, "an attempt ended well before its transfer"
            self.end(error)

    # --- inside -----------------------------------------------------------------------

    def _new_attempt(self, connection: ConnectionPort, *, asks: bool) -> ReceiveAttempt:
        if self._lease is not None:
            self.stop_lease()
        self.attempt = ReceiveAttempt(self, connection, asks=asks)
        self.attempt.peer_id = self.peer_id
        return self.attempt

    def _in(self, *states: AttemptState) -> bool:
        """Tell whether there is an attempt in one of these states."""
        return self.attempt is not None and self.attempt.state in states

    def description(self, peer_id: bytes = b"", plan: bytes = b"") -> TransferOffer:
        # What does not fit is sent again, which is only slower.
        self.reported = self.landed.boxes(LANDED_BOXES_MAX) if self.has_moved else []
        given_up = isinstance(self._error, RequestCancelled)
        return TransferOffer(
            geometry=self.geometry.encoded,  # type: ignore[arg-type]
            endpoint_id=self.endpoint_id,
            peer_id=peer_id,
            hashes=self.hashes,
            have=pack_have(self.have) if self.have else (),
            landed=tuple(self.reported),
            plan=plan,
            settled=self.state in OVER and not given_up,
            trace=self.trace,
        )

    def _open_gates(self) -> None:
        """Wake those whose layers are here; all of them at the end."""
        readable = self._readable
        for (layer, group), gates in list(self._gates.items()):
            over = self.outcome is not None
            if over or (readable is not None and readable.layer(layer, group)):
                del self._gates[layer, group]
                for gate in gates:
                    if not gate.done():
                        gate.set_result(None)

    def end_now(self, cause: KVWireError) -> None:
        self._error, reason = cause, str(cause)
        attempt = self.attempt
        if attempt is None or not self.peer_id:
            outcome = self.nothing(reason)
        else:
            if attempt.state in ON_LINK or attempt.state is AttemptState.REFUSED:
                self._name_phase(attempt)
            outcome = outcome_of(
                self.landed,
                reasons=damaged_of(self.plan, self._damaged) if self._damaged else (),
                otherwise=reason,
                timings=self.phases.timings(),
                layers_grouped=self.layers_grouped,
            )
        attempts = [] if attempt is None else [attempt]
        self.registry.over(self, cause, attempts)
        self.record(outcome, attempts)
        self._open_gates()

    def _name_phase(self, attempt: ReceiveAttempt) -> None:
        """Say what it has waited for, now that it waits no more."""
        if self.phases.phase == "mark_wait" and self.landed.complete:
            self.phases.phase = "commit"
        if attempt.state is AttemptState.SETTLED:
            return  # by a word that has come just now
        interval_s = self.communicator.config.ping_interval_s
        note_silence(self.phases, attempt.connection, interval_s)


def _not_landed(layer: int, outcome: Outcome, error: KVWireError) -> KVWireError:
    """Return what a gate raises: of the class of the error that ended the transfer."""
    reasons = outcome.missing.reasons
    text = f"layer {layer} did not land: {'; '.join(reasons)}"
    if isinstance(error, ProfileMismatch):
        return ProfileMismatch(text, fields=error.fields)
    if DAMAGED in reasons and isinstance(error, PeerCancelled):
        return IntegrityError(text)
    if isinstance(error, RequestError | ConnectionClosed):
        return type(error)(text)
    return error
