"""Virtual time: what happens next, until nothing is left to happen.

Each step jumps to the earliest of frame, completion, timer and application action.
There is no loop, no thread and no clock: a plan always gives the same schedule.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any, Final

from kvwire_certify.oracle import Wrong
from tests.programs.sim import inside
from tests.programs.sim.app import App
from tests.programs.sim.beside import Fate
from tests.programs.sim.endpoint import Endpoint, Opening
from tests.programs.sim.faults import Faults
from tests.programs.sim.judge import Judge
from tests.programs.sim.memory import demand
from tests.programs.sim.net import Wire
from tests.programs.sim.node import Node
from tests.programs.sim.plan import FAULTS, Dice, Plan, Step, Verb
from tests.programs.sim.scale import scaled
from tests.support.core_pair.handshakes import begin

# After the faults are over, everything has to come to its end within this time.
LIVENESS_S: Final = 60.0
_WIRES_MAX: Final = 5
# A hundred times what a seed takes.
_EVENTS_MAX: Final = 50_000
_FOREVER: Final = float("inf")


class World:
    """All processes and wires of one seed.

    Attributes:
        trace: (time, who, what, ...) of everything that was done.
        endpoints: Every side of a connection there has been.
        keeps_history: Lanes have to remember what they have sent.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.trace: list[tuple[object, ...]] = []
        self.nodes: list[Node] = []
        self.wires: list[Wire] = []
        self.endpoints: list[Endpoint] = []
        self.judge = Judge(self)
        self.fate = Fate(plan)
        self.calm = False
        self.keeps_history = plan.has(Verb.REFLECT)
        self._closing = False
        self._faults = Faults(self)
        self._rng = random.Random(plan.seed ^ 0x5EED)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._played = 0
        self._serial = 0
        for index in range(plan.setup.nodes):
            self.nodes.append(self.start_node(index, 0))

    def run(self) -> None:
        """Play the plan, then let everything come to its end."""
        with scaled(small_tables=self.plan.setup.small_tables):
            self._run()

    def _run(self) -> None:
        for step in self.plan.steps:
            self.at(step.at, self._act, step)
        self.at(self.plan.end, self._faults.end)
        self.at(self.plan.end, self._commit_all)
        self.at(self.plan.end + 1.0, self._close_all)
        self._play(self.plan.end + LIVENESS_S)
        for _, _, call, arguments in self._queue:
            what = f"{call.__qualname__}{arguments}"
            raise Wrong("liveness", f"something goes on a minute later: {what}")
        self._settle()

    def digest(self) -> str:
        """Names the schedule: equal for equal plans, in any process."""
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()[:16]

    # --- time -------------------------------------------------------------------------

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at a time; never, if that is infinity."""
        if when != _FOREVER:
            self._count += 1
            heapq.heappush(self._queue, (when, self._count, call, arguments))

    def note(self, who: str, what: str, *details: object) -> None:
        """Write a line of the trace."""
        self.trace.append((self.now, who, what, *details))

    def _play(self, until: float) -> None:
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, call, arguments = pop(queue)
            call(*arguments)
            self._played += 1
            demand(self._played < _EVENTS_MAX, "liveness", "it turns in a circle")

    # --- chance -----------------------------------------------------------------------

    def latency(self) -> float:
        """How long a frame is under way."""
        low, high = self.plan.setup.latency_s
        return low + (high - low) * self._rng.random()

    def completion_delay_s(self) -> float | None:
        """How long after its delivery a frame is reported as sent; None for never."""
        setup, rng = self.plan.setup, self._rng
        if setup.stuck and rng.random() < setup.stuck:
            return None
        if setup.late and rng.random() < setup.late:
            return rng.random()
        return 0.0

    def pause_s(self) -> float:
        """How long the second half of a payload keeps its receiver waiting."""
        gap = self.plan.setup.gap
        if gap and self._rng.random() < gap:
            return 4 * self.latency()
        return 0.0

    def lateness_s(self) -> float:
        """How late a timer fires when timers are late."""
        return 2 * self._rng.random()

    def afterthought_s(self) -> float:
        """How long an application takes to do its part; 0 for at once."""
        slow = self.plan.setup.slow
        return 5 * self.latency() if slow and self._rng.random() < slow else 0.0

    def whim(self, count: int) -> bool:
        """True once in ``count`` times."""
        return self._rng.random() * count < 1

    def is_silent(self) -> bool:
        """Whether a broken link says nothing."""
        silent = self.plan.setup.silent
        return silent > 0 and not self.calm and self._rng.random() < silent

    def nonce(self) -> bytes:
        """32 bytes that no other handshake has."""
        return self._rng.randbytes(32)

    def next_serial(self) -> int:
        """A number that names content."""
        self._serial += 1
        return self._serial

    # --- processes --------------------------------------------------------------------

    def start_node(self, index: int, incarnation: int) -> Node:
        node = Node(self, index, incarnation)
        node.app = App(self, node)
        return node

    def connect(self, client: Node, server: Node) -> None:
        """Shake hands over a new wire."""
        if len(self.wires) >= _WIRES_MAX:
            return
        self.note(client.name, "connects to", server.name)
        wire = Wire(self, client, server)
        self.wires.append(wire)
        self._faults.meet(wire)
        nonces = self.nonce(), self.nonce()
        both = begin(
            client.identity, server.identity, nonces=nonces, backends=("inproc",)
        )
        openings = (
            Opening(self, client, wire.ends[0], both.client),
            Opening(self, server, wire.ends[1], both.server),
        )
        for opening in openings:
            opening.begin()

    def agreed(self, endpoint: Endpoint) -> None:
        """A handshake has ended well on one side: do both mean the same?"""
        self.endpoints.append(endpoint)
        if self._closing:
            endpoint.node.after(0.0, endpoint.node.app.close, endpoint)
        lanes = (endpoint.end.into, endpoint.end.out)
        demand(
            not any(lane.rewritten for lane in lanes),
            "handshake",
            "agreed although the handshake was rewritten",
        )
        peer_end = endpoint.end.out.target
        peer = peer_end.handler
        mine = endpoint.core.agreement
        demand(
            mine.peer_parameters == peer_end.node.identity.parameters,
            "handshake",
            "agreed on limits that the peer does not have",
        )
        if not isinstance(peer, Endpoint):
            return
        theirs = peer.core.agreement
        endpoint.peer, peer.peer = peer, endpoint
        demand(
            (mine.digest, mine.parameters) == (theirs.digest, theirs.parameters),
            "handshake",
            "both sides agreed, on different things",
        )

    def _act(self, step: Step) -> None:
        if step.verb in FAULTS and step.verb is not Verb.STORM:
            self._faults.strike(step)
            return
        node = self.nodes[step.node]
        if step.verb is Verb.CONNECT:
            other = (step.node + 1 + Dice(step.dice).below(len(self.nodes) - 1)) % len(
                self.nodes
            )
            node.after(0.0, self.connect, node, self.nodes[other])
        else:
            node.after(0.0, node.app.act, step)

    # --- the end ----------------------------------------------------------------------

    def _commit_all(self) -> None:
        for node in self.nodes:
            node.after(0.0, node.app.kv.commit_all)

    def _close_all(self) -> None:
        self._closing = True
        for node in self.nodes:
            node.after(0.0, node.app.close_all)

    def _settle(self) -> None:
        """Nothing happens any more: demand that nothing is left."""
        for node in self.nodes:
            for endpoint in node.endpoints:
                self.judge.settled(endpoint)
            if self._rng.random() < 0.5:
                for endpoint in node.endpoints:
                    node.app.messages.take_what_is_there(endpoint)
                    left = inside.landed_messages(endpoint)
                    demand(not left, "completion", "a message cannot be received")
            held = sum(len(endpoint.held) for endpoint in node.endpoints)
            demand(
                sum(not one.over for one in node.leases) == held and not node.lent,
                "drained",
                f"{node.name}: memory never drained, buffers {node.lent}",
            )
            demand(
                not len(node.holds), "drained", f"{node.name}: {len(node.holds)} holds"
            )
