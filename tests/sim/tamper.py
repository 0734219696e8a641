"""What may happen to a frame on the way that no link is allowed to do.

The next frame of a lane is flipped, lost, doubled, moved behind the one after it,
replaced with one that its receiver had sent itself, or rewritten by somebody who knows
every checksum. The receiver has to notice each of these: by the check of the header, of
the body or of the payload, by the sequence number, or by a seal or proof.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvwire.limits import HEADER_BYTES
from kvwire.types import TrustMode
from kvwire.wire.header import HANDSHAKE_TYPES
from tests.sim.plan import Dice, Verb

if TYPE_CHECKING:
    from tests.sim.lane import Frame, Lane
    from tests.sim.world import World

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
            frame.body = _flipped(frame.body, self._dice.below(8 * frame.length))
            frame.harm = "damaged body"
        else:
            self._note(lane, "header flipped")
            frame.header = _flipped(frame.header, self._dice.below(8 * HEADER_BYTES))
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
        frame.body = _flipped(frame.body, self._dice.below(8 * frame.length))
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


def _flipped(data: bytes, bit: int) -> bytes:
    turned = bytearray(data)
    turned[bit // 8] ^= 1 << bit % 8
    return bytes(turned)
