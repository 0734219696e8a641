"""Well-formed frames that an honest peer never sends.

They are made with the sender's own numbers and keys: this is a peer that is hostile, or
has a bug. Each breaks a rule of the protocol in every state of a connection, so the
receiver has to refuse each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.limits import EAGER_BYTES_MAX, REQUEST_ID_MAX
from kvwire.proto.framing import Framing
from kvwire.types import Role
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
from kvwire.wire.header import Flag, FrameType, encode_header
from tests.sim.endpoint import Endpoint
from tests.sim.lane import Frame
from tests.sim.net import End
from tests.sim.plan import Dice

if TYPE_CHECKING:
    from tests.sim.world import World

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
