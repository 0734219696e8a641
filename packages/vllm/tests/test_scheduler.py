"""The scheduler's side, step by step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.limits import KV_BLOCK_TOKENS_MAX
from kvwire_vllm.caches import CacheShape
from kvwire_vllm.metadata import ComputedTokens, SendPrompt
from kvwire_vllm.references import References
from kvwire_vllm.scheduler import SchedulerSide
from packages.vllm.tests.support.fakes import (
    SHAPE,
    Cached,
    Feature,
    New,
    Output,
    Request,
    chunk,
)
from packages.vllm.tests.support.steps import SPAN
from tests.support.depth import examples

TOKENS = list(range(100, 110))  # ten: two blocks and a half
PEERS = References(peers=["a:1", "b:2"])
SENDS = {"do_remote_decode": True, "transfer_id": "t"}


def loads(**more: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote": ["a:1"],
        **more,
    }


def side() -> SchedulerSide:
    made = SchedulerSide([SHAPE], PEERS)
    made.set_addresses({(0, 1): "b:2", (0, 0): "a:1"})
    return made


def prefilling(blocks: list[int]) -> tuple[SchedulerSide, Request]:
    scheduler, request = side(), Request("r", TOKENS, dict(SENDS))
    scheduler.allocated(request, [blocks], 0)
    return scheduler, request


def first_step(blocks: list[int], tokens: int, computed: int = 0) -> Output:
    return Output({"r": tokens}, [New("r", (blocks,), computed)])


@pytest.mark.parametrize("blocks", [[7, 8, 9], [7, 8, 9, 10]])
def test_a_prompt_in_one_step(blocks: list[int]) -> None:
    """vLLM may allocate for tokens to come; blocks behind the prompt are not sent."""
    scheduler, request = prefilling(blocks)
    step = scheduler.step(first_step(blocks, 10))
    (send,) = step.sends
    assert (send.blocks, send.tokens) == ({"0": [7, 8, 9]}, 10)
    assert len(send.hashes["0"]) == 3
    assert step.written == [ComputedTokens(request_id="r", blocks={}, stop=10)]
    assert scheduler.finished(request) == (
        True,
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "computed": True,
            "transfer_id": "t",
            "remote": ["a:1", "b:2"],
        },
    )


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ({"trace_headers": None}, {"traceparent": ""}),
        ({"trace_headers": {"tracestate": "a=1"}}, {"traceparent": ""}),
        ({"trace_headers": {"traceparent": SPAN}}, {"traceparent": SPAN}),
        # What vLLM schedules first is moved first.
        ({"priority": 0}, {"priority": 127}),
        ({"priority": -3}, {"priority": 130}),
        ({"priority": -1000}, {"priority": 255}),
        ({"priority": 1000}, {"priority": 0}),
    ],
)
def test_what_goes_with_a_transfer(says: dict[str, Any], told: dict[str, Any]) -> None:
    for params in (SENDS, loads()):
        scheduler, request = side(), Request("r", TOKENS, dict(params), **says)
        scheduler.allocated(request, [[7, 8, 9]], 10)
        step = scheduler.step(first_step([7, 8, 9], 10))
        (moved,) = step.sends or step.loads
        assert {name: getattr(moved, name) for name in told} == told


def test_a_prompt_in_chunks() -> None:
    scheduler, _ = prefilling([7])
    assert scheduler.step(first_step([7], 3)).written[0].stop == 3
    step = scheduler.step(chunk("r", [8], 3, 5))
    assert step.written == [ComputedTokens(request_id="r", blocks={"0": [8]}, stop=8)]
    step = scheduler.step(chunk("r", [9], 8, 2))
    assert step.written == [ComputedTokens(request_id="r", blocks={"0": [9]}, stop=10)]
    # What is generated afterwards is not the prompt's.
    assert scheduler.step(chunk("r", [10], 10, 1)).written == []


def offering(blocks: list[int]) -> SchedulerSide:
    """A scheduler with a prompt that decode reads once it has been computed."""
    scheduler = side()
    serials = {(0, 0): b"s" * 16, (0, 1): b"t" * 16}
    scheduler.set_addresses({(0, 1): "b:2", (0, 0): "a:1"}, serials)
    request = Request("r", TOKENS, {"do_remote_decode": True})
    scheduler.allocated(request, [blocks], 0)
    return scheduler


def test_a_prompt_is_offered_when_it_is_whole() -> None:
    scheduler = offering([7])
    assert scheduler.step(first_step([7], 4)).sends == []
    step = scheduler.step(chunk("r", [8, 9], 4, 6))
    assert [send.blocks["0"] for send in step.sends] == [[7, 8, 9]]
    assert not step.written


@pytest.mark.parametrize("ran", [True, False])
def test_a_request_that_ends_before_its_prompt(ran: bool) -> None:
    """Its blocks wait for what is under way; nobody is told where they are."""
    scheduler, request = prefilling([7])
    if ran:
        scheduler.step(first_step([7], 4))
    assert scheduler.finished(request) == (ran, None)


def test_a_preempted_prompt_is_not_sent_again() -> None:
    """Its transfer was aborted; decode computes what had not arrived."""
    scheduler, request = prefilling([7])
    scheduler.step(first_step([7], 4))
    step = scheduler.step(Output({}, preempted_req_ids={"r"}))
    assert step.fenced == {"r"}
    scheduler.allocated(request, [[1, 2, 3]], 0)
    again = scheduler.step(chunk("r", [1, 2, 3], 0, 10))
    assert (again.sends, again.written) == ([], [])
    assert scheduler.finished(request) == (False, None)


@pytest.mark.parametrize("tokens", [4, 10])
@pytest.mark.parametrize("told", [True, False])
def test_a_prompt_preempted_and_over_between_two_steps(tokens: int, told: bool) -> None:
    """Its blocks are others' already: nobody waits for them, or is told of them.

    So it is when vLLM's cache is reset, and the request aborted.
    """
    scheduler, request = prefilling([7, 8, 9])
    scheduler.step(first_step([7, 8, 9], tokens))
    request.num_computed_tokens = 0
    assert scheduler.finished(request) == (False, None)
    step = scheduler.step(Output({}, preempted_req_ids={"r"} if told else None))
    assert step.fenced == {"r"}
    assert not scheduler.step(Output({})).fenced


def test_a_prompt_preempted_before_it_was_offered_starts_over() -> None:
    scheduler = offering([7])
    scheduler.step(first_step([7], 4))
    scheduler.step(Output({}, preempted_req_ids={"r"}))
    step = scheduler.step(chunk("r", [1, 2, 3], 0, 10))
    assert [send.blocks["0"] for send in step.sends] == [[1, 2, 3]]


def test_a_prompt_that_is_fetched() -> None:
    scheduler, request = side(), Request("r", TOKENS, loads())
    assert scheduler.matched(request, 4) == (6, True)
    assert scheduler.matched(request, 4) == (6, True)
    scheduler.allocated(request, [[5, 6, 7, 8]], 6)
    (load,) = scheduler.step(Output({})).loads
    assert (load.blocks, load.cached) == ({"0": [5, 6, 7]}, {"0": 1})
    assert load.listed == {"0": 10}
    assert load.remote == ("tcp://a:1",)
    # It comes back with more blocks, or after a preemption: nothing to fetch.
    assert scheduler.matched(request, 0) == (0, False)
    scheduler.allocated(request, [[5, 6, 7, 8, 9]], 0)
    assert scheduler.step(Output({})).loads == []
    assert scheduler.finished(request) == (False, None)


@pytest.mark.parametrize("count", [10, KV_BLOCK_TOKENS_MAX + 10])
def test_both_engines_name_a_prompt_and_its_blocks_alike(count: int) -> None:
    """Also one with more tokens than a block may have."""
    producer, consumer, tokens = side(), side(), list(range(count))
    other = [*tokens[:-1], 0]
    blocks = list(range(-(-count // SHAPE.block_tokens)))
    producer.allocated(Request("r", tokens, dict(SENDS)), [blocks], 0)
    for request in (Request("q", tokens, loads()), Request("s", other, loads())):
        consumer.allocated(request, [blocks], count)
    send: SendPrompt = producer.step(first_step(blocks, count)).sends[0]
    same, unlike = consumer.step(Output({})).loads
    assert (same.hashes, same.content) == (send.hashes, send.content)
    assert unlike.hashes["0"][:-1] == send.hashes["0"][:-1]
    assert unlike.hashes["0"][-1] != send.hashes["0"][-1]
    assert unlike.content != send.content


def place(offset: int) -> Any:
    return SimpleNamespace(offset=offset)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Request("r", TOKENS, loads()), Request("q", TOKENS, loads(), "tenant")),
        # A client chooses the salt, and vLLM the other name from what is in a picture.
        (
            Request("r", TOKENS, loads(), "tenant", [Feature("picture")]),
            Request("q", TOKENS, loads(), "tenant\0picture"),
        ),
        # Its tokens may be in a prompt without it, so they do not say where it is.
        (
            Request("r", TOKENS, loads(), None, [Feature("picture", place(2))]),
            Request("q", TOKENS, loads(), None, [Feature("picture", place(3))]),
        ),
        # Short prompts have names as well.
        (Request("r", [1, 2], loads()), Request("q", [1, 3], loads())),
    ],
)
def test_one_prompt_is_not_taken_for_another(one: Request, other: Request) -> None:
    scheduler = side()
    for request in (one, other):
        tokens = len(request.prompt_token_ids)
        scheduler.allocated(request, [[1, 2, 3]], tokens)
    first, second = scheduler.step(Output({})).loads
    assert all(one.hashes["0"] for one in (first, second))
    assert first.hashes != second.hashes


@pytest.mark.parametrize(
    "request_",
    [
        # The embeddings are what is computed, and the ids beside them any.
        Request("r", TOKENS, dict(SENDS), prompt_embeds=object()),
        # An API of vLLM's lets these through.
        Request("r", [-1, *TOKENS[1:]], dict(SENDS)),
        Request("r", [2**31, *TOKENS[1:]], dict(SENDS)),
        Request("r", [2**70, *TOKENS[1:]], dict(SENDS)),
    ],
)
def test_a_prompt_that_has_no_name_is_moved_without_one(request_: Request) -> None:
    scheduler = side()
    scheduler.begun(request_)
    scheduler.allocated(request_, [[7, 8, 9]], 0)
    (send,) = scheduler.step(first_step([7, 8, 9], 10)).sends
    assert (send.blocks, send.hashes) == ({"0": [7, 8, 9]}, {})
    assert scheduler.finished(request_)[0]
    # And is not taken for one that has, whose blocks others find by their names.
    scheduler.allocated(Request("q", TOKENS, loads()), [[1, 2, 3]], 10)
    (load,) = scheduler.step(Output({})).loads
    assert load.content != send.content != b""


def test_a_prompt_without_a_name_whose_beginning_is_here_is_computed() -> None:
    """Without names of blocks all would be sent, also over those of other requests."""
    scheduler = side()
    request = Request("r", TOKENS, loads(), prompt_embeds=object())
    assert scheduler.matched(request, 0) == (10, True)
    assert scheduler.matched(request, 4) == (0, False)


@pytest.mark.parametrize("params", ["", "do_remote_decode", 7, 1.5, ["x"], [], None])
def test_params_that_are_none_are_passed_over(params: Any) -> None:
    """With `vllm_xargs` a client writes what vLLM takes them from."""
    scheduler, request = side(), Request("r", TOKENS, params)
    scheduler.begun(request)
    assert scheduler.matched(request, 0) == (0, False)
    scheduler.allocated(request, [[7, 8, 9]], 0)
    assert not scheduler.step(first_step([7, 8, 9], 10)).sends
    assert scheduler.finished(request) == (False, None)


def test_a_prompt_that_has_to_be_computed_here_is_declined() -> None:
    """Such as one whose own probabilities are asked for; vLLM allocates nothing."""
    scheduler = side()
    request = Request("r", TOKENS, loads(), skip_reading_prefix_cache=True)
    assert scheduler.matched(request, 0) == (0, False)
    scheduler.allocated(request, [[1, 2, 3]], 0)
    (load,) = scheduler.step(Output({})).loads
    assert load.declined


def test_what_is_not_wanted_any_more_is_declined() -> None:
    scheduler = side()
    gone, chosen_elsewhere = (Request(name, TOKENS, loads()) for name in "rq")
    assert scheduler.finished(gone) == (False, None)
    scheduler.allocated(chosen_elsewhere, [[1]], 0)
    assert [load.declined for load in scheduler.step(Output({})).loads] == [True, True]
    assert scheduler.finished(chosen_elsewhere) == (False, None)


def test_a_client_that_says_too_little_is_computed_here() -> None:
    scheduler = side()
    for params in (loads(transfer_id=7), loads(remote=[])):
        request = Request("r", TOKENS, params)
        assert scheduler.matched(request, 0) == (0, False)
        assert scheduler.take_observed() == {}
        assert scheduler.finished(request) == (False, None)
        assert scheduler.take_observed() == {"refused": [1.0]}
    assert scheduler.finished(Request("r", TOKENS)) == (False, None)
    assert scheduler.take_observed() == {}


def test_steps_say_whether_anything_is_computed() -> None:
    scheduler = side()
    assert scheduler.step(Output({})).idle
    assert not scheduler.step(Output({"r": 1})).idle


WINDOW = replace(SHAPE, name="1 window", table=1, window=4, layers=("w",))
STATE = replace(SHAPE, name="2 state", table=2, state=True, block_tokens=64)
FULL = replace(SHAPE, name="0 full")


def hybrid(state: CacheShape = STATE) -> SchedulerSide:
    """Blocks of four tokens: everything, a window of four, and one state."""
    made = SchedulerSide([FULL, WINDOW, state], PEERS)
    made.set_addresses({(0, 0): "a:1"})
    return made


def test_prefill_leaves_the_last_token_to_decode() -> None:
    scheduler, request = hybrid(), Request("r", TOKENS, dict(SENDS))
    scheduler.begun(request)
    assert (request.num_prompt_tokens, request.prompt_token_ids) == (9, TOKENS[:9])
    assert request.all_token_ids == TOKENS[:9]
    alone = Request("q", TOKENS)
    scheduler.begun(alone)
    assert alone.num_prompt_tokens == 10


@pytest.mark.parametrize(
    "request_",
    [
        Request("r", TOKENS[:1], dict(SENDS)),
        Request("r", TOKENS, dict(SENDS), max_tokens=2),
        Request("r", TOKENS, SENDS | {"do_remote_prefill": True, "remote": "a:1"}),
        Request("r", TOKENS, dict(SENDS), skip_reading_prefix_cache=True),
        Request("r", TOKENS, dict(SENDS), resumable=True),
        Request("r", TOKENS, dict(SENDS), prompt_embeds=object()),
    ],
)
def test_prompts_whose_blocks_would_change_are_not_sent(request_: Request) -> None:
    scheduler, tokens = hybrid(), list(request_.prompt_token_ids)
    scheduler.begun(request_)
    assert request_.prompt_token_ids == tokens
    scheduler.allocated(request_, [[1], [2], [3]], 0)
    assert not scheduler.step(first_step([1], len(tokens))).sends
    scheduler.finished(request_)
    assert scheduler.take_observed() == {"refused": [1.0]}


def test_of_each_group_only_what_decode_reads_is_sent() -> None:
    """Nine tokens: of the window tokens 6 to 8, so blocks 1 and 2."""
    scheduler, request = hybrid(), Request("r", TOKENS, dict(SENDS))
    scheduler.begun(request)
    scheduler.allocated(request, [[7], [4], [2]], 0)
    first = Output({"r": 4}, [New("r", ([7], [4], [2]))])
    (send,) = scheduler.step(first).sends
    assert send.tokens == 9
    assert send.listed == {"0": 9, "1": 5, "2": 1}
    assert send.blocks == {"0": [7], "1": [], "2": [2]}
    cached = Cached(["r"], [([8, 9], [5, 6], [])], [4])
    (more,) = scheduler.step(Output({"r": 5}, [], cached)).written
    assert more.blocks == {"0": [8, 9], "1": [5, 6], "2": []}
    assert more.stop == 9


def test_of_each_group_only_what_decode_reads_is_fetched() -> None:
    """Two tokens more are here than the window begins with."""
    scheduler, request = hybrid(), Request("r", TOKENS, loads())
    assert scheduler.matched(request, 8) == (1, True)
    scheduler.allocated(request, [[7, 8, 9, 1], [0, 5, 6], [2]], 1)
    (load,) = scheduler.step(Output({})).loads
    assert load.blocks == {"0": [7, 8, 9], "1": [5, 6], "2": [2]}
    assert load.cached == {"0": 2, "1": 1, "2": 0}
    assert {name: len(ids) for name, ids in load.hashes.items()} == {
        "0": 3,
        "1": 2,
        "2": 1,
    }
    # Or a group that has a block would say so for another that has not.
    assert not set(load.hashes["0"]) & set(load.hashes["1"])


@pytest.mark.parametrize("state", [STATE, replace(STATE, block_tokens=131_072)])
def test_the_two_engines_name_a_state_by_all_tokens_before_it(
    state: CacheShape,
) -> None:
    """Its block has as many tokens as a prompt may have, where none is kept in it."""
    sends, fetches = hybrid(state), hybrid(state)
    sent = Request("r", TOKENS, dict(SENDS))
    sends.begun(sent)
    sends.allocated(sent, [[1], [1], [1]], 0)
    blocks = ([1, 2, 3], [4, 5, 6], [7])
    (send,) = sends.step(Output({"r": 9}, [New("r", blocks)])).sends
    others = [99, *TOKENS[1:]], [*TOKENS[:8], 99, 99]
    for tokens, same in ((TOKENS, True), *((one, False) for one in others)):
        fetched = Request("q", tokens, loads())
        fetches.allocated(fetched, blocks, 9)
        (load,) = fetches.step(Output({})).loads
        assert (load.hashes == send.hashes) is same
        assert (load.hashes["2"] == send.hashes["2"]) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
VALUES = {
    "do_remote_prefill": st.just(True) | JSON,
    "do_remote_decode": st.just(True) | JSON,
    "transfer_id": st.just("t") | JSON,
    "remote": st.just(["a:1"])
    | st.lists(st.sampled_from(["a:1", "b:2", "c:3", "unix:///x", ""]), max_size=5)
    | JSON,
    "signature": st.just("00" * 32) | JSON,
}


@given(params=st.fixed_dictionaries({}, optional=VALUES))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_whatever_a_client_writes_is_for_its_request_alone(
    params: dict[str, Any],
) -> None:
    """No error, no address but those of the peers, and blocks are free at the end."""
    for made in (side(), hybrid()):
        request = Request("r", list(TOKENS), dict(params))
        made.begun(request)
        count, later = made.matched(request, 0)
        tables = [[7, 8, 9], [4, 5, 6], [2]]
        made.allocated(request, tables, count)
        blocks = tuple(tables)
        steps = [made.step(Output({"r": 10}, [New("r", blocks)]))]
        held, said = made.finished(request)
        steps.append(made.step(Output({})))
        sends = [send for step in steps for send in step.sends]
        loads_ = [load for step in steps for load in step.loads]
        named = {one for send in sends for one in send.remote}
        named |= {one for load in loads_ for one in load.remote}
        assert named <= {"tcp://a:1", "tcp://b:2"}
        assert held == bool(sends)
        assert (said is not None) <= held
        assert later is bool(count)
        assert count in (0, 9, 10)
        assert not made._prompts


def test_nobody_can_guess_the_name_of_a_transfer() -> None:
    scheduler, names = side(), set()
    for _ in range(2):
        request = Request("r", TOKENS, {"do_remote_decode": True})
        scheduler.allocated(request, [[7, 8, 9]], 0)
        (send,) = scheduler.step(first_step([7, 8, 9], 10)).sends
        names.add(send.transfer_id)
        scheduler.finished(request)
    assert len(names) == 2
    assert all(len(name) == 32 for name in names)


def test_an_engine_whose_ranks_do_not_fit_the_model() -> None:
    """Four heads; three ranks cannot hold them, and a state is not cut at all."""
    three = loads(remote=["a:1", "b:2", "a:1"])
    assert side().matched(Request("r", TOKENS, three), 0) == (0, False)
    two = loads(remote=["a:1", "b:2"])
    assert side().matched(Request("r", TOKENS, two), 0) == (10, True)
    assert hybrid().matched(Request("r", TOKENS, two), 0) == (0, False)
