"""What was recorded still means the same, in whatever pieces it arrives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvwire.limits import HEADER_BYTES
from kvwire.proto.framing import Framing
from kvwire.types import Role, TrustMode
from kvwire.wire.control import Fail, encode_body
from kvwire.wire.header import FrameType
from tests.support.core_pair.handshakes import Frame
from tests.support.core_pair.transcripts import (
    Case,
    Transcript,
    cases,
    main,
    record,
    replay,
    same,
)
from tests.support.depth import sample
from tests.support.splitter import Frame as Decoded
from tests.support.splitter import Splitter

GOLDEN = Path(__file__).with_name("golden")
CASES = cases()
# After a change that is meant: python -m tests.support.core_pair.transcripts DIRECTORY
CHANGED = "protocol version 1 is what these bytes say; another meaning is a new version"

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def golden(case: Case) -> Transcript:
    return Transcript.parse((GOLDEN / f"{case.name}.txt").read_text())


def expect_same(said: Transcript, recorded: Transcript) -> None:
    assert [step.title for step in said.steps] == [s.title for s in recorded.steps]
    for step, then in zip(said.steps, recorded.steps, strict=True):
        assert step.events == then.events, f"{step.title}: {CHANGED}"
        assert len(step.frames) == len(then.frames), f"{step.title}: {CHANGED}"
        for (role, frame), (sender, before) in zip(
            step.frames, then.frames, strict=True
        ):
            assert role is sender
            assert same(frame, before), f"{step.title}: {CHANGED}"


@every_case
def test_what_is_said_has_not_changed(case: Case) -> None:
    """Goal R6: the same conversation, the same bytes."""
    expect_same(record(case), golden(case))


@every_case
def test_what_is_heard_has_not_changed(case: Case) -> None:
    """Goal R6: recorded bytes lead to the same answers and events."""
    expect_same(replay(case, golden(case)), golden(case))


def test_every_file_is_a_case_and_every_case_a_file() -> None:
    """None is forgotten when it is renamed."""
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(
        case.name for case in CASES
    )


def test_every_frame_type_is_recorded() -> None:
    """In each trust mode, for those that have two forms."""
    for trust in TrustMode:
        seen = {
            frame[0][0]
            for case in CASES
            if case.client.trust is trust
            for step in golden(case).steps
            for _, frame in step.frames
        }
        # A mark may not travel unsealed.
        never = {FrameType.MARKED_DATA} if trust is TrustMode.PSK else set()
        assert seen >= set(FrameType) - {FrameType.REFUSE} - never
    refusals = [case for case in CASES if "refused" in case.name]
    frames = [f for case in refusals for s in golden(case).steps for _, f in s.frames]
    assert any(frame[0][0] == FrameType.REFUSE for frame in frames)


def test_a_transcript_is_read_as_it_was_written() -> None:
    """And no byte of it depends on the moment of writing."""
    for case in CASES:
        text = str(record(case))
        assert str(Transcript.parse(text)) == text
        assert str(record(case)) == text


def test_writing_them_all(tmp_path: Path) -> None:
    """What the command does."""
    main([str(tmp_path / "new")])
    for case in CASES:
        written = Transcript.parse((tmp_path / "new" / f"{case.name}.txt").read_text())
        expect_same(written, golden(case))


def test_a_changed_byte_is_noticed() -> None:
    """In what is said, and in what is heard; wording is free."""
    case = next(case for case in CASES if case.name == "messages-loopback")
    recorded = golden(case)
    role, (header, body) = recorded.steps[1].frames[0]
    recorded.steps[1].frames[0] = (role, (header, b"x" + body[1:]))
    with pytest.raises(AssertionError):
        expect_same(record(case), recorded)
    with pytest.raises(AssertionError):
        expect_same(replay(case, recorded), golden(case))
    first, second = failure(33, "one text"), failure(33, "and another")
    assert same(first, second)
    assert not same(first, failure(34, "one text"))


def failure(code: int, text: str) -> Frame:
    return Framing().control(FrameType.FAIL, encode_body(Fail(code, text)), request=1)


# --- goal S9b: in any pieces

Pieces = Iterable[bytes]


def decoded(pieces: Pieces) -> list[Decoded]:
    splitter = Splitter()
    frames = [frame for piece in pieces for frame in splitter.feed(piece)]
    assert splitter.broken is None
    assert not splitter.in_frame
    return frames


def streams(case: Case) -> list[bytes]:
    """What each side sends; the handshake alone where there is nothing after it."""
    transcript = golden(case)
    if case.script is not None:
        transcript.steps.pop(0)
    return [data for role in Role if (data := transcript.sent_by(role))]


@every_case
def test_every_cut_in_two_gives_the_same_frames(case: Case) -> None:
    """At every byte."""
    for data in streams(case):
        whole = decoded([data])
        for cut in sample(range(len(data) + 1), every=7):
            assert decoded([data[:cut], data[cut:]]) == whole


@every_case
def test_a_thousand_segmentations_give_the_same_frames(case: Case) -> None:
    """In 1 to 20 pieces at random, the same ones in every run."""
    chance = random.Random(case.name)
    for data in streams(case):
        whole = decoded([data])
        for _ in sample(range(1000), every=20):
            assert decoded(random_pieces(chance, data)) == whole


def random_pieces(chance: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(chance.choices(range(len(data) + 1), k=chance.randrange(20)))
    return [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]


def cut_at(place: int) -> Callable[[bytes], Pieces]:
    return lambda run: (run[:place], run[place:])


@every_case
def test_cut_anywhere_the_core_reports_the_same(case: Case) -> None:
    """Every run of bytes in two, in single bytes, and at random."""
    recorded = golden(case)
    chance = random.Random(case.name)
    longest = max(len(step.sent_by(role)) for step in recorded.steps for role in Role)
    cuts: list[Callable[[bytes], Pieces]] = [
        *(cut_at(place) for place in range(1, longest, 3)),
        *(cut_at(HEADER_BYTES + place) for place in (-1, 0, 1)),
        *(lambda run: random_pieces(chance, run) for _ in range(20)),
        lambda run: (run[n : n + 1] for n in range(len(run))),
    ]
    for cut in sample(cuts, every=5):
        expect_same(replay(case, recorded, cut), recorded)
