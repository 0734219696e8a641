"""Any life of transfers, links and processes: a state machine over a whole town.

Names are shared by three processes and used again and again while links are stopped,
cut, lost by one end and made anew, processes end and begin again, and memory is short.
What must hold at any time is checked after each step by :mod:`tests.transfers.town`.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.depth import examples
from tests.transfers.town import COUNT, LAYERS, NAMES, End, Inside, Town

picks = st.integers(0, 11)
names = st.sampled_from((*NAMES, "a", "b", "a"))
verbs = st.sampled_from(("publish", "expect", "pull", "push", "publish", "pull"))


def _one(of: Any, pick: int) -> Any:
    found = list(of)
    return found[pick % len(found)] if found else None


class Life(RuleBasedStateMachine):
    """Calls of applications, and what befalls links and processes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.town = Town()

    @initialize(verb=verbs, name=names, who=picks)
    def there_is_a_transfer(self, verb: str, name: str, who: int) -> None:
        self._begin(verb, name, who, 0, {})

    def teardown(self) -> None:
        try:
            self.town.finish_all()
        finally:
            self.town.close()

    # --- applications -----------------------------------------------------------------

    def _begin(
        self, verb: str, name: str, who: int, link: int, options: dict[str, Any]
    ) -> End | None:
        node = self.town.nodes[who % 3]
        by: Any = node.communicator
        if verb in ("pull", "push"):
            by = _one(node.communicator.live_connections, link)
            if node.index and link > 9:
                by = node.communicator.peer(self.town.address)
            if by is None:
                return None
        return self.town.begin(node, verb, name, by, options)

    @rule(
        verb=verbs,
        name=names,
        who=picks,
        link=picks,
        more=st.sampled_from(
            (
                {},
                {},
                {},
                {"deadline": 0.7},
                {"lease_s": 0.4},
                {"consumers": 2},
                {"growing": True},
                {"group_bytes": 1},
            )
        ),
    )
    def a_transfer_begins(
        self, verb: str, name: str, who: int, link: int, more: dict[str, Any]
    ) -> None:
        produces = verb in ("publish", "push")
        if "consumers" in more and verb != "publish":
            more = {}
        if not produces and {"growing", "group_bytes"} & more.keys():
            more = {}
        self._begin(verb, name, who, link, dict(more))

    @rule(
        names=st.tuples(names, names),
        who=st.tuples(picks, picks),
        push=st.booleans(),
        late=st.booleans(),
    )
    def both_ends_begin(
        self, names: tuple[str, str], who: tuple[int, int], push: bool, late: bool
    ) -> None:
        """The usual case: one listens for what the other asks for."""
        one, other = ("expect", "push") if push else ("publish", "pull")
        calls = [(one, who[0] % 3), (other, who[1] % 3)]
        for verb, node in reversed(calls) if late else calls:
            self._begin(verb, names[0], node, who[1], {})

    @rule(
        pick=picks,
        layers=st.sampled_from(
            [(0, LAYERS), (0, 1), (1, LAYERS), (LAYERS - 1, LAYERS)]
        ),
        places=st.sampled_from([(0, COUNT), (0, COUNT), (0, 1), (1, COUNT)]),
        later=st.integers(0, 3).map(lambda n: n == 0),
    )
    def a_part_is_ready(
        self, pick: int, layers: tuple[int, int], places: tuple[int, int], later: bool
    ) -> None:
        end = _one((e for e in self.town.open if e.unmarked), pick)
        if end is None:
            return
        named = COUNT - len(end.unnamed)
        wanted = {
            (layer, place)
            for layer in range(*layers)
            for place in range(*places)
            if place < named
        }
        if wanted and wanted <= end.unmarked:
            self.town.mark(end, wanted, later=later)

    @rule(pick=picks)
    def the_rest_is_ready_and_it_is_finished(self, pick: int) -> None:
        end = _one((e for e in self.town.open if e.produces and not e.finished), pick)
        if end is not None:
            self.town.mark_rest(end)

    @rule(pick=picks)
    def a_block_is_named(self, pick: int) -> None:
        end = _one((e for e in self.town.open if e.unnamed), pick)
        if end is not None:
            self.town.extend(end)

    @rule(pick=picks, well=st.integers(0, 4).map(bool))
    def what_a_mark_waits_for_happens(self, pick: int, well: bool) -> None:
        end = _one((e for e in self.town.ends if e.behind), pick)
        if end is not None:
            self.town.come_true(end, well=well)

    @rule(pick=picks)
    def a_producer_commits_what_there_is(self, pick: int) -> None:
        end = _one((e for e in self.town.open if e.produces and not e.finished), pick)
        if end is not None:
            self.town.finish(end, partial=True)

    @rule(pick=picks)
    def an_end_is_aborted(self, pick: int) -> None:
        end = _one(self.town.open, pick)
        if end is not None:
            self.town.abort(end)

    @rule(name=names, who=picks)
    def what_has_a_name_is_ended(self, name: str, who: int) -> None:
        self.town.end_by_name(self.town.nodes[who % 3], name)

    @rule(who=picks, count=st.integers(1, 4))
    def threads_of_codecs_work(self, who: int, count: int) -> None:
        Inside.jobs(self.town.nodes[who % 3].communicator).work(count)

    @rule(count=st.integers(1, 3))
    def memory_is_short(self, count: int) -> None:
        self.town.shortages = count

    # --- time -------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def some_turns(self, count: int) -> None:
        self.town.turns(count)

    @rule(seconds=st.sampled_from((0.01, 0.05, 0.2, 1.0, 2.5)))
    def time_passes(self, seconds: float) -> None:
        self.town.rest(seconds)

    # --- links and processes ----------------------------------------------------------

    def _connection(self, who: int, link: int) -> Any:
        return _one(self.town.nodes[who % 3].communicator.live_connections, link)

    @rule(who=picks, link=picks)
    def an_end_of_a_link_stops_reading(self, who: int, link: int) -> None:
        connection = self._connection(who, link)
        if connection is not None:
            self.town.stop_reading(connection)

    @rule()
    def links_go_on(self) -> None:
        self.town.go_on()

    @rule(who=picks, link=picks)
    def a_link_is_cut(self, who: int, link: int) -> None:
        connection = self._connection(who, link)
        if connection is not None:
            self.town.cut(connection)

    @rule(who=picks, link=picks)
    def a_link_is_lost_for_one_end(self, who: int, link: int) -> None:
        connection = self._connection(who, link)
        if connection is not None:
            self.town.break_unseen(self.town.nodes[who % 3], connection)

    @rule(who=picks, link=picks)
    def a_connection_is_closed(self, who: int, link: int) -> None:
        connection = self._connection(who, link)
        if connection is not None:
            self.town.close_connection(connection)

    @rule(who=st.integers(1, 2))
    def another_connection_is_made(self, who: int) -> None:
        self.town.dial(self.town.nodes[who])

    @rule(who=picks, graceful=st.booleans())
    def a_process_ends_and_begins_again(self, who: int, graceful: bool) -> None:
        self.town.restart(self.town.nodes[who % 3], graceful=graceful)

    # --- what holds -------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        self.town.check()


def test_what_ends_is_not_asked_for_again() -> None:
    """The machine found: a lease was over, and there was no memory for the outcome.

    Meanwhile the peer was asked on its next link, and nobody took the question back.
    """
    life = Life()
    try:
        life.there_is_a_transfer("push", "a", 2)
        life.a_link_is_cut(2, 0)
        life.time_passes(2.5)
        life.memory_is_short(3)
        life.a_link_is_cut(2, 0)
        life.some_turns(6)
        assert life.town.shortages < 3, "memory was not short in time"
    finally:
        life.teardown()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
