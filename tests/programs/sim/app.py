"""A simulated application: carries out the steps of a plan that are its own.

It is honest about memory: it never touches what it has lent before it has drained, and
then gives it to somebody else at once. About the rest it is careless: it names grants
that it does not have, cancels what it has begun, and closes while things move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConnectionClosed, ConnectionLost, UsageError
from kvwire.limits import EAGER_BYTES_MAX
from kvwire.proto.events import MemoryWanted
from kvwire.proto.records import RequestRecord
from kvwire.proto.regions import RegionRecord
from kvwire.proto.state import RequestKind, RequestStage
from kvwire.types import Access, BufferId
from kvwire.wire.control import AccessBody
from tests.programs.sim.app_kv import KVApp
from tests.programs.sim.app_windows import WindowApp
from tests.programs.sim.ask import Aim, Ask, Known, Message
from tests.programs.sim.endpoint import Endpoint
from tests.programs.sim.memory import content, demand
from tests.programs.sim.net import Frame
from tests.programs.sim.plan import Dice, Step, Verb

if TYPE_CHECKING:
    from tests.programs.sim.node import Node
    from tests.programs.sim.world import World


# A small one, and one that needs all 64 bits.
_TAGS: Final = (7, 2**64 - 1)


class MessageApp:
    """What an application does with messages."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    def send(self, endpoint: Endpoint, dice: Dice) -> None:
        """Send a message: at once if small and there is credit, else announced."""
        world, core = self._world, endpoint.core
        nbytes, tag = endpoint.size(dice), _tag(dice)
        box = endpoint.end.out.mailbox(tag)
        message = Message(world.next_serial(), tag, len(box.messages), nbytes)
        data = content(nbytes, message.serial)
        header = None
        if nbytes <= EAGER_BYTES_MAX:
            check = 0 if world.plan.setup.checked else None
            header = core.eager_header(tag, nbytes, check)
        if header is not None:
            world.note(endpoint.name, "sends", tag, nbytes)
            box.messages.append(message)
            world.judge.eager_sent(message)
            endpoint.end.send(Frame(header, data, serial=message.serial))
            return
        deadline = endpoint.deadline(dice)
        ask = Ask(
            endpoint,
            RequestKind.SEND,
            nbytes,
            serial=message.serial,
            tag=tag,
            deadline=deadline,
        )
        ask.message = message
        app = self._node.app
        if app.start(ask, lambda lent: core.send(tag, lent, nbytes, deadline), data):
            box.messages.append(message)

    def recv(self, endpoint: Endpoint, dice: Dice) -> None:
        """Wait for a message, with memory or without, now and then too little."""
        tag, deadline = _tag(dice), endpoint.deadline(dice)
        with_buffer = dice.below(3) > 0
        nbytes = endpoint.size(dice)
        if not dice.one_in(4):
            nbytes = max(nbytes, endpoint.longest)
        self._receive(
            endpoint,
            tag,
            deadline,
            nbytes,
            with_buffer=with_buffer,
            stays=not with_buffer,
        )

    def receive_all(self, endpoint: Endpoint) -> None:
        """Wait for a message of each tag."""
        for tag in _TAGS:
            self._receive(endpoint, tag, None, endpoint.longest)

    def take_what_is_there(self, endpoint: Endpoint) -> None:
        """Receive all that a connection which has ended has received."""
        for tag in _TAGS:
            while self._receive(endpoint, tag, None, endpoint.longest):
                pass

    def provide(self, endpoint: Endpoint, event: MemoryWanted) -> None:
        """Give a receive the memory it wants."""
        ask = event.request.context
        assert isinstance(ask, Ask)
        buffer, lease = self._node.lend(event.nbytes, writable=True)
        if not ask.over:
            ask.buffer, ask.lease = buffer, lease
        endpoint.core.messages.provide(event.request, buffer)

    def _receive(
        self,
        endpoint: Endpoint,
        tag: int,
        deadline: float | None,
        nbytes: int,
        *,
        with_buffer: bool = False,
        stays: bool = False,
    ) -> bool:
        core, box = endpoint.core, endpoint.end.into.mailbox(tag)
        ask = Ask(
            endpoint,
            RequestKind.RECV,
            nbytes,
            tag=tag,
            place=box.receives,
            deadline=deadline,
        )
        started = self._node.app.start(
            ask,
            lambda lent: core.recv(tag, lent, nbytes, deadline, stays=stays),
            b"\xee" * nbytes if with_buffer else None,
        )
        box.receives += started
        return started


def _tag(dice: Dice) -> int:
    return _TAGS[dice.one_in(3)]


_REGIONS_MAX: Final = 4
_ACCESSES: Final = (Access.READWRITE, Access.READWRITE, Access.READ, Access.WRITE)
_DIRECTION: Final = {RequestKind.PUT: Access.WRITE, RequestKind.GET: Access.READ}
_WRONG_TOKEN: Final = b"\x5a" * 16


class RegionApp:
    """What an application does with memory that others may reach."""

    def __init__(self, world: World, node: Node) -> None:
        self._regions: list[RegionRecord] = []
        self._world = world
        self._node = node

    # --- its own ----------------------------------------------------------------------

    def grant(self, endpoint: Endpoint, dice: Dice) -> None:
        """Let the peer reach a range of a region; it knows at once."""
        region = self._region(endpoint, dice)
        begin = dice.below(region.nbytes)
        nbytes = 1 + dice.below(region.nbytes - begin)
        if dice.one_in(2):
            begin, nbytes = 0, region.nbytes
        access = Access.READ if dice.one_in(4) else region.access
        if access & ~region.access:
            access = region.access
        try:
            row = endpoint.core.grant(region, begin, nbytes, access)
        except ConnectionClosed:
            self._world.judge.truth.refused_as_closed(endpoint)
            return
        except UsageError:
            small = self._world.plan.setup.small_tables
            demand(small, "limit", "there is no room for a grant")
            return
        endpoint.collect()
        self._world.note(endpoint.name, "grants", row.id, begin, nbytes)
        if endpoint.peer is not None:
            endpoint.peer.grants.append(Known(endpoint.peer, region, row))

    def revoke(self, dice: Dice) -> None:
        """End every grant of a region, and keep the region."""
        region = dice.pick(self._regions)
        if region is not None:
            self._world.note(self._node.name, "revokes", region.id)
            self._node.regions.revoke(region)
            self._tell(region)

    def close_one(self, dice: Dice) -> None:
        """Close a region; its memory is used again once it has drained."""
        region = dice.pick(self._regions)
        if region is None:
            return
        self._regions.remove(region)
        self._world.note(self._node.name, "closes region", region.id)
        self._node.regions.close(region)
        self._tell(region)
        self._node.holds.retire(region.buffer)
        self._node.collect()

    def close_all(self) -> None:
        while self._regions:
            self.close_one(Dice(0))

    # --- those of others --------------------------------------------------------------

    def put(self, endpoint: Endpoint, dice: Dice) -> None:
        """Write into memory of the peer; not always where it may."""
        self._reach(endpoint, RequestKind.PUT, dice)

    def get(self, endpoint: Endpoint, dice: Dice) -> None:
        """Read memory of the peer; not always where it may."""
        self._reach(endpoint, RequestKind.GET, dice)

    # --- inside -----------------------------------------------------------------------

    def _tell(self, region: RegionRecord) -> None:
        for endpoint in self._node.endpoints:
            endpoint.core.region_revoked(region.id)
            endpoint.collect()

    def _region(self, endpoint: Endpoint, dice: Dice) -> RegionRecord:
        if self._regions and (len(self._regions) >= _REGIONS_MAX or dice.below(3)):
            return self._regions[dice.below(len(self._regions))]
        nbytes = max(endpoint.size(dice), 64)
        access = _ACCESSES[dice.below(len(_ACCESSES))]
        buffer, lease = self._node.lend(
            nbytes,
            readable=bool(access & Access.READ),
            writable=bool(access & Access.WRITE),
        )
        lease.store(0, content(nbytes, self._world.next_serial()))
        self._regions.append(self._node.regions.register(buffer, nbytes, access))
        return self._regions[-1]

    def _reach(self, endpoint: Endpoint, kind: RequestKind, dice: Dice) -> None:
        known = self._pick_grant(endpoint, dice)
        if known is None:
            return
        if not _DIRECTION[kind] & known.row.access and dice.below(6):
            kind = RequestKind.GET if kind is RequestKind.PUT else RequestKind.PUT
        body, wrong = _access_body(endpoint, known, kind, dice)
        nbytes, row, deadline = body.nbytes, known.row, endpoint.deadline(dice)
        serial = self._world.next_serial()
        ask = Ask(endpoint, kind, nbytes, serial=serial, deadline=deadline)
        ask.aim = Aim(known.region, row.generation, row.offset + body.offset, wrong)
        core, start = endpoint.core, self._node.app.start
        if kind is RequestKind.PUT:
            data = content(nbytes, serial)
            start(ask, lambda lent: core.put(lent, nbytes, body, deadline), data)
        else:
            ask.read = bytearray(nbytes)
            data = b"\xee" * nbytes
            start(ask, lambda lent: core.get(lent, nbytes, body, deadline), data)

    def _pick_grant(self, endpoint: Endpoint, dice: Dice) -> Known | None:
        if dice.one_in(12):
            others = [
                known
                for other in self._world.endpoints
                if other is not endpoint
                for known in other.grants
            ]
            if others:
                return dice.pick(others)
        return dice.pick(endpoint.grants)


def _access_body(
    endpoint: Endpoint, known: Known, kind: RequestKind, dice: Dice
) -> tuple[AccessBody, str]:
    """What to ask for with a grant, and what is wrong with it, if anything."""
    row = known.row
    offset = dice.below(row.nbytes)
    nbytes = 1 + dice.below(row.nbytes - offset)
    if dice.one_in(2):
        offset, nbytes = 0, row.nbytes
    grant, token = int(row.id), row.token
    wrong = "" if known.holder is endpoint else "foreign"
    direction = "" if _DIRECTION[kind] & row.access else "misdirected"
    match dice.below(24):
        case 0:
            offset = row.nbytes - nbytes + (1, 1, 64)[dice.below(3)]
            wrong = wrong or "range"
        case 1:
            # Whoever adds offset and length in 32 bits gets a small number.
            offset, wrong = 2**32 - nbytes // 2, wrong or "range"
        case 2:
            token, wrong = _WRONG_TOKEN, wrong or "wrong token"
        case 3:
            grant, wrong = grant + 1000, wrong or "unknown"
        case _:
            pass
    body = AccessBody(grant, row.generation, token, offset, nbytes)
    return body, wrong or direction


_RECEIVES: Final = (RequestKind.RECV, RequestKind.GET, RequestKind.READ)
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
        self.windows = WindowApp(world, node)
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
            Verb.EXPOSE: self.windows.expose,
            Verb.OPEN_WINDOW: self.windows.open,
            Verb.GET_BLOCKS: self.windows.get,
            Verb.CLOSE_READER: self.windows.close,
            Verb.CANCEL: self._cancel,
            Verb.WITHDRAW: self._withdraw,
            Verb.STORM: self._storm,
            Verb.CLOSE: lambda endpoint, _: self.close(endpoint),
            Verb.ABORT: lambda endpoint, _: self.abort(endpoint),
        }

    def act(self, step: Step) -> None:
        dice = Dice(step.dice)
        if step.verb is Verb.REVOKE:
            self.regions.revoke(dice)
        elif step.verb is Verb.CLOSE_REGION:
            self.regions.close_one(dice)
        elif step.verb is Verb.RENEW:
            self.windows.renew(dice)
        elif step.verb is Verb.CLOSE_WINDOW:
            self.windows.close_one(dice)
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
            receives = ask.kind in _RECEIVES
            buffer, ask.lease = node.lend(
                ask.nbytes, readable=not receives, writable=receives
            )
            ask.lease.store(0, data)
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
        self._world.note(endpoint.name, "closes")
        endpoint.closing = True
        endpoint.core.close(self._node.clock, self._world.plan.setup.close_timeout_s)
        endpoint.collect()
        endpoint.set_timer()
        for ask in endpoint.open:
            unmet = ask.kind is RequestKind.RECV and not ask.core.wire_id
            demand(
                not unmet or ask.core.state is not RequestStage.POSTED,
                "close",
                "closing does not wake who waits for a message",
            )

    def abort(self, endpoint: Endpoint) -> None:
        self._world.note(endpoint.name, "aborts")
        endpoint.core.fail(ConnectionLost("aborted by this side"))
        endpoint.collect()
        endpoint.end.abort()

    def close_all(self) -> None:
        """Close every connection, then every region and window."""
        for endpoint in self._node.endpoints:
            if endpoint.ended is None:
                self.close(endpoint)
        self.regions.close_all()
        self.windows.close_all()

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
        ask.endpoint.collect()
        demand(ask.over, "completion", "a cancelled request goes on")

    def _withdraw(self, endpoint: Endpoint, dice: Dice) -> None:
        ask = dice.pick([ask for ask in endpoint.open if ask.kind is RequestKind.RECV])
        if ask is None:
            return
        self._world.note(endpoint.name, "withdraws", ask.tag)
        ask.cancelled = True
        taken_back = endpoint.core.withdraw(ask.core)
        endpoint.collect()
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
