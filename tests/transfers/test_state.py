"""The tables of transfers and attempts: every state with every input, and sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvwire
from kvwire.errors import WireCode
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.transfers.base import Attempt, recoverable
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.state import (
    ATTEMPT_TRANSITIONS,
    OFF_LINK,
    ON_LINK,
    TRANSFER_TRANSITIONS,
    UNNOTIFIED,
    AttemptInput,
    AttemptState,
    TransferInput,
    TransferState,
)
from kvwire.types import BufferId
from tests.support.depth import examples


@pytest.mark.parametrize(
    ("table", "states", "inputs"),
    [
        (TRANSFER_TRANSITIONS, TransferState, TransferInput),
        (ATTEMPT_TRANSITIONS, AttemptState, AttemptInput),
    ],
)
def test_every_state_with_every_input(table: Any, states: Any, inputs: Any) -> None:
    """A step to another state, or an error that names both."""
    for state, event in itertools.product(states, inputs):
        target = table.get((state, event))
        if target is None:
            with pytest.raises(ValueError, match=f"{event.value} of .* {state.value}"):
                table[state, event]
        else:
            assert target is not state or state is AttemptState.REFUSED


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
    into = {event for (_, event), to in ATTEMPT_TRANSITIONS.items() if to in OFF_LINK}
    assert into == {AttemptInput.LOSE, AttemptInput.RELEASE}
    for (state, event), target in ATTEMPT_TRANSITIONS.items():
        if target is AttemptState.WAITING:
            assert (state, event) == (AttemptState.LOST, AttemptInput.RELEASE)
        if state not in ON_LINK and target in ON_LINK:
            assert (state, event) == (AttemptState.WAITING, AttemptInput.RESUME)
    assert not [s for s, _ in ATTEMPT_TRANSITIONS if s is AttemptState.OVER]


def test_the_sets_of_states_share_nothing_and_lack_nothing() -> None:
    assert not ON_LINK & UNNOTIFIED
    assert ON_LINK | UNNOTIFIED | {AttemptState.OVER} == set(AttemptState)


# --- sequences ------------------------------------------------------------------------


class Link:
    """A connection of which only requests are there; it says what may touch memory."""

    class peer:  # noqa: N801 - stands for the attribute
        origin = b"peer"

    def __init__(self) -> None:
        self.request = RequestRecord(
            kind=RequestKind.OUTGOING, buffer=None, nbytes=0, state=RequestStage.POSTED
        )
        self.transfers = self
        self.full = False
        self.forgotten = False
        # What the core has reported, and the attempt has not heard of yet.
        self.error: kvwire.KVWireError | None = None

    def start_transfer(self, attempt: Attempt, **more: object) -> None:
        if self.full:
            raise kvwire.UsageError("full")
        attempt.core, self.request.context = self.request, attempt

    def refuse(
        self, request: RequestRecord, error: kvwire.KVWireError, code: WireCode
    ) -> None:
        assert request is self.request
        self.end(error)

    def end(self, error: kvwire.KVWireError) -> None:
        self.request.advance(RequestInput.FAIL)
        self.error = error

    def retire(self, request: RequestRecord) -> list[BufferId]:
        assert not request.over
        return []

    def forget(self, request: RequestRecord) -> list[BufferId]:
        assert request.over
        self.forgotten = True
        return []

    def run(self) -> None:
        """Nothing to carry out."""


class End:
    """What an attempt asks for, without plans and memory."""

    key, priority, receives = b"t", 0, False

    @staticmethod
    def description(peer_id: bytes) -> TransferOffer:
        return TransferOffer(geometry=(), endpoint_id=b"", peer_id=peer_id)


class OneAttempt(Attempt):
    """What both ends do when a request is over, without plans and memory."""

    def ended(self, error: kvwire.KVWireError | None) -> None:
        goes_on = recoverable(error) and self.state in ON_LINK
        self.state = ATTEMPT_TRANSITIONS[
            self.state, AttemptInput.LOSE if goes_on else AttemptInput.END
        ]


# When the peer agrees, all has landed, and the producer commits.
NEWS = {
    AttemptInput.AGREE: (AttemptState.ASKED, AttemptState.REFUSED),
    AttemptInput.SETTLE: (AttemptState.MOVING, AttemptState.REFUSED),
    AttemptInput.COMMIT: (AttemptState.MOVING, AttemptState.SETTLED),
}


class Life(RuleBasedStateMachine):
    """One attempt over any number of links, which do whatever links do.

    Every rule is something that can happen then: the table has a step for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []
        link: Any = Link()
        self.attempt = OneAttempt(link, asks=True)
        self._ask(link)

    def _ask(self, link: Any) -> None:
        end: Any = End
        self.attempt.ask(link, end)
        self.links.append(link)

    @property
    def link(self) -> Link:
        return self.links[-1]

    @rule(news=st.sampled_from(list(NEWS)))
    def something_is_heard(self, news: AttemptInput) -> None:
        if self.attempt.state in NEWS[news]:
            self.attempt.state = ATTEMPT_TRANSITIONS[self.attempt.state, news]

    @rule()
    def this_side_ends_it(self) -> None:
        self.attempt.refuse(kvwire.RequestCancelled("no"), WireCode.CANCELLED)

    @precondition(lambda self: not self.link.request.over)
    @rule(lost=st.booleans())
    def the_core_ends_its_request(self, lost: bool) -> None:
        """The attempt hears of that later; this side may refuse meanwhile."""
        error: kvwire.KVWireError = kvwire.PeerCancelled("the peer")
        self.link.end(kvwire.ConnectionLost("cut") if lost else error)

    @precondition(lambda self: self.link.error is not None)
    @rule()
    def the_attempt_hears_of_it(self) -> None:
        error, self.link.error = self.link.error, None
        if self.link.request.context is self.attempt:
            self.attempt.ended(error)

    @rule()
    def the_transfer_lets_go_of_its_memory(self) -> None:
        """Its link has ended, or its outcome is known: that may be at any time."""
        self.attempt.release()

    @precondition(lambda self: self.attempt.state is AttemptState.WAITING)
    @rule(full=st.booleans())
    def another_link_comes(self, full: bool) -> None:
        link: Any = Link()
        link.full = full
        self.attempt.state = ATTEMPT_TRANSITIONS[
            self.attempt.state, AttemptInput.RESUME
        ]
        try:
            self._ask(link)
        except kvwire.UsageError:
            assert self.attempt.state is AttemptState.WAITING

    @invariant()
    def what_waits_has_no_link_that_may_touch_its_memory(self) -> None:
        if self.attempt.state is AttemptState.WAITING:
            assert self.attempt.core is None
        if self.attempt.state is AttemptState.LOST:
            assert self.attempt.core is not None
        for link in self.links[:-1]:
            assert link.request.over
            assert link.forgotten
        if not self.link.request.over:
            assert self.attempt.core is self.link.request
            assert self.attempt.state in ON_LINK

    @invariant()
    def what_is_over_stays_over(self) -> None:
        if self.attempt.state is AttemptState.OVER:
            assert self.link.request.over


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(1500), stateful_step_count=30)
