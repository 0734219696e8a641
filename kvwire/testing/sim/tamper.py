"""What may happen to a frame on the way that no link is allowed to do.

The next frame of a lane is flipped, lost, doubled, moved behind the one after it,
replaced with one that its receiver had sent itself, or rewritten by somebody who knows
every checksum. The receiver has to notice each of these: by the check of the header, of
the body or of the payload, by the sequence number, or by a seal or proof.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from kvwire.limits import HEADER_BYTES
from kvwire.testing.sim.plan import Dice, Verb
from kvwire.types import TrustMode
from kvwire.wire.header import HANDSHAKE_TYPES

if TYPE_CHECKING:
    from kvwire.testing.sim.net import Frame, Lane
    from kvwire.testing.sim.world import World

# Where the checks lie in a header; see kvwire.wire.header.
_PAYLOAD_CHECK: Final = slice(24, 28)
_HEADER_CHECK: Final = slice(28, 32)
_UNPROVEN: Final = frozenset(int(kind) for kind in HANDSHAKE_TYPES)


class Tamper:
    """One thing that will happen to the next frames of a lane."""

    __slots__ = ("_dice", "_held_back", "_verb", "_world")

    def __init__(self, world: World, verb: Verb, dice: Dice) -> None:
        self._world = world
        self._verb = verb
        self._dice = dice
        self._held_back: Frame | None = None

    def apply(self, lane: Lane, frame: Frame) -> bool:
        """Harm a frame that is sent; True if that has settled where it goes."""
        settled = self._harm(lane, frame)
        if settled is None:
            return False  # this frame is not the kind to harm; wait for another
        if self._held_back is None:
            lane.armed.popleft()
        return settled

    def _harm(self, lane: Lane, frame: Frame) -> bool | None:
        match self._verb:
            case Verb.FLIP:
                self._flip(lane, frame)
                return False
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
                return self._reflect(lane, frame)
            case _:
                return self._rewrite(lane, frame)

    def _flip(self, lane: Lane, frame: Frame) -> None:
        where = self._dice.below(3)
        payload = frame.body is None or frame.serial > 0
        if where and frame.length and (self._world.plan.setup.checked or not payload):
            bit = self._dice.below(8 * frame.length)
            self._note(lane, "payload flipped" if payload else "body flipped")
            if payload:
                frame.flip = bit
                return
            assert frame.body is not None
            frame.body = _flipped(frame.body, bit)
            frame.harm = "damaged body"
            return
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

    def _reflect(self, lane: Lane, frame: Frame) -> bool | None:
        """Give the receiver its own frame of the same number; seals must refuse it."""
        number = len(lane.history) - 1
        theirs = lane.target.out.history
        mirrored = theirs[number] if number < len(theirs) else None
        if mirrored is None or frame.body is None or frame.serial:
            return None
        if self._world.plan.setup.trust is TrustMode.LOOPBACK:
            return False  # without a key nobody can tell who made a frame
        self._note(lane, "frame reflected")
        frame.header, frame.body = mirrored
        frame.length = len(frame.body)
        frame.harm = "reflected frame"
        return False

    def _rewrite(self, lane: Lane, frame: Frame) -> bool | None:
        """Change a fixed message of the handshake and make its checks right again."""
        if frame.header[0] not in _UNPROVEN or frame.body is None:
            return None
        self._note(lane, "handshake rewritten")
        frame.body = _flipped(frame.body, self._dice.below(8 * frame.length))
        header = bytearray(frame.header)
        header[_PAYLOAD_CHECK] = struct.pack("<I", zlib.crc32(frame.body))
        header[_HEADER_CHECK] = struct.pack("<I", zlib.crc32(header[:28]))
        frame.header = bytes(header)
        lane.rewritten = True
        return False

    def _note(self, lane: Lane, what: str) -> None:
        lane.tampered = True
        self._world.note(lane.source.node.name, what, lane.target.node.name)


class _Aftermath(Tamper):
    """The frame after a lost one has to be refused."""

    __slots__ = ("_harm_said",)

    def __init__(self, world: World, harm: str) -> None:
        super().__init__(world, Verb.DROP, Dice(0))
        self._harm_said = harm

    def _harm(self, lane: Lane, frame: Frame) -> bool | None:
        frame.harm = self._harm_said
        return False


def _copy(frame: Frame, harm: str) -> Frame:
    copy = type(frame)(
        frame.header,
        frame.body,
        lease=frame.lease,
        offset=frame.offset,
        length=frame.length,
        serial=frame.serial,
    )
    copy.harm = harm
    return copy


def _flipped(data: bytes, bit: int) -> bytes:
    turned = bytearray(data)
    turned[bit // 8] ^= 1 << bit % 8
    return bytes(turned)
