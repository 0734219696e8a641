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
from tests.transfers.town import COUNT, LAYERS, End, Town
from tests.transfers.town_inside import Inside

# Most often the newest, so that several rules meet one transfer.
picks = st.sampled_from((0, 0, 0, 0, 0, 1, 1, 2, 3, 5, 10))
names = st.sampled_from(("a", "a", "b", "coded"))
verbs = st.sampled_from(("publish", "expect", "pull", "push", "publish", "pull"))
options: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {},
        {},
        {"deadline": 0.7},
        {"lease_s": 0.4},
        {"consumers": 2},
        {"growing": True},
        {"group_bytes": 1},
    ]
)


def _of_verb(verb: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that a verb has."""
    lacks = set() if verb == "publish" else {"consumers"}
    if verb in ("expect", "pull"):
        lacks |= {"growing", "group_bytes"}
    return {name: value for name, value in options.items() if name not in lacks}


def _one(of: Any, pick: int) -> Any:
    found = list(of)
    return found[-1 - pick % len(found)] if found else None


class Life(RuleBasedStateMachine):
    """Calls of applications, and what befalls links and processes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.town = Town()

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

    @initialize(name=names, spoke=picks, push=st.booleans())
    def there_is_a_transfer(self, name: str, spoke: int, push: bool) -> None:
        self.both_ends_begin(name, spoke, push, late=False, hub_asks=False, more={})

    @rule(verb=verbs, name=names, who=picks, link=picks, more=options)
    def an_end_begins(
        self, verb: str, name: str, who: int, link: int, more: dict[str, Any]
    ) -> None:
        self._begin(verb, name, who, link, _of_verb(verb, more))

    @rule(
        name=names,
        spoke=picks,
        push=st.booleans(),
        late=st.booleans(),
        hub_asks=st.booleans(),
        more=options,
    )
    def both_ends_begin(
        self,
        name: str,
        spoke: int,
        push: bool,
        late: bool,
        hub_asks: bool,
        more: dict[str, Any],
    ) -> None:
        """The usual case: one waits for what the other asks for."""
        waits, asks = ("expect", "push") if push else ("publish", "pull")
        other = 1 + spoke % 2
        calls = [(waits, other if hub_asks else 0), (asks, 0 if hub_asks else other)]
        for verb, node in reversed(calls) if late else calls:
            self._begin(verb, name, node, spoke // 2, _of_verb(verb, more))
        self.town.turns(4)

    @rule(
        pick=picks,
        layers=st.sampled_from(
            [(0, LAYERS), (0, 1), (1, LAYERS), (LAYERS - 1, LAYERS)]
        ),
        places=st.sampled_from([(0, COUNT), (0, COUNT), (0, 1), (1, COUNT)]),
        later=st.integers(0, 3).map(lambda number: number == 3),
        turns=st.integers(0, 2),
    )
    def a_part_is_ready(
        self,
        pick: int,
        layers: tuple[int, int],
        places: tuple[int, int],
        later: bool,
        turns: int,
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
            self.town.turns(turns)

    @rule(pick=picks, turns=st.integers(0, 3))
    def the_rest_is_ready_and_it_is_finished(self, pick: int, turns: int) -> None:
        end = _one((e for e in self.town.open if e.produces and not e.finished), pick)
        if end is not None:
            self.town.mark_rest(end)
            self.town.turns(turns)

    @rule(pick=picks, well=st.integers(0, 4).map(bool))
    def what_is_waited_for_comes(self, pick: int, well: bool) -> None:
        """Of a mark, of a growing transfer, or of a thread that encodes."""
        waiting = [e for e in self.town.ends if e.behind or e.unnamed]
        for node in self.town.nodes:
            Inside.jobs(node.communicator).work(pick % 4)
        end = _one(waiting, pick)
        if end is not None and end.behind:
            self.town.come_true(end, well=well)
        elif end is not None and not end.end.done():
            self.town.extend(end)

    @rule(
        pick=picks,
        how=st.sampled_from(("abort", "abort", "name", "partial")),
        short=st.sampled_from((0, 0, 2)),
        asked=st.booleans(),
    )
    def an_end_is_ended(self, pick: int, how: str, short: int, asked: bool) -> None:
        """Without memory for its outcome it goes on ending, and a peer may ask."""
        end = _one(self.town.open, pick)
        if end is None:
            return
        self.town.shortages = short
        if how == "abort":
            self.town.abort(end)
        elif how == "name":
            self.town.end_by_name(end.node, end.name)
        elif end.produces and not end.finished:
            self.town.finish(end, partial=True)
        if short and asked and not end.asks:
            verb = "pull" if end.produces else "push"
            self._begin(verb, end.name, 0 if end.node.index else 1, 0, {})
            self.town.turns(4)

    @rule(pick=picks, which=st.sampled_from(("none", "producer", "all")))
    def marks_are_not_taken_in(self, pick: int, which: str) -> None:
        """They are on their way, and so in use, when one end or all are ended."""
        end = _one((e for e in self.town.open if e.unmarked), pick)
        if end is None:
            return
        for node in self.town.nodes:
            if node is not end.node:
                for connection in node.communicator.live_connections:
                    self.town.stop_reading(connection)
        self.town.mark(end, {min(end.unmarked)}, later=False)
        self.town.turns(2)
        for one in self.town.open:
            if which == "all" or (which == "producer" and one is end):
                self.town.abort(one)
        self.town.turns(2)

    # --- time -------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def some_turns(self, count: int) -> None:
        self.town.turns(count)

    @rule(seconds=st.sampled_from((0.01, 0.05, 0.2, 0.2, 1.0, 2.5)))
    def time_passes(self, seconds: float) -> None:
        self.town.rest(seconds)

    # --- links, processes, memory -----------------------------------------------------

    @rule(
        who=picks,
        link=picks,
        how=st.sampled_from(("stops", "stops", "cut", "cut", "lost", "late", "closed")),
    )
    def a_link_suffers(self, who: int, link: int, how: str) -> None:
        node = self.town.nodes[who % 3]
        connection = _one(node.communicator.live_connections, link)
        if connection is None:
            return
        if how == "stops":
            self.town.stop_reading(connection)
        elif how == "cut":
            self.town.cut(connection)
        elif how == "lost":
            self.town.break_unseen(connection)
        elif how == "late":
            self.town.close_late(connection)
        else:
            self.town.close_connection(connection)

    @rule(
        pick=picks,
        who=st.integers(1, 2),
        late=st.booleans(),
        turns=st.sampled_from((0, 0, 1, 1, 2, 2, 3, 5, 8)),
    )
    def a_link_is_lost_and_the_next_too(
        self, pick: int, who: int, late: bool, turns: int
    ) -> None:
        """The second is lost in a handshake, between ask and agree, or a bit later.

        Segments have moved on the first; its other end may take long to close.
        """
        end = _one((e for e in self.town.open if e.unmarked), pick)
        if end is not None:
            self.town.mark(end, {min(end.unmarked)}, later=False)
            self.town.turns(4)
            who = end.node.index or who
        hub, node = self.town.nodes[0], self.town.nodes[who]
        communicator = node.communicator
        before = list(communicator.live_connections)
        there = hub.communicator.live_connections
        far = _one((c for c in there if c.peer.name == node.name), 0)
        if not before or far is None:
            return
        if late:
            self.town.close_late(far)
        else:
            self.town.cut(before[-1])
        for _ in range(30):
            self.town.turns(1)
            new = [c for c in communicator.live_connections if c not in before]
            if new:
                self.town.turns(turns)
                self.town.cut(new[-1])
                return

    @rule(
        pick=picks,
        how=st.sampled_from(("stops", "cut", "lost", "late")),
        over=st.booleans(),
        far=st.booleans(),
    )
    def a_link_suffers_in_time(
        self, pick: int, how: str, over: bool, far: bool
    ) -> None:
        """As soon as a consumer has something, or all before its producer knows."""
        end = _one((e for e in self.town.open if not e.produces), pick)
        if end is None:
            return
        for _ in range(30):
            if (
                end.end.done()
                if over
                else any(map(end.end.layer_landed, range(LAYERS)))
            ):
                break
            self.town.turns(1)
        else:
            return
        node = self.town.nodes[0 if far else max(1, end.node.index)]
        self.a_link_suffers(node.index, 0, how)

    @rule(who=st.integers(1, 2), dials=st.booleans())
    def links_go_on(self, who: int, dials: bool) -> None:
        self.town.go_on()
        if dials:
            self.town.dial(self.town.nodes[who])

    @rule(
        who=picks,
        how=st.sampled_from(("short", "short", "short", "ends", "closes")),
        count=st.integers(1, 3),
    )
    def a_process_suffers(self, who: int, how: str, count: int) -> None:
        if how == "short":
            self.town.shortages = count
        else:
            self.town.restart(self.town.nodes[who % 3], graceful=how == "closes")

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
        life.an_end_begins("push", "a", 2, 0, {})
        life.a_link_suffers(2, 0, "cut")
        life.time_passes(2.5)
        life.a_process_suffers(0, "short", 3)
        life.a_link_suffers(2, 0, "cut")
        life.some_turns(6)
        assert life.town.shortages < 3, "memory was not short in time"
    finally:
        life.teardown()


def test_a_peer_learns_the_reason_on_its_next_link() -> None:
    """The link was lost that should have brought it."""
    life = Life()
    town = life.town
    try:
        life.both_ends_begin("a", 0, False, False, False, {})
        out, inc = town.ends
        town.turns(10)
        assert inc.end.met
        here = town.nodes[1].communicator.live_connections[0]
        town.stop_reading(here)
        town.abort(out)
        town.turns(4)
        assert not inc.end.done()
        town.cut(here)
        town.go_on()
        town.rest(0.5)
        assert "given up" in inc.end.outcome.missing.reasons[0]
    finally:
        life.teardown()


def test_a_leg_goes_on_once_its_last_link_has_released_its_memory() -> None:
    """Its peer asks on a new link, and gets no answer before that."""
    life = Life()
    town = life.town
    try:
        life.both_ends_begin("a", 0, False, False, False, {})
        out, inc = town.ends
        town.turns(10)
        assert inc.end.met
        hub = town.nodes[0].communicator
        town.close_late(next(c for c in hub.live_connections if c.peer.name == "q"))
        town.rest(0.5)
        assert town.nodes[1].communicator.live_connections, "it has not come back"
        town.mark_rest(out)
        town.rest(0.5)
        assert not inc.end.done()
        town.check()
        town.go_on()
        town.rest(0.5)
        assert inc.end.outcome.complete
        assert out.end.outcome.complete
    finally:
        life.teardown()


def test_a_transfer_without_memory_for_its_outcome_answers_nobody() -> None:
    """A peer that asks meanwhile gets the reason once there is an outcome."""
    life = Life()
    town = life.town
    try:
        town.rest(0.1)
        life.an_end_begins("publish", "a", 0, 0, {})
        town.shortages = 2
        town.abort(town.ends[0])
        life.an_end_begins("pull", "a", 1, 0, {})
        town.turns(10)
        out, inc = town.ends
        assert not out.end.done()
        assert not inc.end.done()
        assert not inc.end.met
        town.rest(1.0)
        assert "given up" in inc.end.outcome.missing.reasons[0]
    finally:
        life.teardown()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
