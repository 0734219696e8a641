"""A simulated application: carries out the steps of a plan that are its own.

It is honest about memory: it never touches what it has lent before it has drained, and
then gives it to somebody else at once. About the rest it is careless: it names grants
that it does not have, cancels what it has begun, and closes while things move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from kvwire.errors import ConnectionClosed, ConnectionLost, UsageError
from kvwire.limits import EAGER_BYTES_MAX
from kvwire.proto.events import MemoryWanted
from kvwire.proto.requests import Request
from kvwire.proto.state import Kind, State
from kvwire.testing.sim.ask import DIRECTION, Aim, Ask, Known, Message, SimRegion
from kvwire.testing.sim.content import content
from kvwire.testing.sim.endpoint import Endpoint
from kvwire.testing.sim.kv import KVApp
from kvwire.testing.sim.net import Frame
from kvwire.testing.sim.plan import Dice, Step, Verb
from kvwire.testing.sim.violation import demand
from kvwire.types import Access, BufferId
from kvwire.wire.control import Access as AccessBody

if TYPE_CHECKING:
    from kvwire.testing.sim.node import Node
    from kvwire.testing.sim.world import World

T = TypeVar("T")
_TAGS: Final = (7, 2**64 - 1)
_REGIONS_MAX: Final = 4
_ACCESSES: Final = (Access.READWRITE, Access.READWRITE, Access.READ, Access.WRITE)
_STORM: Final = (Verb.SEND, Verb.RECV, Verb.PUT, Verb.GET, Verb.OPEN)
_WRONG_TOKEN: Final = b"\x5a" * 16


class App:
    """The application of one node.

    Attributes:
        cancels: How often it has cancelled something.
        regions: Memory it has registered and not closed.
        kv: Its KV transfers.
    """

    def __init__(self, world: World, node: Node) -> None:
        self.cancels = 0
        self.regions: list[SimRegion] = []
        self.kv = KVApp(world, node)
        self._world = world
        self._node = node

    def act(self, step: Step) -> None:
        """Carry out a step."""
        dice = Dice(step.dice)
        if step.verb is Verb.REVOKE:
            self._revoke(dice)
        elif step.verb is Verb.CLOSE_REGION:
            self._close_region(dice)
        elif endpoint := self._pick_endpoint(dice):
            self._act_on(endpoint, step.verb, dice)

    def provide(self, endpoint: Endpoint, event: MemoryWanted) -> None:
        """Give a receive the memory it wants."""
        ask = event.request.context
        assert isinstance(ask, Ask)
        buffer, lease = self._node.lend(event.nbytes, writable=True)
        if not ask.over:
            ask.buffer, ask.lease = buffer, lease
        endpoint.core.provide(event.request, buffer)

    def take_messages(self, endpoint: Endpoint) -> None:
        """Receive whatever is there, without waiting for more."""
        for tag in _TAGS:
            while endpoint.ended is not None and self._receive(endpoint, tag, None, 0):
                pass

    def close(self, endpoint: Endpoint) -> None:
        """Close a connection gracefully."""
        self._world.note(endpoint.name, "closes")
        endpoint.closing = True
        endpoint.core.close(self._node.clock, self._world.plan.setup.close_timeout_s)
        endpoint.pump()
        endpoint.set_timer()
        for ask in endpoint.open:
            unmet = ask.kind is Kind.RECV and ask.core.wire_id is None
            demand(
                not unmet or ask.core.state is not State.POSTED,
                "close",
                "closing does not wake who waits for a message",
            )

    def commit_all(self) -> None:
        """Mark nothing more of any transfer."""
        for endpoint in self._node.endpoints:
            self.kv.commit_all(endpoint)

    def close_all(self) -> None:
        """Close every connection, then every region."""
        for endpoint in self._node.endpoints:
            if endpoint.ended is None:
                self.close(endpoint)
        self.close_regions()

    def close_regions(self) -> None:
        """Close every region."""
        while self.regions:
            self._close_region(Dice(0))

    def cancel_all(self, endpoint: Endpoint) -> None:
        """Cancel everything that is open on a connection."""
        for ask in list(endpoint.open):
            self._cancel_late(ask)

    def receive_all(self, endpoint: Endpoint) -> None:
        """Wait for a message of each tag."""
        for tag in _TAGS:
            self._receive(endpoint, tag, None, 0)

    def _act_on(self, endpoint: Endpoint, verb: Verb, dice: Dice) -> None:
        match verb:
            case Verb.SEND:
                self._send(endpoint, dice)
            case Verb.RECV:
                self._recv(endpoint, dice)
            case Verb.GRANT:
                self._grant(endpoint, dice)
            case Verb.PUT:
                self._one_sided(endpoint, Kind.PUT, dice)
            case Verb.GET:
                self._one_sided(endpoint, Kind.GET, dice)
            case Verb.OPEN:
                self.kv.open(endpoint, self._deadline(dice), dice)
            case Verb.MARK:
                self.kv.mark(endpoint, dice, _sizes(endpoint))
            case Verb.COMMIT:
                self.kv.commit(endpoint, dice)
            case Verb.CANCEL:
                self._cancel(endpoint, dice)
            case Verb.WITHDRAW:
                self._withdraw(endpoint, dice)
            case Verb.CLOSE:
                self.close(endpoint)
            case Verb.ABORT:
                self.abort(endpoint)
            case _:
                self._storm(endpoint, dice)

    # --- messages ---------------------------------------------------------------------

    def _send(self, endpoint: Endpoint, dice: Dice) -> None:
        world, core = self._world, endpoint.core
        nbytes, tag = self._size(endpoint, dice), _pick_tag(dice)
        box = endpoint.end.out.mailbox(tag)
        message = Message(world.next_serial(), tag, len(box.messages), nbytes)
        data = content(message.serial, nbytes)
        check = 0 if world.plan.setup.checked else None
        header = None
        try:
            if nbytes <= EAGER_BYTES_MAX:
                header = core.eager_header(tag, nbytes, check)
        except ConnectionClosed:
            self._world.judge.refused_as_closed(endpoint)
            return
        if header is not None:
            world.note(endpoint.name, "sends", tag, nbytes)
            box.messages.append(message)
            world.judge.eager_sent(message)
            endpoint.end.send(Frame(header, data, serial=message.serial))
            return
        ask = Ask(
            endpoint,
            Kind.SEND,
            nbytes,
            serial=message.serial,
            tag=tag,
            deadline=self._deadline(dice),
        )
        ask.message = message
        if self._start(
            ask, lambda lent: core.send(tag, lent, nbytes, ask.deadline), data
        ):
            box.messages.append(message)

    def _recv(self, endpoint: Endpoint, dice: Dice) -> None:
        tag = _pick_tag(dice)
        deadline = self._deadline(dice)
        with_buffer = dice.below(3) > 0
        # One in four is likely to be too small.
        nbytes = self._size(endpoint, dice)
        if not dice.one_in(4):
            nbytes = max(nbytes, _longest(endpoint))
        self._receive(endpoint, tag, deadline, nbytes, with_buffer=with_buffer)

    def _receive(
        self,
        endpoint: Endpoint,
        tag: int,
        deadline: float | None,
        nbytes: int,
        *,
        with_buffer: bool = False,
    ) -> bool:
        core = endpoint.core
        box = endpoint.end.into.mailbox(tag)
        nbytes = nbytes or _longest(endpoint)
        ask = Ask(
            endpoint,
            Kind.RECV,
            nbytes,
            tag=tag,
            place=box.receives,
            deadline=deadline,
        )
        room = b"\xee" * nbytes if with_buffer else None
        started = self._start(
            ask, lambda lent: core.recv(tag, lent, nbytes, deadline), room
        )
        box.receives += started
        return started

    # --- one-sided --------------------------------------------------------------------

    def _grant(self, endpoint: Endpoint, dice: Dice) -> None:
        region = self._region(endpoint, dice)
        begin = dice.below(region.core.nbytes)
        nbytes = 1 + dice.below(region.core.nbytes - begin)
        if dice.one_in(2):
            begin, nbytes = 0, region.core.nbytes
        access = Access.READ if dice.one_in(4) else region.core.access
        if access & ~region.core.access:
            access = region.core.access
        try:
            row = endpoint.core.grant(region.core, begin, nbytes, access)
        except ConnectionClosed:
            self._world.judge.refused_as_closed(endpoint)
            return
        except UsageError:
            demand(self._world.plan.setup.small_tables, "limit", "no room for a grant")
            return
        endpoint.pump()
        self._world.note(endpoint.name, "grants", row.id, begin, nbytes)
        if endpoint.peer is not None:
            endpoint.peer.grants.append(Known(endpoint.peer, region, row))

    def _region(self, endpoint: Endpoint, dice: Dice) -> SimRegion:
        if self.regions and (len(self.regions) >= _REGIONS_MAX or dice.below(3)):
            return self.regions[dice.below(len(self.regions))]
        nbytes = max(self._size(endpoint, dice), 64)
        access = _ACCESSES[dice.below(len(_ACCESSES))]
        buffer, lease = self._node.lend(
            nbytes,
            readable=bool(access & Access.READ),
            writable=bool(access & Access.WRITE),
        )
        self._node.memory.store(lease, 0, content(self._world.next_serial(), nbytes))
        core = self._node.regions.register(buffer, nbytes, access)
        self.regions.append(SimRegion(self._node, core, lease))
        return self.regions[-1]

    def _one_sided(self, endpoint: Endpoint, kind: Kind, dice: Dice) -> None:
        known = self._pick_grant(endpoint, dice)
        if known is None:
            return
        if not DIRECTION[kind] & known.row.access and dice.below(6):
            kind = Kind.GET if kind is Kind.PUT else Kind.PUT
        body, wrong = _access_body(endpoint, known, kind, dice)
        nbytes, row = body.nbytes, known.row
        ask = Ask(
            endpoint,
            kind,
            nbytes,
            serial=self._world.next_serial(),
            deadline=self._deadline(dice),
        )
        ask.aim = Aim(known.region, row.generation, row.offset + body.offset, wrong)
        ask.read = bytearray(nbytes if kind is Kind.GET else 0)
        core = endpoint.core
        begin = core.put if kind is Kind.PUT else core.get
        data = content(ask.serial, nbytes) if kind is Kind.PUT else b"\xee" * nbytes
        self._start(ask, lambda lent: begin(lent, nbytes, body, ask.deadline), data)

    def _revoke(self, dice: Dice) -> None:
        if not self.regions:
            return
        region = self.regions[dice.below(len(self.regions))].core
        self._world.note(self._node.name, "revokes", region.id)
        self._node.regions.revoke(region)
        for endpoint in self._node.endpoints:
            endpoint.core.region_revoked(region.id)
            endpoint.pump()

    def _close_region(self, dice: Dice) -> None:
        if not self.regions:
            return
        region = self.regions.pop(dice.below(len(self.regions))).core
        self._world.note(self._node.name, "closes region", region.id)
        self._node.regions.close(region)
        for endpoint in self._node.endpoints:
            endpoint.core.region_revoked(region.id)
            endpoint.pump()
        self._node.holds.retire(region.buffer)
        self._node.collect()

    # --- taking back ------------------------------------------------------------------

    def _cancel(self, endpoint: Endpoint, dice: Dice) -> None:
        if endpoint.open:
            asks = list(endpoint.open)
            self._cancel_one(asks[dice.below(len(asks))])

    def _cancel_one(self, ask: Ask) -> None:
        self._world.note(ask.endpoint.name, "cancels", ask.kind.value)
        self.cancels += 1
        ask.cancelled = True
        ask.endpoint.core.cancel(ask.core)
        ask.endpoint.pump()
        demand(ask.over, "completion", "a cancelled request goes on")

    def _withdraw(self, endpoint: Endpoint, dice: Dice) -> None:
        asks = [ask for ask in endpoint.open if ask.kind is Kind.RECV]
        if not asks:
            return
        ask = asks[dice.below(len(asks))]
        self._world.note(endpoint.name, "withdraws", ask.tag)
        ask.cancelled = True
        taken_back = endpoint.core.withdraw(ask.core)
        endpoint.pump()
        demand(ask.over == taken_back, "completion", "withdrawn, and goes on")
        ask.cancelled = taken_back

    def _storm(self, endpoint: Endpoint, dice: Dice) -> None:
        """Begin a lot and cancel all of it, now or a little later."""
        for _ in range(2 + dice.below(10)):
            verb = _STORM[dice.below(len(_STORM))]
            self._act_on(endpoint, verb, Dice(dice.below(1 << 16) * 0x9E37_79B9))
        for ask in list(endpoint.open):
            if dice.one_in(2):
                self._cancel_one(ask)
            else:
                self._node.after(self._world.latency(), self._cancel_late, ask)

    def _cancel_late(self, ask: Ask) -> None:
        if not ask.over:
            self._cancel_one(ask)

    def abort(self, endpoint: Endpoint) -> None:
        """End a connection now."""
        self._world.note(endpoint.name, "aborts")
        endpoint.core.fail(ConnectionLost("aborted by this side"))
        endpoint.pump()
        endpoint.end.abort()

    # --- inside -----------------------------------------------------------------------

    def _start(
        self,
        ask: Ask,
        begin: Callable[[BufferId], Request] | Callable[[BufferId | None], Request],
        data: bytes | None,
    ) -> bool:
        """Lend memory to a request and start it; False if the core would not."""
        node, endpoint = self._node, ask.endpoint
        buffer = None
        if data is not None:
            receives = ask.kind in (Kind.RECV, Kind.GET)
            buffer, ask.lease = node.lend(
                ask.nbytes, readable=not receives, writable=receives
            )
            node.memory.store(ask.lease, 0, data)
            ask.buffer = buffer
        try:
            ask.core = begin(buffer)  # type: ignore[arg-type]
        except (ConnectionClosed, UsageError) as exc:
            self._world.judge.refused(ask, exc)
            if buffer is not None:
                node.holds.retire(buffer)
                node.collect()
            return False
        self._world.note(endpoint.name, ask.kind.value, ask.tag, ask.nbytes)
        ask.core.context = ask
        endpoint.open[ask] = None
        if ask.core.wire_id is not None and ask.kind is not Kind.RECV:
            endpoint.asks[ask.core.wire_id] = ask
        endpoint.pump()
        endpoint.set_timer()
        demand(
            ask.over or endpoint.ended is None,
            "completion",
            "a request waits on a closed connection",
        )
        return True

    def _pick_endpoint(self, dice: Dice) -> Endpoint | None:
        every = self._node.endpoints
        usable = [endpoint for endpoint in every if endpoint.ended is None]
        # Now and then one that has ended: it has to say so.
        return _pick(every if dice.one_in(8) else usable, dice)

    def _pick_grant(self, endpoint: Endpoint, dice: Dice) -> Known | None:
        others = [
            known
            for other in self._world.endpoints
            if other is not endpoint
            for known in other.grants
        ]
        return _pick(others if dice.one_in(12) and others else endpoint.grants, dice)

    def _deadline(self, dice: Dice) -> float | None:
        share = self._world.plan.setup.deadlines
        if dice.share() >= share:
            return None
        longest_s = self._world.plan.setup.latency_s[1]
        after_s = (0.0, longest_s, 4 * longest_s, 0.3, 2.0)[dice.below(5)]
        return self._node.clock + after_s

    def _size(self, endpoint: Endpoint, dice: Dice) -> int:
        sizes = _sizes(endpoint)
        return sizes[dice.below(len(sizes))]


def _longest(endpoint: Endpoint) -> int:
    """No message is longer."""
    terms = endpoint.core.agreement.terms
    return max(5 * terms.chunk_bytes, terms.eager_bytes + 1)


def _sizes(endpoint: Endpoint) -> tuple[int, ...]:
    """Sizes around every border there is."""
    terms = endpoint.core.agreement.terms
    chunk, eager = terms.chunk_bytes, terms.eager_bytes
    return (
        *(0, 1, 63, 64, 65, eager, eager + 1, chunk - 1, chunk, chunk + 1),
        *(2 * chunk, 3 * chunk + 17, 5 * chunk),
    )


def _pick_tag(dice: Dice) -> int:
    return _TAGS[dice.one_in(3)]


def _pick(choices: Sequence[T], dice: Dice) -> T | None:
    return choices[dice.below(len(choices))] if choices else None


def _access_body(
    endpoint: Endpoint, known: Known, kind: Kind, dice: Dice
) -> tuple[AccessBody, str]:
    """What to ask for with a grant, and what is wrong with it, if anything."""
    row = known.row
    offset = dice.below(row.nbytes)
    nbytes = 1 + dice.below(row.nbytes - offset)
    if dice.one_in(2):
        offset, nbytes = 0, row.nbytes
    grant, token = int(row.id), row.token
    wrong = "" if known.holder is endpoint else "foreign"
    direction = "" if DIRECTION[kind] & row.access else "misdirected"
    match dice.below(24):
        case 0:
            beyond = (1, 1, 64)[dice.below(3)]
            offset, wrong = row.nbytes - nbytes + beyond, wrong or "range"
        case 1:
            offset, wrong = 2**32 - nbytes // 2, wrong or "range"
        case 2:
            token, wrong = _WRONG_TOKEN, wrong or "wrong token"
        case 3:
            grant, wrong = grant + 1000, wrong or "unknown"
        case _:
            pass
    body = AccessBody(grant, row.generation, token, offset, nbytes)
    return body, wrong or direction
