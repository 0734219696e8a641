"""One simulated process: its memory, its clock, and what it has open.

A process that crashes takes everything with it. The one that starts in its place is
another node, with empty memory and a new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvwire.proto.holds import Holds
from kvwire.proto.regions import RegionTable
from kvwire.types import BufferId
from tests.programs.sim.memory import Lease, demand
from tests.support.core_pair.handshakes import identity

if TYPE_CHECKING:
    from tests.programs.sim.app import App
    from tests.programs.sim.endpoint import Endpoint
    from tests.programs.sim.world import World

# More than the error of adding and taking away how far a clock is ahead.
_ROUNDING_S = 1e-9


class Node:
    """One process.

    Attributes:
        index: Its place; whoever is started after a crash has the same.
        incarnation: How many were in this place before it.
        holds, regions: Shared by its connections, as in a communicator.
        leases: All the memory that links could ever touch.
        stalled_until: It does nothing before; what is due happens then.
        was_late: Its clock or loop has been late, so that it may be late in its turn.
    """

    app: App

    def __init__(self, world: World, index: int, incarnation: int) -> None:
        self.index = index
        self.name = f"{'ABC'[index]}{incarnation}"
        self.leases: list[Lease] = []
        self.holds = Holds()
        self.regions = RegionTable()
        self.endpoints: list[Endpoint] = []
        self.dead = False
        self.stalled_until = 0.0
        self.timers_late_until = 0.0
        self.was_late = False
        self.jumps = 0
        self.incarnation = incarnation
        setup = world.plan.setup
        self.identity = identity(
            self.name, trust=setup.trust, parameters=setup.parameters[index]
        )
        self._world = world
        self._clock_ahead_s = 0.0
        self._leases: dict[BufferId, Lease] = {}
        self._shares: dict[BufferId, Callable[[], None]] = {}

    # --- time -------------------------------------------------------------------------

    @property
    def clock(self) -> float:
        """What its own clock says."""
        return self._world.now + self._clock_ahead_s

    def to_world(self, clock: float) -> float:
        """When its clock will certainly say so."""
        return clock - self._clock_ahead_s + _ROUNDING_S

    def jump(self, seconds: float) -> None:
        """Its clock goes on from a later time; the machine was suspended, say."""
        self.jumps += 1
        self._clock_ahead_s += seconds
        for endpoint in self.endpoints:
            endpoint.set_timer()

    def after(
        self, delay_s: float, call: Callable[..., None], *arguments: object
    ) -> None:
        """Call later, unless the process has crashed; not while it is stalled."""
        self.at(self._world.now + delay_s, call, *arguments)

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        """Likewise, at a time of the world."""
        self._world.at(when, self._call, call, arguments)

    def _call(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self.dead:
            return
        if self.stalled_until > self._world.now:
            self._world.at(self.stalled_until, self._call, call, arguments)
            return
        call(*arguments)

    # --- memory -----------------------------------------------------------------------

    def memory(
        self, nbytes: int, *, readable: bool = False, writable: bool = False
    ) -> Lease:
        """Memory that links may touch as said, until it is over."""
        self.leases.append(Lease(nbytes, readable=readable, writable=writable))
        return self.leases[-1]

    def lend(
        self, nbytes: int, *, readable: bool = False, writable: bool = False
    ) -> tuple[BufferId, Lease]:
        """Lend memory to the core, under a number."""
        buffer = self.holds.new()
        lease = self.memory(nbytes, readable=readable, writable=writable)
        self._leases[buffer] = lease
        return buffer, lease

    def share(
        self, lease: Lease, offset: int, nbytes: int, drained: Callable[[], None]
    ) -> BufferId:
        """Lend the core a part of memory that stays; it is called when it drains."""
        buffer = self.holds.new()
        self._leases[buffer] = lease.part(offset, nbytes)
        self._shares[buffer] = drained
        return buffer

    def lease(self, buffer: BufferId) -> Lease:
        """The memory behind a number."""
        lease = self._leases.get(buffer)
        demand(lease, "drained", f"buffer {buffer} is used after it has drained")
        assert lease is not None
        return lease

    def collect(self) -> None:
        """Take back what has drained."""
        for buffer in self.holds.drained:
            self.drained(buffer)
        self.holds.drained.clear()

    def drained(self, buffer: BufferId) -> None:
        """From now on nobody may touch this memory."""
        lease = self._leases.pop(buffer, None)
        drained = self._shares.pop(buffer, None)
        if drained is not None:
            drained()
        elif lease is not None:
            lease.free()

    @property
    def lent(self) -> list[BufferId]:
        """Buffers that have not drained."""
        return list(self._leases)

    # --- faults -----------------------------------------------------------------------

    def crash(self) -> None:
        """Stop at once; peers may or may not be told."""
        self.dead = True
        for endpoint in self.endpoints:
            endpoint.vanish()
