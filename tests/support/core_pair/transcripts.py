"""Recorded conversations: what this version of the protocol says, byte by byte.

A transcript holds every frame of a script, in the order of arrival, and what each end
made of it. Where another build of kvwire has the same conversation with itself, it
shows whether that still says the same bytes, and makes the same of them.
``python -m tests.support.core_pair.test_transcripts DIRECTORY`` writes them all.

The format is text, one frame a line::

    # rendezvous, psk
    == the client sends 100 bytes to a receive that was posted
    > 2001...  9208...        client to server: header, body
    < 2101...  ...            server to client
    < 25 FAIL 3 1 36          its number, its request and its code: the words are free
    ! client send done 100    what an end has reported
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvwire.errors import HandshakeError, ProtocolError
from kvwire.limits import SEAL_BYTES
from kvwire.proto.events import (
    Ended,
    Event,
    RequestDone,
    SegmentLanded,
    SegmentMarked,
    SegmentsAcknowledged,
)
from kvwire.proto.handshake import Identity
from kvwire.types import Role
from kvwire.wire.control import Fail, decode_body, narrowed
from kvwire.wire.header import Flag, FrameType, decode_header
from tests.support.core_pair.handshakes import Frame, Shaking, begin, receive
from tests.support.core_pair.peer import ConnectionPair

_ARROWS: Final = {Role.CLIENT: ">", Role.SERVER: "<"}
Script = Callable[[ConnectionPair], Iterator[str]]
"""Does something, and says with each ``yield`` what, which then travels to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One transcript to be made: who shakes hands, and what they do then.

    Attributes:
        script: What happens after the handshake; None if it is the handshake that the
            case is about.
    """

    name: str
    client: Identity
    server: Identity
    script: Script | None = None


def record(case: Case) -> str:
    """Have a conversation and write down what is said."""
    shaking = begin(case.client, case.server)
    lines = [f"# {case.name}", "== the handshake", *_handshake(shaking)]
    if case.script is not None:
        pair = ConnectionPair(shaken=shaking)
        seen = dict.fromkeys(Role, 0)
        for title in case.script(pair):
            lines += [f"== {title}", *_delivered(pair)]
            for role in Role:
                new = pair.of(role).events[seen[role] :]
                lines += [_heard(role, _described(event)) for event in new]
                seen[role] += len(new)
    return "\n".join([*lines, ""])


def written(role: Role, frame: Frame) -> str:
    """A frame as a line."""
    header, body = decode_header(frame[0]), frame[1]
    if header.type != FrameType.FAIL:
        return f"{_ARROWS[role]} {frame[0].hex()} {body.hex()}".rstrip()
    plain = body[:-SEAL_BYTES] if header.flags == Flag.SEALED else body
    code = narrowed(decode_body(FrameType.FAIL, plain), Fail).code
    named = f"{header.sequence} {header.request} {code}"
    return f"{_ARROWS[role]} {header.type:02x} FAIL {named}"


def _handshake(shaking: Shaking) -> list[str]:
    """Both sides speak, one frame at a time, as long as they do."""
    frames, events = [], []
    while speaking := [role for role in Role if shaking.of(role).outgoing]:
        for role in speaking:
            frame = shaking.of(role).outgoing.pop(0)
            frames.append(written(role, frame))
            try:
                receive(shaking.of(role.other), frame)
            except (HandshakeError, ProtocolError) as exc:
                fields = exc.fields if isinstance(exc, HandshakeError) else ()
                named = " ".join([type(exc).__name__, *fields])
                events.append(_heard(role.other, named))
    return frames + events


def _delivered(pair: ConnectionPair) -> list[str]:
    """Deliver frames, in turns, until there are none; return them."""
    frames = []
    pair.collect()
    while any(pair.of(role).wire for role in Role):
        for role in Role:
            if pair.of(role).wire:
                frames.append(written(role, pair.of(role).wire[0]))
                pair.deliver(pair.of(role))
    pair.run()
    return frames


def _heard(role: Role, text: str) -> str:
    return f"! {role.name.lower()} {text}"


def _described(event: Event) -> str:
    match event:
        case RequestDone(request=request, error=None, nbytes=nbytes):
            return f"{request.kind.value} done {nbytes}"
        case RequestDone(request=request, error=error):
            return f"{request.kind.value} failed {type(error).__name__}"
        case Ended(error=error, graceful=graceful):
            how = "gracefully" if graceful else "at once"
            return f"ended {type(error).__name__} {how}"
        case SegmentMarked(segment=segment) | SegmentLanded(segment=segment):
            return f"{type(event).__name__} {segment.number} {segment.nbytes}"
        case SegmentsAcknowledged(numbers=numbers):
            return f"SegmentsAcknowledged {' '.join(map(str, numbers))}"
        case _:
            return type(event).__name__
