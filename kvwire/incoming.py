"""The consumer's end of a KV transfer: segments land and layers open."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvwire.dedup import Hashes, Have, digest, held, listed_hashes
from kvwire.description import Description, pack_have
from kvwire.errors import (
    KVWireError,
    PeerCancelled,
    ProfileMismatch,
    ProtocolError,
    UsageError,
    WireCode,
)
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, Timings, outcome_of
from kvwire.kv.plan import Segment, Side, TransferPlan
from kvwire.last_word import LastWord
from kvwire.limits import LANDED_BOXES_MAX
from kvwire.proto.segments import Segment as CoreSegment
from kvwire.receipt import Receipt, missing_chunks
from kvwire.transfer import Answer, KVTransfer, recoverable

if TYPE_CHECKING:
    from kvwire.connection import Connection


class Incoming(KVTransfer):
    """A transfer that this side consumes. Made by ``pull`` and ``expect``."""

    plan: TransferPlan
    landed: Landed

    def __init__(
        self,
        *args: Any,
        have: Have = None,
        hashes: Hashes = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, **keywords)
        if not self.cache.writable:
            raise UsageError(
                "this cache has a tensor that is not writable: nothing can land in it"
            )
        listed = listed_hashes(hashes, self.lists)
        self.have = held(have, listed, self.lists)
        self.hashes = digest(listed)
        self.receipt: Receipt | None = None
        self.planned = False
        self.boxes: list[tuple[int, int, int, int, int]] = []
        self._layers_grouped = 1
        self._gates: dict[tuple[int, str | None], list[asyncio.Future[None]]] = {}
        self._times = dict.fromkeys(("met", "agreed", "first", "last", "over"), 0.0)
        self._partial = ""
        self._attempts = 0

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer of every block has landed, and may be read.

        Args:
            layer: By the model's index.
            group: Of a hybrid model's cache; None for every group that has the layer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError: The transfer ended without it; the outcome says what is here.

        Cancel safety: safe, it only watches.
        """
        self._check_layer(layer, group)
        if self._has(layer, group):
            return
        if self.outcome is None:
            gate: asyncio.Future[None] = self.loop.create_future()
            gates = self._gates.setdefault((layer, group), [])
            gates.append(gate)
            try:
                await gate
            finally:
                if gate in gates:
                    gates.remove(gate)
        if not self._has(layer, group):
            assert self.outcome is not None
            raise PeerCancelled(f"layer {layer} did not land: {self.outcome.missing!r}")

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Whether a layer of every block has landed.

        Raises:
            UsageError: There is no such layer or group.
        """
        self._check_layer(layer, group)
        return self._has(layer, group)

    # --- the exchange -----------------------------------------------------------------

    def answer_to(self, connection: Connection, description: Description) -> Answer:
        """Whether a peer that offers it may send it."""
        receipt = self.receipt
        if self.outcome is not None:
            return Answer.NO
        if receipt is None:
            return Answer.YES
        same_peer = receipt.incarnation == connection.peer.incarnation
        if not same_peer or receipt.peer_end != description.end:
            return Answer.NO
        return Answer.YES if receipt.waits else Answer.LATER

    @property
    def unmet(self) -> int:
        """1 if its producer does not know how it ended, and may still ask."""
        return int(self.receipt is None or self.receipt.suspended)

    def interrupted(self, incarnation: bytes) -> bool:
        """Whether it waits for another link to a peer."""
        receipt = self.receipt
        return (
            receipt is not None
            and receipt.suspended
            and receipt.incarnation == incarnation
        )

    def asks(self, incarnation: bytes) -> bool:
        """Whether it is this side that asks again on another link."""
        return (
            self.interrupted(incarnation)
            and self.receipt is not None
            and self.receipt.asked
            and self.receipt.waits
        )

    def ask(self, connection: Connection) -> None:
        """Pull: ask the peer of a connection for it."""
        before, receipt = self.receipt, self._new_receipt(connection)
        receipt.asked = True
        try:
            connection.start_transfer(
                receipt,
                key=self.key,
                priority=self.priority,
                description=self.description(b"").encode(),
                pull=True,
            )
        except KVWireError:
            self.receipt = before
            if before is not None:
                self.start_lease()
            raise

    def meet(self, connection: Connection, core: Any, description: Description) -> None:
        """Push: the peer of a connection offers it."""
        receipt = self._new_receipt(connection)
        receipt.core, receipt.peer_end = core, description.end
        core.context = receipt
        try:
            self.plan_with(description)
        except KVWireError as exc:
            self.receipt = None
            connection.core.refuse(core, exc, WireCode.PROFILE)
            connection.core.transfers.forget(core)
            connection.run()
            return
        answer = self.description(self.plan.digest)
        connection.core.transfers.agree(core, answer.encode())
        connection.run()

    def stop(self, error: KVWireError, code: WireCode) -> None:
        """See KVTransfer."""
        if self.receipt is not None:
            self.receipt.refuse(error, code)
        if self.outcome is None:
            self._end(str(error))

    def runs_on(self, connection: Connection) -> bool:
        """See KVTransfer."""
        return self.receipt is not None and self.receipt.connection is connection

    def lost(self, connection: Connection) -> None:
        """See KVTransfer."""
        receipt = self.receipt
        if receipt is not None and receipt.connection is connection:
            self.release(receipt)

    # --- the receipt ------------------------------------------------------------------

    def plan_with(self, description: Description) -> None:
        """Plan against the producer's half.

        Raises:
            ProfileMismatch: The two halves do not fit; names the fields.
        """
        if self.hashes and description.hashes and self.hashes != description.hashes:
            raise ProfileMismatch(
                "the block hashes of the two lists differ: other tokens",
                fields=("hashes",),
            )
        plan = TransferPlan(
            self.cache,
            self.lists,
            description.read_geometry(),
            Side.CONSUMER,
            tokens=self.tokens,
            have=self.have,
        )
        if not self.planned:
            self.plan, self.landed, self.planned = plan, Landed(plan), True
        self._times["agreed"] = self._times["agreed"] or monotonic()

    def place(self, core: CoreSegment) -> Segment:
        """Give a segment its memory.

        Raises:
            ProtocolError: It is not a part of this transfer, or its length is wrong.
        """
        segment = Segment(*core.box)
        try:
            self.plan.check(segment)
        except UsageError as exc:
            raise ProtocolError("KVW-TR-09", str(exc)) from None
        if core.nbytes != self.plan.nbytes_of(segment):
            raise ProtocolError(
                "KVW-TR-09",
                f"segment {core.number} of {core.nbytes} bytes, the plan has "
                f"{self.plan.nbytes_of(segment)}",
            )
        self._times["first"] = self._times["first"] or monotonic()
        self._layers_grouped = max(self._layers_grouped, segment.layers)
        return segment

    def segment_landed(self, core: CoreSegment, segment: Segment) -> None:
        """All of a segment is here; open the gates it opens."""
        if core.damaged:
            self._partial = "its bytes arrived damaged"
            self.landed.mark_but(segment, missing_chunks(core, self._chunk_bytes()))
            return
        self.landed.mark(segment)
        self.boxes.append(core.box)
        self._times["last"] = monotonic()
        for (layer, group), gates in list(self._gates.items()):
            if self._has(layer, group):
                del self._gates[layer, group]
                _open(gates)

    def receipt_ended(self, error: KVWireError | None) -> None:
        """The request of the receipt is over."""
        receipt = self.receipt
        assert receipt is not None
        if self.outcome is not None:
            receipt.forget()
            if recoverable(error) and self.communicator.config.resume:
                self.communicator.exchange.unconfirmed(
                    LastWord(self, receipt, asks=receipt.asked)
                )
        elif recoverable(error) and self.communicator.config.resume:
            receipt.suspended = True
            self.start_lease()
        else:
            self._end(str(error))

    def settled(self) -> None:
        """All that the producer has marked is here."""
        self._end(self._partial or "it was not marked ready by the producer")

    # --- inside -----------------------------------------------------------------------

    def _new_receipt(self, connection: Connection) -> Receipt:
        self.stop_lease()
        self._times["met"] = self._times["met"] or monotonic()
        self._attempts += self.receipt is not None
        self.receipt = Receipt(self, connection)
        return self.receipt

    def description(self, plan: bytes) -> Description:
        """This side's half; ``plan`` is the digest of its plan, in an answer."""
        return Description(
            geometry=self.geometry.encode(),  # type: ignore[arg-type]
            have=pack_have(self.have),
            # What does not fit is sent again, which is only slower.
            landed=tuple(self.boxes[:LANDED_BOXES_MAX]),
            hashes=self.hashes,
            plan=plan,
            settled=self.outcome is not None,
            end=self.end,
            attempt=self._attempts,
        )

    def _chunk_bytes(self) -> int:
        assert self.receipt is not None
        return self.receipt.chunk_bytes()

    def _check_layer(self, layer: int, group: str | None) -> None:
        groups = self.cache.groups
        if group is not None and group not in groups:
            raise UsageError(f"no group {group!r}; there is {', '.join(groups)}")
        named = [groups[group]] if group is not None else list(groups.values())
        if not any(layer in g.spec.layer_indices for g in named):
            raise UsageError(f"layer {layer} is not in this cache")

    def _has(self, layer: int, group: str | None) -> bool:
        return self.planned and self.landed.layer(layer, group)

    def _end(self, reason: str) -> None:
        self._times["over"] = monotonic()
        attempts = [] if self.receipt is None else [self.receipt]
        outcome = self._outcome_now(reason) if self.planned else self.nothing(reason)
        self.communicator.exchange.over(self, reason)
        self.record(outcome, attempts)
        for gates in self._gates.values():
            _open(gates)
        self._gates.clear()

    def _outcome_now(self, reason: str) -> Outcome:
        if self.receipt is not None:
            for segment, missing in self.receipt.parts:
                self.landed.mark_but(segment, missing)
        times = self._times
        over, agreed = times["over"], times["agreed"]
        first, last = times["first"] or over, times["last"] or over
        return outcome_of(
            self.landed,
            otherwise=reason,
            timings=Timings(
                queue_s=max(0.0, (times["met"] or over) - self.created),
                handshake_s=max(0.0, agreed - (times["met"] or agreed)),
                memory_wait_s=0.0,
                wire_s=max(0.0, last - first),
                commit_s=max(0.0, over - last),
            ),
            layers_grouped=self._layers_grouped,
        )


def _open(gates: list[asyncio.Future[None]]) -> None:
    for gate in gates:
        if not gate.done():
            gate.set_result(None)
