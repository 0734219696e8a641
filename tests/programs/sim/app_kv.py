"""KV transfers of a simulated application: opened, answered, marked, committed.

Either side may be the producer, and either may open a transfer. The producer marks
segments of random sizes with content of their own; the consumer gives each of them
memory when it is told of it, or takes small ones whole, in every other transfer.
Everything is compared when it says that it landed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import ConnectionClosed, RequestCancelled, UsageError, WireCode
from kvwire.proto import events
from kvwire.proto.records import RequestRecord, SegmentRecord, TransferRecord
from kvwire.proto.state import RequestKind, RequestStage
from tests.programs.sim.ask import Ask, Part
from tests.programs.sim.endpoint import Endpoint
from tests.programs.sim.memory import content, demand
from tests.programs.sim.plan import Dice

if TYPE_CHECKING:
    from tests.programs.sim.node import Node
    from tests.programs.sim.world import World

_PRIORITIES: Final = 3
_DESCRIPTION: Final = b"what a front would say of its cache"


class KVApp:
    """What an application does with KV transfers."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    # --- deeds ------------------------------------------------------------------------

    def open(self, endpoint: Endpoint, dice: Dice) -> None:
        """Ask the peer for a transfer, as its producer or as its consumer."""
        pull, deadline = dice.one_in(2), endpoint.deadline(dice)
        transfer = TransferRecord(
            id=b"t%d" % self._world.next_serial(), priority=dice.below(_PRIORITIES)
        )
        if pull:
            self._choose(transfer)
        kind = RequestKind.INCOMING if pull else RequestKind.OUTGOING
        ask = Ask(endpoint, kind, 0, deadline=deadline)
        try:
            ask.core = endpoint.core.open_transfer(
                transfer, _DESCRIPTION, pull=pull, deadline=deadline
            )
        except (ConnectionClosed, UsageError) as exc:
            self._world.judge.truth.refused(ask, exc)
            return
        self._world.note(endpoint.name, "opens", kind.value)
        endpoint.keep(ask)

    def mark(self, endpoint: Endpoint, dice: Dice) -> None:
        """Mark some segments of a transfer that this side produces."""
        ask = _moving(endpoint, dice)
        if ask is None:
            return
        transfers = endpoint.core.transfers
        last = dice.one_in(4)
        for left in reversed(range(1 + dice.below(4))):
            nbytes = max(1, endpoint.size(dice))
            part = Part(self._world.next_serial(), nbytes)
            part.buffer, part.lease = self._node.lend(nbytes, readable=True)
            part.lease.store(0, content(nbytes, part.serial))
            number = len(ask.parts) + 1
            box = (0, number, 1, 0, 1)
            commit = 1 + dice.below(2) if last and not left else 0
            segment = transfers.mark(ask.core, box, nbytes, commit)
            ask.committed = commit > 0
            demand(segment.number == number, "kv", "segments are numbered as marked")
            ask.parts[number] = part
            if not (dice.one_in(2) and endpoint.leaves(segment, part.buffer)):
                transfers.queue(segment, part.buffer)
        self._world.note(endpoint.name, "marks", len(ask.parts))
        endpoint.collect()

    def commit(self, endpoint: Endpoint, dice: Dice) -> None:
        """Mark nothing more of a transfer."""
        ask = _moving(endpoint, dice)
        if ask is not None:
            self._world.note(endpoint.name, "commits", len(ask.parts))
            ask.committed = True
            endpoint.core.transfers.commit(ask.core, complete=dice.one_in(2))
            endpoint.collect()

    def commit_all(self) -> None:
        """Mark nothing more of any transfer."""
        for endpoint in self._node.endpoints:
            while _moving(endpoint, Dice(0)) is not None:
                self.commit(endpoint, Dice(0))

    # --- events -----------------------------------------------------------------------

    def event(self, endpoint: Endpoint, event: object) -> None:
        """Deal with an event of the core that speaks of a transfer."""
        judge = self._world.judge
        match event:
            case events.TransferOpened(request=request):
                self._opened(endpoint, request)
            case events.TransferAgreed(request=request):
                _ask(request)
            case events.SegmentMarked(segment=segment):
                self._marked(endpoint, _ask(segment.request), event)
            case events.SegmentLanded(segment=segment):
                judge.kv.segment_landed(_ask(segment.request), segment)
            case events.SegmentsAcknowledged(request=request, numbers=numbers):
                judge.kv.acknowledged(_ask(request), numbers)
            case _:
                assert isinstance(event, events.TransferSettled), event
                judge.kv.settled(_ask(event.request))

    def over(self, ask: Ask) -> None:
        """A transfer is over: take what is left of it out of the core, at some time."""
        ask.endpoint.soon(self._forget, ask)

    # --- inside -----------------------------------------------------------------------

    def _opened(self, endpoint: Endpoint, request: RequestRecord) -> None:
        ask = Ask(endpoint, request.kind, 0)
        ask.core = request
        endpoint.note(ask)
        endpoint.soon(self._answer, ask)

    def _answer(self, ask: Ask) -> None:
        core = ask.endpoint.core
        if self._world.whim(8):
            self._node.app.cancels += 1
            ask.cancelled = True
            error = RequestCancelled("refused by this side")
            core.refuse(ask.core, error, WireCode.CANCELLED)
            return
        if ask.kind is RequestKind.INCOMING and not ask.core.over:
            self._choose(core.transfers.records[ask.core])
        core.transfers.agree(ask.core, _DESCRIPTION)

    def _choose(self, transfer: TransferRecord) -> None:
        """Choose whether small segments of a transfer are taken whole."""
        if int(transfer.id.removeprefix(b"t")) % 2:
            transfer.take = self._take

    def _take(self, segment: SegmentRecord, body: bytes | memoryview | None) -> None:
        judge = self._world.judge.kv
        ask = _ask(segment.request)
        part = Part(judge.serial_of(ask, segment), segment.nbytes)
        ask.parts[segment.number] = part
        judge.taken(ask, segment, body)

    def _marked(
        self, endpoint: Endpoint, ask: Ask, event: events.SegmentMarked
    ) -> None:
        segment = event.segment
        part = Part(self._world.judge.kv.serial_of(ask, segment), segment.nbytes)
        part.buffer, part.lease = self._node.lend(segment.nbytes, writable=True)
        ask.parts[segment.number] = part
        endpoint.core.transfers.place(segment, part.buffer)

    def _forget(self, ask: Ask) -> None:
        ask.endpoint.core.transfers.forget(ask.core)
        self._node.collect()


def _ask(request: RequestRecord) -> Ask:
    ask = request.context
    assert isinstance(ask, Ask), "an event of a transfer that nobody knows"
    demand(not ask.over, "completion", "an event of a transfer that is over")
    return ask


def _moving(endpoint: Endpoint, dice: Dice) -> Ask | None:
    """A transfer that this side produces and that can still be marked."""
    asks = [
        ask
        for ask in endpoint.open
        if ask.kind is RequestKind.OUTGOING
        and ask.core.state is RequestStage.MOVING
        and not ask.committed
    ]
    return dice.pick(asks)
