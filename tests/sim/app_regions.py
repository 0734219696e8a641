"""Regions and grants of a simulated application, and what it does with others'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import ConnectionClosed, UsageError
from kvwire.proto.regions import RegionRecord
from kvwire.proto.state import RequestKind
from kvwire.types import Access
from kvwire.wire.control import AccessBody
from tests.sim.ask import Aim, Ask, Known, SimRegion
from tests.sim.content import content
from tests.sim.endpoint import Endpoint
from tests.sim.plan import Dice
from tests.sim.violation import demand

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

_REGIONS_MAX: Final = 4
_ACCESSES: Final = (Access.READWRITE, Access.READWRITE, Access.READ, Access.WRITE)
_DIRECTION: Final = {RequestKind.PUT: Access.WRITE, RequestKind.GET: Access.READ}
_WRONG_TOKEN: Final = b"\x5a" * 16


class RegionApp:
    """What an application does with memory that others may reach."""

    def __init__(self, world: World, node: Node) -> None:
        self._regions: list[SimRegion] = []
        self._world = world
        self._node = node

    # --- its own ----------------------------------------------------------------------

    def grant(self, endpoint: Endpoint, dice: Dice) -> None:
        """Let the peer reach a range of a region; it knows at once."""
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
            self._world.judge.truth.refused_as_closed(endpoint)
            return
        except UsageError:
            small = self._world.plan.setup.small_tables
            demand(small, "limit", "there is no room for a grant")
            return
        endpoint.pump()
        self._world.note(endpoint.name, "grants", row.id, begin, nbytes)
        if endpoint.peer is not None:
            endpoint.peer.grants.append(Known(endpoint.peer, region, row))

    def revoke(self, dice: Dice) -> None:
        """End every grant of a region, and keep the region."""
        region = dice.pick(self._regions)
        if region is not None:
            self._world.note(self._node.name, "revokes", region.core.id)
            self._node.regions.revoke(region.core)
            self._tell(region.core)

    def close_one(self, dice: Dice) -> None:
        """Close a region; its memory is used again once it has drained."""
        region = dice.pick(self._regions)
        if region is None:
            return
        self._regions.remove(region)
        self._world.note(self._node.name, "closes region", region.core.id)
        self._node.regions.close(region.core)
        self._tell(region.core)
        self._node.holds.retire(region.core.buffer)
        self._node.collect()

    def close_all(self) -> None:
        """Close every region."""
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
            endpoint.pump()

    def _region(self, endpoint: Endpoint, dice: Dice) -> SimRegion:
        if self._regions and (len(self._regions) >= _REGIONS_MAX or dice.below(3)):
            return self._regions[dice.below(len(self._regions))]
        nbytes = max(endpoint.size(dice), 64)
        access = _ACCESSES[dice.below(len(_ACCESSES))]
        buffer, lease = self._node.lend(
            nbytes,
            readable=bool(access & Access.READ),
            writable=bool(access & Access.WRITE),
        )
        self._node.memory.store(lease, 0, content(self._world.next_serial(), nbytes))
        core = self._node.regions.register(buffer, nbytes, access)
        self._regions.append(SimRegion(self._node, core, lease))
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
            data = content(serial, nbytes)
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
