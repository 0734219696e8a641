"""The tables of transfers and legs: every state with every input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvwire.transfers.state import (
    LEG_TRANSITIONS,
    OFF_LINK,
    ON_LINK,
    TRANSFER_TRANSITIONS,
    UNNOTIFIED,
    LegInput,
    LegState,
    TransferInput,
    TransferState,
)


@pytest.mark.parametrize(
    ("table", "states", "inputs"),
    [
        (TRANSFER_TRANSITIONS, TransferState, TransferInput),
        (LEG_TRANSITIONS, LegState, LegInput),
    ],
)
def test_every_state_with_every_input(table: Any, states: Any, inputs: Any) -> None:
    """A step to another state, or an error that names both."""
    for state, event in itertools.product(states, inputs):
        target = table.get((state, event))
        if target is None:
            why = f"{event.value} is not allowed for a .* {state.value}"
            with pytest.raises(ValueError, match=why):
                table[state, event]
        else:
            assert target is not state or state is LegState.REFUSED


def test_a_transfer_ends_once_and_drains_last() -> None:
    """There is no way back, and one way to each end."""
    order = list(TransferState)
    for (state, _), target in TRANSFER_TRANSITIONS.items():
        assert order.index(target) > order.index(state)
    for event in (TransferInput.RECORD, TransferInput.DRAIN):
        assert sum(taken is event for _, taken in TRANSFER_TRANSITIONS) == 1
    assert not [s for s, _ in TRANSFER_TRANSITIONS if s is TransferState.DRAINED]


def test_memory_is_used_anew_only_after_its_link_has_let_go() -> None:
    """No step but RELEASE leads to WAITING, and none but RESUME back to a link."""
    into = {event for (_, event), to in LEG_TRANSITIONS.items() if to in OFF_LINK}
    assert into == {LegInput.LOSE, LegInput.RELEASE}
    for (state, event), target in LEG_TRANSITIONS.items():
        if target is LegState.WAITING:
            assert (state, event) == (LegState.LOST, LegInput.RELEASE)
        if state not in ON_LINK and target in ON_LINK:
            assert (state, event) == (LegState.WAITING, LegInput.RESUME)
    assert not [s for s, _ in LEG_TRANSITIONS if s is LegState.OVER]


GONE = {LegState.LOST, LegState.WAITING, LegState.OVER}
REFUSED = {LegState.REFUSED}
AGREED = {LegState.MOVING, LegState.SETTLED, LegState.COMMITTED}
# Why the other pairs do not meet: for each input, states and the reason.
NEVER: dict[LegInput, list[tuple[set[LegState], str]]] = {
    LegInput.AGREE: [
        (AGREED, "a request is agreed on once: KVW-TR-02"),
        (REFUSED, "Leg.agreed ignores the answer"),
        (GONE, "no request of the leg is open"),
    ],
    LegInput.SETTLE: [
        ({LegState.ASKED}, "the core settles only what was agreed on"),
        ({LegState.SETTLED}, "the transfer has ended with it, and Leg.event knows"),
        ({LegState.COMMITTED}, "a producer settles right after AGREE, before marks"),
        (REFUSED, "Leg.event ignores it"),
        (GONE, "no request of the leg is open"),
    ],
    LegInput.COMMIT: [
        (set(LegState) - {LegState.MOVING, LegState.SETTLED}, "SendFlow.send returns"),
    ],
    LegInput.REFUSE: [
        (REFUSED | GONE, "Leg.refuse does nothing: the request is over"),
    ],
    LegInput.LOSE: [
        (REFUSED, "Leg.may_resume: its error is this side's own"),
        (GONE, "each request ends once"),
    ],
    LegInput.RELEASE: [
        (set(LegState) - {LegState.LOST}, "Leg.release asks for LOST"),
    ],
    LegInput.RESUME: [
        (set(LegState) - {LegState.WAITING}, "answer_of and reattach ask for WAITING"),
    ],
    LegInput.END: [(GONE, "each request ends once")],
}


def test_each_pair_is_a_step_or_never_meets() -> None:
    pairs = set(itertools.product(LegState, LegInput))
    never = [
        (state, event)
        for event, reasons in NEVER.items()
        for states, _ in reasons
        for state in states
    ]
    assert len(never) == len(set(never))
    assert set(never) == pairs - set(LEG_TRANSITIONS)


def test_the_sets_of_states_share_nothing_and_lack_nothing() -> None:
    assert not ON_LINK & UNNOTIFIED
    assert ON_LINK | UNNOTIFIED | {LegState.OVER} == set(LegState)
