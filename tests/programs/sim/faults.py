"""Faults of wires and processes, as the steps of a plan bring them about.

What is tampered with, or forged with the sender's own numbers and keys, breaks a rule
of the protocol in every state: the receiver has to refuse each of these frames, by a
check, by the sequence number, or by a seal or proof.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvwire.limits import EAGER_BYTES_MAX, HEADER_BYTES
from kvwire.proto.framing import Framing
from kvwire.proto.requests import REQUEST_ID_MAX
from kvwire.types import Role, TrustMode
from kvwire.wire.control import (
    AccessBody,
    Announce,
    Body,
    Credit,
    Fail,
    Fin,
    Ping,
    Ready,
    encode_body,
)
from kvwire.wire.header import HANDSHAKE_TYPES, Flag, FrameType, encode_header
from tests.programs.sim.endpoint import Endpoint
from tests.programs.sim.net import End, Frame, Lane, Wire, flipped
from tests.programs.sim.plan import TAMPERING, Dice, Step, Verb

if TYPE_CHECKING:
    from tests.programs.sim.world import World


# Where the checks lie in a header; see kvwire.wire.header.
_PAYLOAD_CHECK: Final = slice(24, 28)
_HEADER_CHECK: Final = slice(28, 32)
_UNPROVEN: Final = frozenset(int(kind) for kind in HANDSHAKE_TYPES)


class Tamper:
    """One thing that will happen to the next frames of a lane."""

    __slots__ = ("_dice", "_held_back", "_in_body", "_skip", "_verb", "_world")

    def __init__(self, world: World, verb: Verb, dice: Dice) -> None:
        self._world = world
        self._verb = verb
        self._dice = dice
        self._held_back: Frame | None = None
        self._skip = dice.below(2)
        self._in_body = dice.one_in(2)
        setup = world.plan.setup
        if verb is Verb.REFLECT and setup.trust is TrustMode.LOOPBACK:
            self._verb = Verb.DROP  # without a key nobody can tell who made a frame

    def apply(self, lane: Lane, frame: Frame) -> bool:
        """Harm a frame that is sent; True if that has settled where it goes."""
        if self._held_back is None:
            if not self._suits(lane, frame):
                return False
            if self._skip:
                self._skip -= 1
                return False
        settled = self._harm(lane, frame)
        if self._held_back is None:
            lane.armed.popleft()
        return settled

    def _suits(self, lane: Lane, frame: Frame) -> bool:
        match self._verb:
            case Verb.DAMAGE:
                return frame.payload and frame.length > 0
            case Verb.FLIP:
                return not (frame.payload and self._in_body)
            case Verb.REWRITE:
                return frame.header[0] in _UNPROVEN
            case Verb.REFLECT:
                return not frame.payload and _mirrored(lane) is not None
            case _:
                return True

    def _harm(self, lane: Lane, frame: Frame) -> bool:
        match self._verb:
            case Verb.FLIP:
                self._flip(lane, frame)
            case Verb.DAMAGE:
                self._world.note(lane.source.node.name, "payload flipped")
                lane.damaged = True
                frame.flip = self._dice.below(8 * frame.length)
            case Verb.DROP:
                self._note(lane, "frame lost")
                if frame.chunk is not None:
                    # Nobody is told that a frame got lost, its sender least of all.
                    lane.source.node.after(0.0, lane.source.sent, frame.chunk)
                lane.armed.insert(1, _Aftermath(self._world, "frame after a lost one"))
                return True
            case Verb.DOUBLE:
                self._note(lane, "frame doubled")
                lane.append(frame)
                lane.append(_copy(frame, "doubled frame"))
                return True
            case Verb.SWAP:
                return self._swap(lane, frame)
            case Verb.REFLECT:
                self._reflect(lane, frame)
            case _:
                self._rewrite(lane, frame)
        return False

    def _flip(self, lane: Lane, frame: Frame) -> None:
        """Turn a bit of a header or of a control body."""
        if self._in_body:
            self._note(lane, "body flipped")
            assert frame.body is not None
            frame.body = flipped(frame.body, self._dice.below(8 * frame.length))
            frame.harm = "damaged body"
        else:
            self._note(lane, "header flipped")
            frame.header = flipped(frame.header, self._dice.below(8 * HEADER_BYTES))
            frame.harm = "damaged header"

    def _swap(self, lane: Lane, frame: Frame) -> bool:
        first, self._held_back = self._held_back, None
        if first is None:
            self._held_back = frame
            self._note(lane, "frame held back")
            return True
        frame.harm = first.harm = "frame out of order"
        lane.append(frame)
        lane.append(first)
        return True

    def _reflect(self, lane: Lane, frame: Frame) -> None:
        """Give the receiver its own frame of the same number; seals must refuse it."""
        mirrored = _mirrored(lane)
        assert mirrored is not None
        self._note(lane, "frame reflected")
        frame.header, frame.body = mirrored
        frame.length = len(frame.body)
        frame.harm = "reflected frame"

    def _rewrite(self, lane: Lane, frame: Frame) -> None:
        """Change a fixed message of the handshake and make its checks right again."""
        self._note(lane, "handshake rewritten")
        assert frame.body is not None
        frame.body = flipped(frame.body, self._dice.below(8 * frame.length))
        header = bytearray(frame.header)
        header[_PAYLOAD_CHECK] = struct.pack("<I", zlib.crc32(frame.body))
        header[_HEADER_CHECK] = struct.pack("<I", zlib.crc32(header[:28]))
        frame.header = bytes(header)
        lane.rewritten = True

    def _note(self, lane: Lane, what: str) -> None:
        lane.tampered = lane.wire.disturbed = True
        self._world.note(lane.source.node.name, what, lane.target.node.name)


class _Aftermath(Tamper):
    """The frame after a lost one has to be refused."""

    __slots__ = ("_harm_said",)

    def __init__(self, world: World, harm: str) -> None:
        super().__init__(world, Verb.DROP, Dice(0))
        self._skip = 0
        self._harm_said = harm

    def _harm(self, lane: Lane, frame: Frame) -> bool:
        frame.harm = self._harm_said
        return False


def _mirrored(lane: Lane) -> tuple[bytes, bytes] | None:
    """The control frame that the receiver has sent under the same number."""
    number = len(lane.history) - 1
    theirs = lane.target.out.history
    return theirs[number] if number < len(theirs) else None


def _copy(frame: Frame, harm: str) -> Frame:
    # Its sender hears of one completion.
    return replace(frame, chunk=None, harm=harm)


_UNKNOWN_TYPE = 0x3F
_TAG = bytes(8)


def forge(world: World, end: End, dice: Dice) -> None:
    """Send one frame over a wire that its receiver has to refuse."""
    endpoint = end.handler
    if not isinstance(endpoint, Endpoint) or endpoint.ended or end.ending:
        return
    framing = endpoint.core.outbox.framing
    kind, header, body = _forged(endpoint, framing, dice)
    world.note(endpoint.name, "forges", kind)
    end.out.tampered = end.out.wire.disturbed = True
    frame = Frame(header, body)
    frame.harm = f"forged frame ({kind})"
    end.out.append(frame)


def _forged(
    endpoint: Endpoint, framing: Framing, dice: Dice
) -> tuple[str, bytes, bytes]:
    mine = 1 if endpoint.core.agreement.role is Role.CLIENT else 2
    newest = REQUEST_ID_MAX - 2 + mine
    never = REQUEST_ID_MAX - 1 - 2 * dice.below(100)
    used = max(endpoint.asks, default=0)
    anything = AccessBody(1, 1, bytes(16), 0, 1)
    forgeries: list[tuple[str, int, Body, int]] = [
        ("a request number of the receiver", FrameType.PUT, anything, mine ^ 3),
        ("request number 0", FrameType.ANNOUNCE, Announce(_TAG, 1), 0),
        ("READY for nothing", FrameType.READY, Ready(1), never),
        ("FIN for nothing", FrameType.FIN, Fin(1), never),
        ("FAIL for nothing", FrameType.FAIL, Fail(36, ""), never),
        ("credit for nothing", FrameType.CREDIT, Credit(2**20, 0), 0),
        ("a PONG to no PING", FrameType.PONG, Ping(2**32 - 1), 0),
        ("a PING for a request", FrameType.PING, Ping(1), newest),
        ("a get of 0 bytes", FrameType.GET, AccessBody(1, 1, bytes(16), 0, 0), newest),
        ("an OFFER after the handshake", FrameType.OFFER, Ping(1), 0),
    ]
    if used:
        reused = ("a request number again", FrameType.ANNOUNCE, Announce(_TAG, 1), used)
        forgeries += [reused] * 4
    choice = dice.below(len(forgeries) + 4)
    if choice < len(forgeries):
        kind, frame_type, said, request = forgeries[choice]
        return kind, *framing.control(frame_type, encode_body(said), request=request)
    return _forged_raw(endpoint, framing, never, choice - len(forgeries))


def _forged_raw(
    endpoint: Endpoint, framing: Framing, never: int, choice: int
) -> tuple[str, bytes, bytes]:
    sequence = framing.sent & 0xFFFF
    framing.sent += 1
    checked = int(Flag.CHECKED)
    match choice:
        case 0:
            header = encode_header(_UNKNOWN_TYPE, checked, sequence, 1)
            return "unknown type", header, b"\0"
        case 1:
            header = encode_header(FrameType.DATA, 0, sequence, 1, never)
            return "payload for nothing", header, b"\0"
        case 2:
            eager_bytes = endpoint.core.agreement.parameters.eager_bytes
            length = min(eager_bytes + 1, EAGER_BYTES_MAX)
            header = encode_header(FrameType.MESSAGE, 0, sequence, length)
            return "a message beyond the agreed size", header, bytes(length)
        case _:
            header = encode_header(FrameType.PING, 0x80, sequence, 1)
            return "an unknown flag", header, b"\0"


AMBUSHES = ("cut", "abort", "cancel", "close regions", "receive", "close")
_STALLS_S = (0.1, 0.3, 1.0, 3.0, 9.0, 20.0)


class Faults:
    """Brings faults about, and takes them back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[Verb, Dice]] = []

    def strike(self, step: Step) -> None:
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
