"""Faults of wires and processes, as the steps of a plan bring them about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.endpoint import Endpoint
from tests.sim.forgery import forge
from tests.sim.lane import Lane
from tests.sim.net import End, Wire
from tests.sim.plan import TAMPERING, Dice, Step, Verb
from tests.sim.tamper import Tamper

if TYPE_CHECKING:
    from tests.sim.world import World

AMBUSHES = ("cut", "abort", "cancel", "close regions", "receive", "close")
_STALLS_S = (0.1, 0.3, 1.0, 3.0, 9.0, 20.0)


class Faults:
    """Brings faults about, and takes them back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[Verb, Dice]] = []

    def strike(self, step: Step) -> None:
        """Let one fault happen."""
        world, dice = self._world, Dice(step.dice)
        node = world.nodes[step.node]
        seconds = _STALLS_S[dice.below(len(_STALLS_S))]
        world.note(node.name, step.verb.value, seconds)
        match step.verb:
            case Verb.CRASH:
                self._crash(step.node)
            case Verb.STALL:
                node.was_late = True
                until = min(world.now + seconds, world.plan.end)
                node.stalled_until = max(node.stalled_until, until)
            case Verb.CLOCK_JUMP:
                node.was_late = True
                node.jump(seconds)
            case Verb.LATE_TIMERS:
                node.was_late = True
                node.timers_late_until = world.now + seconds
            case _:
                if wire := self._pick_wire(dice):
                    self._strike_wire(step.verb, wire, dice, seconds)
                elif step.verb in TAMPERING:
                    self._waiting.append((step.verb, dice))

    def meet(self, wire: Wire) -> None:
        """A wire is new: what has waited for one happens to it."""
        for verb, dice in self._waiting:
            self._strike_wire(verb, wire, dice, 0.0)
        self._waiting.clear()

    def end(self) -> None:
        """No more faults: what is blocked flows again."""
        world = self._world
        world.calm = True
        for wire in world.wires:
            for end in wire.ends:
                end.out.armed.clear()
                if not wire.is_cut:
                    end.out.unblock()
        for node in world.nodes:
            node.timers_late_until = 0.0

    def _strike_wire(self, verb: Verb, wire: Wire, dice: Dice, seconds: float) -> None:
        end: End = wire.ends[dice.below(2)]
        if verb is Verb.CUT:
            wire.cut()
        elif verb is Verb.PARTITION:
            end.out.block(self._world.now + seconds)
        elif verb is Verb.AMBUSH:
            end.out.ambush = lambda lane: self._spring(lane, dice)
        elif verb is Verb.FORGE:
            forge(self._world, end, dice)
        elif verb is not Verb.DAMAGE or self._world.plan.setup.checked:
            end.out.armed.append(Tamper(self._world, verb, dice))

    def _spring(self, lane: Lane, dice: Dice) -> None:
        """A payload is half in place: the worst moment for something else."""
        here, there = lane.target, lane.source
        end = (here, there)[dice.below(2)]
        if end.closed or end.node.dead or not isinstance(end.handler, Endpoint):
            return
        app, endpoint = end.node.app, end.handler
        choice = AMBUSHES[dice.below(len(AMBUSHES))]
        self._world.note(endpoint.name, "ambushed", choice)
        match choice:
            case "cut":
                lane.wire.cut()
            case "abort":
                app.abort(endpoint)
            case "cancel":
                app.cancel_all(endpoint)
            case "close regions":
                app.regions.close_all()
            case "receive":
                app.messages.receive_all(endpoint)
            case _:
                app.close(endpoint)

    def _pick_wire(self, dice: Dice) -> Wire | None:
        alive = [
            wire
            for wire in self._world.wires
            if not any(end.closed or end.aborted for end in wire.ends)
        ]
        return alive[dice.below(len(alive))] if alive else None

    def _crash(self, index: int) -> None:
        """A process dies; another takes its place, and connects."""
        world = self._world
        world.nodes[index].crash()
        incarnation = world.nodes[index].incarnation + 1
        node = world.nodes[index] = world.start_node(index, incarnation)
        other = world.nodes[index - 1]
        node.after(4 * world.latency(), world.connect, node, other)
