"""The tables of transfers and legs: every state with every input, and sequences."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvwire
from kvwire.errors import WireCode
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.transfers.leg import Leg
from kvwire.transfers.offer import TransferOffer
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
from kvwire.transfers.timings import PhaseTimer
from kvwire.types import BufferId
from tests.support.depth import examples


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


# --- sequences ------------------------------------------------------------------------


class Link:
    """A connection of which only requests are there; it says what may touch memory."""

    class peer:  # noqa: N801 - stands for the attribute
        origin = b"peer"

    def __init__(self) -> None:
        self.request = RequestRecord(
            kind=RequestKind.OUTGOING, buffer=None, nbytes=0, state=RequestStage.POSTED
        )
        self.transfers = self.core = self
        self.full = False
        self.forgotten = False
        # What the core has reported, and the leg has not taken in yet.
        self.error: kvwire.KVWireError | None = None

    def start_transfer(self, leg: Leg, **more: object) -> None:
        if self.full:
            raise kvwire.UsageError("full")
        leg.core, self.request.context = self.request, leg

    def refuse(
        self, request: RequestRecord, error: kvwire.KVWireError, code: WireCode
    ) -> None:
        assert request is self.request
        self.end(error)

    def end(self, error: kvwire.KVWireError) -> None:
        self.request.advance(RequestInput.FAIL)
        self.error = error

    def retire(self, request: RequestRecord) -> list[BufferId]:
        assert not self.forgotten
        return []

    def forget(self, request: RequestRecord) -> list[BufferId]:
        assert request.over
        self.forgotten = True
        return []

    def run(self) -> None:
        """Nothing to carry out."""


class End:
    """What a leg asks for, without plans and memory."""

    _key, _priority, _receives = b"t", 0, False

    @staticmethod
    def _offer(peer_id: bytes) -> TransferOffer:
        return TransferOffer(
            geometry=msgspec.Raw(b"\x90"), endpoint_id=b"", peer_id=peer_id
        )


class OneLeg(Leg):
    """What both ends do when a request is over, without plans and memory."""

    def ended(self, error: kvwire.KVWireError | None) -> None:
        self.step(LegInput.LOSE if self.may_resume(error) else LegInput.END)


# When the peer agrees, all has landed, and the producer commits.
NEWS = {
    LegInput.AGREE: (LegState.ASKED,),
    LegInput.SETTLE: (LegState.MOVING,),
    LegInput.COMMIT: (LegState.MOVING, LegState.SETTLED),
}


class Life(RuleBasedStateMachine):
    """One leg over any number of links, which do whatever links do.

    Every rule is something that can happen then: the table has a step for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []
        link: Any = Link()
        end: Any = End
        self.leg = OneLeg(end, link, PhaseTimer(), asks=True)
        self._ask(link)

    def _ask(self, link: Any) -> None:
        self.leg.ask(link)
        self.links.append(link)

    @property
    def link(self) -> Link:
        return self.links[-1]

    @rule(news=st.sampled_from(list(NEWS)))
    def something_is_heard(self, news: LegInput) -> None:
        if self.leg.state in NEWS[news]:
            self.leg.step(news)

    @rule()
    def this_side_ends_it(self) -> None:
        self.leg.refuse(kvwire.RequestCancelled("no"), WireCode.CANCELLED)

    @precondition(lambda self: not self.link.request.over)
    @rule(lost=st.booleans())
    def the_core_ends_its_request(self, lost: bool) -> None:
        """The leg takes that in later; this side may refuse meanwhile."""
        error: kvwire.KVWireError = kvwire.PeerCancelled("the peer")
        self.link.end(kvwire.ConnectionLost("cut") if lost else error)

    @precondition(lambda self: self.link.error is not None)
    @rule()
    def the_leg_takes_it_in(self) -> None:
        error, self.link.error = self.link.error, None
        if self.link.request.context is self.leg:
            self.leg.ended(error)

    @rule()
    def the_transfer_lets_go_of_its_memory(self) -> None:
        """Its link has ended, or its outcome is known: that may be at any time."""
        self.leg.release()

    @precondition(lambda self: self.leg.state is LegState.WAITING)
    @rule(full=st.booleans())
    def another_link_comes(self, full: bool) -> None:
        link: Any = Link()
        link.full = full
        try:
            self._ask(link)
        except kvwire.UsageError:
            assert self.leg.state is LegState.WAITING

    @invariant()
    def what_waits_has_no_link_that_may_touch_its_memory(self) -> None:
        if self.leg.state is LegState.WAITING:
            assert self.leg.core is None
        if self.leg.state is LegState.LOST:
            assert self.leg.core is not None
        for link in self.links[:-1]:
            assert link.request.over
            assert link.forgotten
        if not self.link.request.over:
            assert self.leg.core is self.link.request
            assert self.leg.state in ON_LINK

    @invariant()
    def what_is_over_stays_over(self) -> None:
        if self.leg.state is LegState.OVER:
            assert self.link.request.over


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(1500), stateful_step_count=30)
