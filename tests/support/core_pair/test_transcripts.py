"""What was recorded still means the same, in whatever pieces it arrives."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.proto.framing import Framing
from kvwire.types import Role
from kvwire.wire.control import Fail, encode_body
from kvwire.wire.header import FrameType
from tests.support.core_pair.handshakes import Frame
from tests.support.core_pair.transcripts import (
    Case,
    Transcript,
    cases,
    main,
    record,
    same,
)
from tests.support.depth import examples
from tests.support.splitter import Splitter

GOLDEN = Path(__file__).with_name("golden")
CASES = cases()
# After a change that is meant: python -m tests.support.core_pair.transcripts DIRECTORY
CHANGED = "protocol version 1 is what these bytes say; another meaning is a new version"


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


@pytest.mark.parametrize("part", range(4))
def test_what_is_said_and_heard_has_not_changed(part: int) -> None:
    """Goal R6: the same conversation, the same bytes, the same answers and events."""
    for case in CASES[part::4]:
        expect_same(record(case), golden(case))


def test_every_file_is_a_case_and_every_case_a_file() -> None:
    """None is forgotten when it is renamed."""
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(
        case.name for case in CASES
    )


def test_every_frame_type_is_recorded() -> None:
    frames = [f for case in CASES for step in golden(case).steps for f in step.frames]
    assert {header[0] for _, (header, _) in frames} == set(FrameType)


def test_a_transcript_is_read_as_it_was_written(tmp_path: Path) -> None:
    """By the command; and no byte of it depends on the moment of writing."""
    main([str(tmp_path)])
    for case in CASES:
        text = (tmp_path / f"{case.name}.txt").read_text()
        assert str(Transcript.parse(text)) == text == str(record(case))


def test_a_changed_byte_is_noticed() -> None:
    """The wording of a failure is free."""
    case = next(case for case in CASES if case.name == "messages-mtls")
    recorded = golden(case)
    role, (header, body) = recorded.steps[1].frames[0]
    recorded.steps[1].frames[0] = (role, (header, b"x" + body[1:]))
    with pytest.raises(AssertionError):
        expect_same(record(case), recorded)
    first, second = failure(33, "one text"), failure(33, "and another")
    assert same(first, second)
    assert not same(first, failure(34, "one text"))


def failure(code: int, text: str) -> Frame:
    return Framing().control(FrameType.FAIL, encode_body(Fail(code, text)), request=1)


# --- goal S9b: in any pieces


@settings(max_examples=examples(1000))
@given(
    st.sampled_from(CASES),
    st.sampled_from(Role),
    st.lists(st.floats(0, 1), max_size=20),
)
def test_cut_anywhere_the_same_frames_arrive(
    case: Case, sender: Role, cuts: list[float]
) -> None:
    """All that one side says, in up to 21 pieces; byte by byte without a cut."""
    sent = golden(case).sent_by(sender)
    run = b"".join(header + body for header, body in sent)
    places = sorted(int(cut * len(run)) for cut in cuts) or range(len(run))
    splitter = Splitter()
    arrived = [
        (frame.raw_header, frame.body)
        for begin, end in itertools.pairwise([0, *places, len(run)])
        for frame in splitter.feed(run[begin:end])
    ]
    assert arrived == sent
    assert splitter.broken is None
    assert not splitter.in_frame
