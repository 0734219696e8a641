"""Only what is missing is computed, once, and nobody decodes before it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.blocks import BlockSet, MissingBlocks, MissingOfGroup
from kvwire.kv.outcome import Outcome
from kvwire.kv.prefill_plan import PrefillPlan, PrefillRequest, plan_prefill
from tests.support.depth import examples

T = 4


def outcome(
    ids: list[int], lost: set[int], *, tokens: int | None = None, group: str = "kv"
) -> Outcome:
    """How a transfer of some blocks ended."""
    return grouped_outcome({group: ids}, {group: lost}, {group: tokens or len(ids) * T})


def grouped_outcome(
    lists: Mapping[str, list[int]],
    lost: Mapping[str, set[int]],
    tokens: Mapping[str, int],
) -> Outcome:
    """The same for several groups; the planner reads lists, tokens and missing."""
    arrays = {name: np.array(ids, np.int64) for name, ids in lists.items()}
    gone = {n: np.isin(ids, list(lost.get(n, ()))) for n, ids in arrays.items()}
    missing = {
        name: MissingOfGroup(
            ids[gone[name]],
            np.zeros(gone[name].sum(), np.uint16),
            range(1),
            np.ones((1, gone[name].sum()), np.bool_),
        )
        for name, ids in arrays.items()
    }
    return Outcome(
        complete=not any(map(np.any, gone.values())),
        landed=BlockSet({name: ids[~gone[name]] for name, ids in arrays.items()}),
        missing=MissingBlocks(missing, ["lost"]),
        usable_prefix=0,
        usable_tokens=0,
        lists=arrays,
        tokens=tokens,
    )


def request(
    name: str, blocks: list[int], tokens: int | None = None, cached: int = 0
) -> PrefillRequest[str]:
    return PrefillRequest(
        id=name,
        num_tokens=tokens or len(blocks) * T,
        blocks=blocks,
        block_tokens=T,
        cached_tokens=cached,
    )


def plan(*requests: PrefillRequest[str], **outcomes: Outcome) -> PrefillPlan[str]:
    return plan_prefill(requests, outcomes)


def test_the_first_plan_waits_for_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """These two import numpy.ma at their first call: 50 ms of an event loop."""
    end = outcome([4, 5, 6], {5})
    monkeypatch.delattr(np, "unique")
    monkeypatch.delattr(np, "isin")
    plan = plan_prefill([request("a", [4, 5, 6])], {"a": end})
    assert [(part.start, part.stop) for part in plan.prefill["a"]] == [(4, 12)]
    assert end.missing.reasons == ("lost",)


def test_the_first_in_order_owns() -> None:
    """The caller's order is its priority; a short owner leaves the rest to the next."""
    short, long = request("short", [1, 2]), request("long", [1, 2, 3])
    lost = outcome([1, 2, 3], {2, 3})
    first = plan_prefill([short, long], [lost])
    assert first.prefill == {"short": ((4, 8),), "long": ((8, 12),)}
    assert first.waits == {"long": "short"}
    second = plan_prefill([long, short], [lost])
    assert second.prefill == {"long": ((4, 12),), "short": ()}
    assert second.waits == {"short": "long"}


def test_a_block_lost_by_any_transfer_is_lost() -> None:
    """Two transfers wrote block 1; who knows what the one that failed left in it."""
    found = plan(
        request("a", [1]), request("b", [1]), a=outcome([1], set()), b=outcome([1], {1})
    )
    assert found.ready == ()
    assert found.waits == {"b": "a"}


def test_a_request_without_a_transfer_has_what_was_cached() -> None:
    found = plan(request("a", [1, 2, 3], cached=6), request("b", [4], cached=4))
    assert found.prefill == {"a": ((6, 12),)}
    assert found.ready == ("b",)


def test_a_transfer_of_fewer_tokens_leaves_the_rest() -> None:
    found = plan(request("a", [1, 2]), a=outcome([1, 2], set(), tokens=7))
    assert found.prefill == {"a": ((7, 8),)}


def test_cached_tokens_are_not_those_of_a_window() -> None:
    """Eight of twelve tokens were good before; the window is on the last four."""
    own = PrefillRequest(
        id="a",
        num_tokens=12,
        blocks={"full": [1, 2, 3], "window": [8, 9]},
        block_tokens={"full": 4, "window": 2},
        cached_tokens=8,
    )
    end = grouped_outcome({"full": [3]}, {}, {"full": 4})
    assert plan_prefill([own], [end]).prefill == {"a": ((0, 12),)}


def test_more_blocks_than_tokens_are_room_to_grow() -> None:
    found = plan(request("a", [1, 2, 9], tokens=7), a=outcome([1, 2], set()))
    assert found.ready == ("a",)


@pytest.mark.parametrize(
    ("window", "lost", "holes", "expected"),
    [
        # Block 3 of one group landed and block 3 of the other did not (R31).
        ([3, 1, 2, 4, 5, 6], {"full": {2}, "window": {4}}, False, (6, 12)),
        # A window on the last four tokens: there is none for an earlier end.
        ([8, 9], {}, False, None),
        ([8, 9], {"window": {8}}, False, (0, 12)),
        ([8, 9], {"full": {2}}, False, (0, 12)),
        # A hole in it, or before it, needs all that came before.
        ([8, 9], {"window": {8}}, True, (0, 12)),
        ([8, 9], {"full": {1}}, True, (0, 12)),
    ],
)
def test_groups(
    window: list[int],
    lost: dict[str, set[int]],
    holes: bool,
    expected: tuple[int, int] | None,
) -> None:
    """Three blocks of four tokens; and of two tokens all of them, or the last."""
    lists = {"full": [3, 1, 2], "window": window}
    grouped = PrefillRequest(
        id="a", num_tokens=12, blocks=lists, block_tokens={"full": 4, "window": 2}
    )
    tokens = {"full": 12, "window": 2 * len(window)}
    end = grouped_outcome(lists, lost, tokens)
    found = plan_prefill([grouped], [end], holes=holes)
    assert found.prefill == ({"a": (expected,)} if expected else {})
    assert found.ready == (() if expected else ("a",))


def test_blocks_are_shared_as_a_prefix_only() -> None:
    """A lost block behind different blocks cannot be computed for both."""
    with pytest.raises(
        UsageError, match=r"'b' lacks block 2 .* only as a common prefix"
    ):
        plan(
            request("a", [1, 2]),
            request("b", [3, 2]),
            a=outcome([1, 2], {1, 2}),
            b=outcome([3], {3}),
        )
    with pytest.raises(UsageError, match="'b' lacks block 2 of group 'kv'"):
        plan(request("a", [1, 2]), request("b", [2, 1]), a=outcome([1, 2], {1, 2}))


SHORT = {"full": [1], "window": [9]}
LONG = {"full": [1, 2], "window": [8]}


@pytest.mark.parametrize(
    ("short", "long", "lost"),
    [
        # The window of the second one lacks what the first one computes.
        (SHORT, LONG, {"full": {1, 2}, "window": {8, 9}}),
        # The first one decodes from block 1.
        (SHORT, LONG, {"window": {8}}),
        ({"window": [9], "full": [1]}, LONG, {"window": {8}}),
    ],
)
def test_a_window_does_not_share_a_prefix_alone(
    short: dict[str, list[int]], long: dict[str, list[int]], lost: dict[str, set[int]]
) -> None:
    sizes = {"full": 4, "window": 4}
    end = grouped_outcome(
        {"full": [1, 2], "window": [8, 9]}, lost, {"full": 8, "window": 8}
    )
    requests = [
        PrefillRequest(id="a", num_tokens=4, blocks=short, block_tokens=sizes),
        PrefillRequest(id="b", num_tokens=8, blocks=long, block_tokens=sizes),
    ]
    with pytest.raises(UsageError, match=r"'b' lacks block 1 .* again for its window"):
        plan_prefill(requests, [end])
    twin = replace(requests[1], id="twin")
    found = plan_prefill([requests[1], twin], [end])
    assert found.prefill == {"b": ((0, 8),), "twin": ()}
    assert found.waits == {"twin": "b"}


def test_a_window_may_have_no_block() -> None:
    own = replace(
        request("a", [1, 2]),
        blocks={"full": [1, 2], "window": []},
        block_tokens={"full": 4, "window": 4},
    )
    assert plan(own).prefill == {"a": ((0, 8),)}


def test_nobody_writes_where_another_decodes() -> None:
    """Block 2 is good and a decodes from it; b would compute it again."""
    with pytest.raises(UsageError, match="'b' lacks block 2"):
        plan(request("a", [2]), request("b", [3, 2]), a=outcome([2, 3], {3}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request("a", [1], tokens=5), "num_tokens=5, but its blocks hold 4"),
        (
            request("a", [1, 1]),
            "request 'a': blocks of group 'kv': block id 1 .* twice",
        ),
        (request("a", [-1]), "request 'a': .* block id -1 at position 0"),
        (request("a", [1], cached=5), "num_tokens=4 and cached_tokens=5"),
        (
            PrefillRequest(
                id="a", num_tokens=4, blocks={"x": [1]}, block_tokens={"y": 4}
            ),
            "block_tokens={'y': 4}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_requests_are_named(wrong: PrefillRequest[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_prefill([wrong], [])


@pytest.mark.parametrize("name", ["num_tokens", "cached_tokens", "block_tokens"])
@pytest.mark.parametrize("value", [True, "4", 2.5])
def test_what_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"request 'a': .*{name}={value!r}"):
        plan_prefill([replace(request("a", [1]), **{name: value})], [])


def test_numbers_of_any_type() -> None:
    numbers = {"num_tokens": 4, "cached_tokens": 1, "block_tokens": 4}
    of_numpy: dict[str, Any] = {n: np.int64(v) for n, v in numbers.items()}
    plain: dict[str, Any] = dict(numbers)
    one, other = (replace(request("a", [1]), **n) for n in (of_numpy, plain))
    assert repr(plan_prefill([one], [])) == repr(plan_prefill([other], []))


def test_requests_that_contradict_each_other_are_named() -> None:
    with pytest.raises(UsageError, match="request 'a' appears twice"):
        plan(request("a", [1]), request("a", [2]))
    other = PrefillRequest(id="b", num_tokens=4, blocks=[2], block_tokens=8)
    with pytest.raises(
        UsageError, match="'b' has block_tokens=8 in group 'kv', and another"
    ):
        plan(request("a", [1]), other)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[PrefillRequest[str]], list[Outcome]]:
    """Prompts that begin like an earlier one, and transfers of what was new."""
    requests: list[PrefillRequest[str]] = []
    ends: list[Outcome] = []
    flags = st.booleans()
    for number in range(draw(st.integers(1, 5))):
        shared: list[int] = []
        begins_like, moved = draw(flags), draw(flags)
        if requests and begins_like:
            parent: PrefillRequest[str] = draw(st.sampled_from(requests))
            shared = block_ids(parent)[: draw(st.integers(0, parent.num_tokens // T))]
        fresh = [100 * (number + 1) + n for n in range(draw(st.integers(0, 4)))]
        if not shared + fresh:
            fresh = [100 * (number + 1)]
        blocks = shared + fresh
        short = draw(st.integers(0, T - 1)) if fresh else 0
        requests.append(request(f"r{number}", blocks, len(blocks) * T - short))
        if fresh and moved:
            lost: set[int] = draw(st.sets(st.sampled_from(fresh)))
            ends.append(outcome(fresh, lost, tokens=len(fresh) * T - short))
    return list(draw(st.permutations(requests))), ends


@pytest.mark.parametrize("holes", [False, True])
@given(batches())
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_the_plan_is_right_when_carried_out(
    holes: bool, batch: tuple[list[PrefillRequest[str]], list[Outcome]]
) -> None:
    """Carry it out token by token: nothing is missing, computed twice or too soon."""
    requests, ends = batch
    valid: dict[int, int] = {}
    for end in ends:
        for position, block in enumerate(end.lists["kv"].tolist()):
            if ("kv", block) not in end.missing:
                valid[block] = min(T, end.tokens["kv"] - position * T)
    landed = dict(valid)
    found = plan_prefill(requests, ends, holes=holes)
    assert {*found.ready, *found.prefill} == {r.id for r in requests}
    assert len(found.ready) + len(found.prefill) == len(requests)
    by_id = {r.id: r for r in requests}
    for name in found.ready:
        assert holds_all(by_id[name], valid)
    for name in found.prefill:
        assert not holds_all(by_id[name], valid)
    computed: set[tuple[int, int]] = set()
    done = set(found.ready)
    for name in found.prefill:
        owner = found.waits.get(name)
        assert owner is None or owner in done, "owners come before those who wait"
        own = by_id[name]
        blocks = block_ids(own)
        for start, stop in found.prefill[name]:
            for token in range(start, stop):
                block, offset = blocks[token // T], token % T
                assert token == 0 or reaches(own, valid, token), (
                    "a token without a past"
                )
                assert not (
                    landed.get(block, 0) > offset
                    if holes
                    else reaches(own, landed, token + 1)
                ), "it was there"
                assert (block, offset) not in computed, "computed twice"
                computed.add((block, offset))
                valid[block] = max(valid.get(block, 0), offset + 1)
        assert holds_all(own, valid)
        done.add(name)
    written = {block for block, _ in computed}
    for name in found.ready:
        assert not written & set(block_ids(by_id[name])), "written while it is read"


def block_ids(own: PrefillRequest[str]) -> list[int]:
    assert isinstance(own.blocks, list)
    return own.blocks


def holds_all(own: PrefillRequest[str], valid: dict[int, int]) -> bool:
    return reaches(own, valid, own.num_tokens)


def reaches(own: PrefillRequest[str], valid: dict[int, int], tokens: int) -> bool:
    """Whether every one of the first tokens of a request is valid."""
    blocks = block_ids(own)
    return all(valid.get(blocks[n // T], 0) > n % T for n in range(tokens))
