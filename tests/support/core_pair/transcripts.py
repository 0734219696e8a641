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
    ! client send done 100    what an end has reported
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from tests.support.core_pair.handshakes import (
    Frame,
    Shaking,
    begin,
    receive,
)
from tests.support.core_pair.peer import ConnectionPair

_ARROWS: Final = {Role.CLIENT: ">", Role.SERVER: "<"}
_ROLES: Final = {arrow: role for role, arrow in _ARROWS.items()}
Script = Callable[[ConnectionPair], Iterator[str]]
"""Does something, and says with each ``yield`` what, which then travels to its end."""


@dataclass(slots=True)
class Step:
    """What one action led to.

    Attributes:
        events: What the ends made of it, one line each; the client's first.
    """

    title: str
    frames: list[tuple[Role, Frame]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Transcript:
    """A whole conversation, its handshake first."""

    title: str
    steps: list[Step]

    def __str__(self) -> str:
        """As it is written to a file."""
        return "\n".join([f"# {self.title}", *_lines(self.steps), ""])

    @classmethod
    def parse(cls, text: str) -> Transcript:
        """Read what ``str`` has written."""
        first, *lines = text.splitlines()
        transcript = cls(first.removeprefix("# "), [])
        for line in lines:
            mark, _, rest = line.partition(" ")
            if mark == "==":
                transcript.steps.append(Step(rest))
            elif mark == "!":
                transcript.steps[-1].events.append(rest)
            else:
                header, _, body = rest.partition(" ")
                frame = bytes.fromhex(header), bytes.fromhex(body)
                transcript.steps[-1].frames.append((_ROLES[mark], frame))
        return transcript


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


def same(one: Frame, other: Frame) -> bool:
    """Whether two frames say the same; the text of a failure is for people only."""
    return one == other or _failure(one) == _failure(other) is not None


def record(case: Case) -> Transcript:
    """Have a conversation and write down what is said."""
    shaking = begin(case.client, case.server)
    steps = [_handshake(shaking)]
    if case.script is not None:
        pair = ConnectionPair(shaken=shaking)
        seen = dict.fromkeys(Role, 0)
        for title in case.script(pair):
            step = Step(title, _delivered(pair))
            for role in Role:
                events = pair.of(role).events
                step.events += [
                    _line(role, _described(e)) for e in events[seen[role] :]
                ]
                seen[role] = len(events)
            steps.append(step)
    return Transcript(case.name, steps)


def _handshake(shaking: Shaking) -> Step:
    """Both sides speak, one frame at a time, as long as they do."""
    step = Step("the handshake")
    while speaking := [role for role in Role if shaking.of(role).outgoing]:
        for role in speaking:
            frame = shaking.of(role).outgoing.pop(0)
            step.frames.append((role, frame))
            try:
                receive(shaking.of(role.other), frame)
            except (HandshakeError, ProtocolError) as exc:
                fields = exc.fields if isinstance(exc, HandshakeError) else ()
                named = " ".join([type(exc).__name__, *fields])
                step.events.append(_line(role.other, named))
    return step


def _delivered(pair: ConnectionPair) -> list[tuple[Role, Frame]]:
    """Deliver frames, in turns, until there are none; return them."""
    frames = []
    pair.collect()
    while any(pair.of(role).wire for role in Role):
        for role in Role:
            if pair.of(role).wire:
                frames.append((role, pair.of(role).wire[0]))
                pair.deliver(pair.of(role))
    pair.run()
    return frames


def _line(role: Role, text: str) -> str:
    return f"{role.name.lower()} {text}"


def _failure(frame: Frame) -> tuple[int, int, int] | None:
    header, body = decode_header(frame[0]), frame[1]
    if header.type != FrameType.FAIL:
        return None
    plain = body[:-SEAL_BYTES] if header.flags == Flag.SEALED else body
    failed = narrowed(decode_body(FrameType.FAIL, plain), Fail)
    return header.sequence, header.request, failed.code


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


def _lines(steps: list[Step]) -> Iterator[str]:
    for step in steps:
        yield f"== {step.title}"
        for role, (header, body) in step.frames:
            yield f"{_ARROWS[role]} {header.hex()} {body.hex()}".rstrip()
        for event in step.events:
            yield f"! {event}"
