"""A simulated application: carries out the steps of a plan that are its own.

It is honest about memory: it never touches what it has lent before it has drained, and
then gives it to somebody else at once. About the rest it is careless: it names grants
that it does not have, cancels what it has begun, and closes while things move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConnectionClosed, ConnectionLost, UsageError
from kvwire.proto.requests import RequestRecord
from kvwire.proto.state import RequestKind, RequestStage
from kvwire.types import BufferId
from tests.sim.app_kv import KVApp
from tests.sim.app_messages import MessageApp
from tests.sim.app_regions import RegionApp
from tests.sim.ask import Ask
from tests.sim.endpoint import Endpoint
from tests.sim.plan import Dice, Step, Verb
from tests.sim.violation import demand

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

_STORM: Final = (Verb.SEND, Verb.RECV, Verb.PUT, Verb.GET, Verb.OPEN)


class App:
    """The application of one node.

    Attributes:
        cancels: How often it has cancelled or refused something.
    """

    def __init__(self, world: World, node: Node) -> None:
        self.messages = MessageApp(world, node)
        self.regions = RegionApp(world, node)
        self.kv = KVApp(world, node)
        self.cancels = 0
        self._world = world
        self._node = node
        self._deeds: dict[Verb, Callable[[Endpoint, Dice], None]] = {
            Verb.SEND: self.messages.send,
            Verb.RECV: self.messages.recv,
            Verb.GRANT: self.regions.grant,
            Verb.PUT: self.regions.put,
            Verb.GET: self.regions.get,
            Verb.OPEN: self.kv.open,
            Verb.SEGMENT: self.kv.mark,
            Verb.COMMIT: self.kv.commit,
            Verb.CANCEL: self._cancel,
            Verb.WITHDRAW: self._withdraw,
            Verb.STORM: self._storm,
            Verb.CLOSE: lambda endpoint, _: self.close(endpoint),
            Verb.ABORT: lambda endpoint, _: self.abort(endpoint),
        }

    def act(self, step: Step) -> None:
        """Carry out a step."""
        dice = Dice(step.dice)
        if step.verb is Verb.REVOKE:
            self.regions.revoke(dice)
        elif step.verb is Verb.CLOSE_REGION:
            self.regions.close_one(dice)
        else:
            every = self._node.endpoints
            usable = [endpoint for endpoint in every if endpoint.ended is None]
            # Now and then one that has ended: it has to say so.
            endpoint = dice.pick(every if dice.one_in(8) else usable)
            if endpoint is not None:
                self._deeds[step.verb](endpoint, dice)

    def start(
        self,
        ask: Ask,
        begin: Callable[[BufferId], RequestRecord]
        | Callable[[BufferId | None], RequestRecord],
        data: bytes | None,
    ) -> bool:
        """Lend memory to a request and start it; False if the core would not."""
        node, endpoint = self._node, ask.endpoint
        buffer = None
        if data is not None:
            receives = ask.kind in (RequestKind.RECV, RequestKind.GET)
            buffer, ask.lease = node.lend(
                ask.nbytes, readable=not receives, writable=receives
            )
            node.memory.store(ask.lease, 0, data)
            ask.buffer = buffer
        try:
            ask.core = begin(buffer)  # type: ignore[arg-type]
        except (ConnectionClosed, UsageError) as exc:
            self._world.judge.truth.refused(ask, exc)
            if buffer is not None:
                node.holds.retire(buffer)
                node.collect()
            return False
        self._world.note(endpoint.name, ask.kind.value, ask.tag, ask.nbytes)
        endpoint.keep(ask, numbered=ask.kind is not RequestKind.RECV)
        demand(
            ask.over or endpoint.ended is None,
            "completion",
            "a request waits on a closed connection",
        )
        return True

    # --- the end ----------------------------------------------------------------------

    def close(self, endpoint: Endpoint) -> None:
        """Close a connection gracefully."""
        self._world.note(endpoint.name, "closes")
        endpoint.closing = True
        endpoint.core.close(self._node.clock, self._world.plan.setup.close_timeout_s)
        endpoint.pump()
        endpoint.set_timer()
        for ask in endpoint.open:
            unmet = ask.kind is RequestKind.RECV and ask.core.wire_id is None
            demand(
                not unmet or ask.core.state is not RequestStage.POSTED,
                "close",
                "closing does not wake who waits for a message",
            )

    def abort(self, endpoint: Endpoint) -> None:
        """End a connection now."""
        self._world.note(endpoint.name, "aborts")
        endpoint.core.fail(ConnectionLost("aborted by this side"))
        endpoint.pump()
        endpoint.end.abort()

    def close_all(self) -> None:
        """Close every connection, then every region."""
        for endpoint in self._node.endpoints:
            if endpoint.ended is None:
                self.close(endpoint)
        self.regions.close_all()

    # --- taking back ------------------------------------------------------------------

    def cancel_all(self, endpoint: Endpoint) -> None:
        """Cancel everything that is open on a connection."""
        for ask in list(endpoint.open):
            self._cancel_one(ask)

    def _cancel(self, endpoint: Endpoint, dice: Dice) -> None:
        ask = dice.pick(list(endpoint.open))
        if ask is not None:
            self._cancel_one(ask)

    def _cancel_one(self, ask: Ask) -> None:
        if ask.over:
            return
        self._world.note(ask.endpoint.name, "cancels", ask.kind.value)
        self.cancels += 1
        ask.cancelled = True
        ask.endpoint.core.cancel(ask.core)
        ask.endpoint.pump()
        demand(ask.over, "completion", "a cancelled request goes on")

    def _withdraw(self, endpoint: Endpoint, dice: Dice) -> None:
        ask = dice.pick([ask for ask in endpoint.open if ask.kind is RequestKind.RECV])
        if ask is None:
            return
        self._world.note(endpoint.name, "withdraws", ask.tag)
        ask.cancelled = True
        taken_back = endpoint.core.withdraw(ask.core)
        endpoint.pump()
        demand(ask.over == taken_back, "completion", "withdrawn, and goes on")
        ask.cancelled = taken_back

    def _storm(self, endpoint: Endpoint, dice: Dice) -> None:
        """Begin a lot and cancel all of it, now or a little later."""
        self._world.note(endpoint.name, Verb.STORM.value)
        for _ in range(2 + dice.below(10)):
            verb = _STORM[dice.below(len(_STORM))]
            self._deeds[verb](endpoint, Dice(dice.below(1 << 16) * 0x9E37_79B9))
        for ask in list(endpoint.open):
            if dice.one_in(2):
                self._cancel_one(ask)
            else:
                self._node.after(self._world.latency(), self._cancel_one, ask)
