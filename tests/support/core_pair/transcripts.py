"""Recorded conversations: what this version of the protocol says, byte by byte.

A transcript holds every frame of a script, in the order of arrival, and what each end
made of it. Played back into another build of kvwire it shows whether the bytes still
mean the same there, and whether the other build still says the same.
``python -m tests.support.core_pair.transcripts DIRECTORY`` writes them all.

The format is text, one frame a line::

    # rendezvous, psk
    == the client sends 100 bytes to a receive that was posted
    > 2001...  9208...        client to server: header, body
    < 2101...  ...            server to client
    ! client send done 100    what an end has reported
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
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
from kvwire.proto.handshake import Handshake, Identity, ServerHandshake
from kvwire.types import Role, TrustMode
from kvwire.wire.control import Fail, decode_body, narrowed
from kvwire.wire.handshake_messages import BRIEF_LAYERS, BRIEF_TRANSFERS
from kvwire.wire.header import Flag, FrameType, decode_header
from tests.support.core_pair.handshakes import (
    SMALL,
    Frame,
    Inlet,
    Shaking,
    begin,
    choose_first,
    identity,
)
from tests.support.core_pair.peer import ConnectionPair
from tests.support.core_pair.scripts import SCRIPTS, Script

_ARROWS: Final = {Role.CLIENT: ">", Role.SERVER: "<"}
_ROLES: Final = {arrow: role for role, arrow in _ARROWS.items()}

Cut = Callable[[bytes], Iterable[bytes]]
"""Cuts a run of bytes into the pieces in which they arrive."""


@dataclass(slots=True)
class Step:
    """What one action led to.

    Attributes:
        events: What the ends made of it, one line each; the client's first.
    """

    title: str
    frames: list[tuple[Role, Frame]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def sent_by(self, role: Role) -> bytes:
        """All that one side has sent."""
        return b"".join(header + body for r, (header, body) in self.frames if r is role)


@dataclass(slots=True)
class Transcript:
    """A whole conversation, its handshake first."""

    title: str
    steps: list[Step]

    def sent_by(self, role: Role) -> bytes:
        """All that one side has sent."""
        return b"".join(step.sent_by(role) for step in self.steps)

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


def cases() -> list[Case]:
    """Every transcript of this version."""
    return [*_scripted(), *_refused()]


def record(case: Case) -> Transcript:
    """Have a conversation and write down what is said."""
    return _Stage(case).play()


def replay(case: Case, golden: Transcript, cut: Cut | None = None) -> Transcript:
    """Have it again with recorded bytes: each end hears what it heard then."""
    return _Stage(case, golden, cut).play()


class _Stage:
    """Plays a case, live or from a recording."""

    def __init__(
        self, case: Case, golden: Transcript | None = None, cut: Cut | None = None
    ) -> None:
        self._case = case
        self._golden = golden
        self._cut = cut or (lambda run: [run])
        self._shaking = begin(case.client, case.server)
        self._steps: list[Step] = []

    def play(self) -> Transcript:
        self._shake_hands()
        if self._case.script is not None:
            pair = ConnectionPair(shaken=self._shaking)
            seen = dict.fromkeys(Role, 0)
            for title in self._case.script(pair):
                self._steps.append(Step(title))
                if self._golden is None:
                    self._deliver(pair)
                else:
                    self._hear(pair)
                for role in Role:
                    events = pair.of(role).events
                    self._report(role, events[seen[role] :])
                    seen[role] = len(events)
        return Transcript(self._case.name, self._steps)

    # --- the handshake

    def _shake_hands(self) -> None:
        step = Step("the handshake")
        self._steps.append(step)
        if self._golden is None:
            runs = self._spoken(step)
        else:
            runs = iter(_runs(self._golden.steps[0].frames))
        inlets = {role: _inlet(self._shaking.of(role)) for role in Role}
        for role, run in runs:
            try:
                for piece in self._cut(run):
                    inlets[role.other].feed(piece)
            except (HandshakeError, ProtocolError) as exc:
                fields = exc.fields if isinstance(exc, HandshakeError) else ()
                named = " ".join([type(exc).__name__, *fields])
                step.events.append(f"{role.other.name.lower()} {named}")
        if self._golden is not None:
            step.frames = _said(self._shaking, self._golden.steps[0])

    def _spoken(self, step: Step) -> Iterator[tuple[Role, bytes]]:
        """What both sides say, one frame at a time, as long as they do."""
        while True:
            speaking = [r for r in Role if self._shaking.of(r).outgoing]
            if not speaking:
                return
            for role in speaking:
                header, body = self._shaking.of(role).outgoing.pop(0)
                step.frames.append((role, (header, body)))
                yield role, header + body

    # --- the connection

    def _deliver(self, pair: ConnectionPair) -> None:
        step = self._steps[-1]
        while any(pair.of(role).wire for role in Role):
            for role in Role:
                if pair.of(role).wire:
                    step.frames.append((role, pair.of(role).wire[0]))
                    pair.deliver(pair.of(role))
        pair.run()

    def _hear(self, pair: ConnectionPair) -> None:
        assert self._golden is not None
        golden = self._golden.steps[len(self._steps) - 1]
        for role, run in _runs(golden.frames):
            for piece in self._cut(run):
                pair.of(role.other).feed(piece)
        said = {role: list(pair.of(role).wire) for role in Role}
        self._steps[-1].frames = _in_order(said, golden)
        for role in Role:
            pair.of(role).wire.clear()
        pair.run()

    def _report(self, role: Role, events: list[Event]) -> None:
        name = role.name.lower()
        self._steps[-1].events += [f"{name} {_described(event)}" for event in events]


def _failure(frame: Frame) -> tuple[int, int, int] | None:
    header, body = decode_header(frame[0]), frame[1]
    if header.type != FrameType.FAIL:
        return None
    plain = body[:-SEAL_BYTES] if header.flags == Flag.SEALED else body
    failed = narrowed(decode_body(FrameType.FAIL, plain), Fail)
    return header.sequence, header.request, failed.code


def _inlet(handshake: Handshake) -> Inlet:
    def end(body: bytes) -> None:
        handshake.body_received(body)
        if isinstance(handshake, ServerHandshake) and handshake.offer is not None:
            choose_first(handshake)

    return Inlet(handshake.header_received, end)


def _runs(frames: list[tuple[Role, Frame]]) -> Iterator[tuple[Role, bytes]]:
    """Frames that one side sent in a row, as one run of bytes."""
    for role, group in groupby(frames, key=lambda sent: sent[0]):
        yield role, b"".join(header + body for _, (header, body) in group)


def _said(shaking: Shaking, golden: Step) -> list[tuple[Role, Frame]]:
    said = {role: list(shaking.of(role).outgoing) for role in Role}
    for role in Role:
        shaking.of(role).outgoing.clear()
    return _in_order(said, golden)


def _in_order(said: dict[Role, list[Frame]], golden: Step) -> list[tuple[Role, Frame]]:
    """What both sides have said, in the order of the recording; the rest at the end."""
    ordered = [(role, said[role].pop(0)) for role, _ in golden.frames if said[role]]
    return ordered + [(role, frame) for role in Role for frame in said[role]]


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


def _scripted() -> Iterator[Case]:
    features = BRIEF_TRANSFERS | BRIEF_LAYERS
    brief = replace(SMALL, features=features)
    for trust in TrustMode:
        yield Case(
            name=f"pushed-brief-{trust.name.lower()}",
            client=identity("client", trust=trust, parameters=brief),
            server=identity("server", trust=trust, parameters=brief),
            script=SCRIPTS["pushed"],
        )
        for name, script in SCRIPTS.items():
            yield Case(
                name=f"{name}-{trust.name.lower()}",
                client=identity("client", trust=trust),
                server=identity("server", trust=trust),
                script=script,
            )


def _refused() -> Iterator[Case]:
    psk, other = TrustMode.PSK, bytes(range(1, 33))
    yield Case(
        name="refused-version",
        client=identity("client"),
        server=identity("server", versions=(2, 3)),
    )
    yield Case(
        name="refused-trust",
        client=identity("client"),
        server=identity("server", trust=psk),
    )
    yield Case(
        name="refused-key",
        client=identity("client", trust=psk),
        server=identity("server", trust=psk, psk=other),
    )
    for trust in TrustMode:
        yield Case(
            name=f"refused-profile-{trust.name.lower()}",
            client=identity("client", trust=trust, profile=(("model", "a"),)),
            server=identity("server", trust=trust, profile=(("model", "b"),)),
        )


def main(arguments: list[str] | None = None) -> None:
    """Write every transcript of this version into a directory."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.core_pair.transcripts"
    )
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args(arguments).directory
    directory.mkdir(parents=True, exist_ok=True)
    for case in cases():
        (directory / f"{case.name}.txt").write_text(str(record(case)))


if __name__ == "__main__":
    main()
