"""The table of a lane, every state with every input, and what carries the data."""

from __future__ import annotations

import itertools
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.driver.lanes.state import (
    LANE_TRANSITIONS,
    LaneEndpoint,
    LaneInput,
    LaneSet,
    LaneState,
)
from kvwire.types import Candidate, TransportReport

REPORT: Final = TransportReport(
    (
        Candidate("fast", True, "offered by both sides", possible=True),
        Candidate("tcp", False, "another was preferred", possible=True),
    )
)
# Before ``join`` has returned the lane cannot be ready, nor say that it is closed; and
# of what is closed nothing is heard but its opener giving it up.
IMPOSSIBLE: Final = {
    (LaneState.JOINING, LaneInput.READY),
    (LaneState.JOINING, LaneInput.GONE),
    (LaneState.ABANDONED, LaneInput.READY),
    (LaneState.ABANDONED, LaneInput.GONE),
    (LaneState.JOINED, LaneInput.JOINED),
    (LaneState.OPEN, LaneInput.JOINED),
    (LaneState.OPEN, LaneInput.READY),
    (LaneState.OPEN, LaneInput.GIVE_UP),
    (LaneState.CLOSING, LaneInput.JOINED),
    (LaneState.CLOSED, LaneInput.JOINED),
    (LaneState.CLOSED, LaneInput.READY),
    (LaneState.CLOSED, LaneInput.CLOSE),
    (LaneState.CLOSED, LaneInput.GONE),
}
MAY_TOUCH_MEMORY: Final = set(LaneState) - {LaneState.CLOSED}


class _Lane:
    """A backend's lane of which only the identity counts."""

    description = "what fast is"


def opened(lanes: LaneSet, number: int = 1, backend: str = "fast") -> LaneEndpoint:
    made = LaneEndpoint(number, backend, cast("Any", _Lane()))
    lanes.add(made)
    lanes.advance(made, LaneInput.JOINED)
    lanes.advance(made, LaneInput.READY)
    return made


@pytest.mark.parametrize(
    ("state", "happened"), list(itertools.product(LaneState, LaneInput))
)
def test_every_state_and_every_input(state: LaneState, happened: LaneInput) -> None:
    """Each pair is a step of the table, or a bug that says so; never ignored."""
    lanes = LaneSet("tcp", REPORT)
    made = LaneEndpoint(1, "fast", cast("Any", _Lane()))
    if state is not LaneState.CLOSED:
        lanes.add(made)
    made.state = state
    if state is LaneState.OPEN:
        lanes.open.append(made)
    if (state, happened) in IMPOSSIBLE:
        with pytest.raises(KeyError):
            lanes.advance(made, happened)
        return
    assert lanes.advance(made, happened, "why") is state
    assert made.state is LANE_TRANSITIONS[state, happened]
    assert lanes.quiet == (made.state is LaneState.CLOSED)
    assert (made in lanes.open) == (made.state is LaneState.OPEN)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(LaneInput)), max_size=60))
def test_what_carries_the_data_follows_from_what_is_open(
    steps: list[tuple[int, LaneInput]],
) -> None:
    """After any sequence: no lane open means the control link, and why is said."""
    lanes = LaneSet("tcp", REPORT)
    made = [LaneEndpoint(n, "fast", cast("Any", _Lane())) for n in range(4)]
    for one in made:
        lanes.add(one)
    lanes.end_initial_set()
    for index, happened in steps:
        one = made[index]
        if (one.state, happened) not in LANE_TRANSITIONS:
            continue
        lanes.advance(one, happened, "reset")
        assert lanes.open == sorted(
            (m for m in made if m.state is LaneState.OPEN), key=lanes.open.index
        )
        assert lanes.transport == ("fast" if lanes.open else "tcp")
        assert lanes.broken == ("fast" if "fast" in lanes.failed else "")
        assert not (lanes.open and lanes.failed)
        assert lanes.why
    quiet = all(one.state not in MAY_TOUCH_MEMORY for one in made)
    assert lanes.quiet == quiet
    assert all(
        (lanes.find(one.number) is one) == (one.state in MAY_TOUCH_MEMORY)
        for one in made
    )


def test_before_the_first_choice_it_is_what_both_sides_prefer() -> None:
    lanes = LaneSet("tcp", REPORT)
    assert (lanes.transport, lanes.why) == ("fast", "offered by both sides")
    assert not lanes.shared
    lanes.end_initial_set()
    assert (lanes.transport, lanes.why) == ("tcp", "offered by both sides")


def test_the_end_of_the_connection_is_no_broken_lane() -> None:
    """What carried the data until then is still named after it."""
    lanes = LaneSet("tcp", REPORT)
    lanes.end_initial_set()
    made = opened(lanes)
    joining = LaneEndpoint(2, "fast", cast("Any", _Lane()))
    lanes.add(joining)
    assert lanes.end() == [made, joining]
    assert not lanes.open
    assert (lanes.transport, lanes.why) == ("fast", "what fast is")
    assert joining.state is LaneState.ABANDONED
    lanes.advance(made, LaneInput.GONE, "reset")
    assert lanes.end() == [joining]
    assert not lanes.failed
