"""The tables: every state with every input."""

from __future__ import annotations

import itertools

import pytest

from kvwire.errors import UnexpectedFrame
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import (
    CLOSE_TRANSITIONS,
    REQUEST_TRANSITIONS,
    TERMINAL,
    CloseInput,
    CloseState,
    RequestInput,
    RequestKind,
    RequestStage,
)


@pytest.mark.rule("KVW-RQ-01", "keeps")
def test_every_state_with_every_input() -> None:
    """A step of the table, or an error that changes nothing; from an end, no step."""
    for kind, state, event in itertools.product(
        RequestKind, RequestStage, RequestInput
    ):
        made = RequestRecord(kind=kind, buffer=None, nbytes=1, state=state)
        target = REQUEST_TRANSITIONS.get((kind, state, event))
        if target is None:
            with pytest.raises(UnexpectedFrame):
                made.advance(event)
            assert made.state is state
        else:
            assert state not in TERMINAL
            made.advance(event)
            assert made.state is target
            assert (event is RequestInput.FAIL) == (target is RequestStage.FAILED)


def test_every_phase_with_every_turn() -> None:
    """What is missing from the table cannot be caused; the rest stays in it."""
    missing = set(itertools.product(CloseState, CloseInput)) - CLOSE_TRANSITIONS.keys()
    assert missing == {
        (CloseState.OPEN, CloseInput.IDLE),  # nobody has asked to close
        (CloseState.CLOSE_SENT, CloseInput.IDLE),  # it has been said
        (
            CloseState.CLOSE_RECEIVED,
            CloseInput.PEER_CLOSED,
        ),  # a second CLOSE breaks a rule
        (CloseState.CLOSED, CloseInput.PEER_CLOSED),
        (CloseState.CLOSED, CloseInput.IDLE),
    }
    assert set(CLOSE_TRANSITIONS.values()) == set(CloseState) - {CloseState.OPEN}
