"""What is loaded and saved when, on vLLM's objects as far as they are looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kvwire.kv.hashing import HashScheme
from kvwire_vllm.store.scheduler import StoreScheduler
from packages.vllm.tests.support.fakes import (
    BLOCK_TOKENS,
    Cached,
    New,
    Output,
    Request,
)

TOKENS = list(range(100, 110))  # two blocks and a half


class Store:
    def __init__(self) -> None:
        # What it was asked, and the answers.
        self.asked: list[tuple[list[bytes], Future[int]]] = []

    def ask(self, hashes: Sequence[bytes]) -> Future[int]:
        self.asked.append((list(hashes), Future()))
        return self.asked[-1][1]


def hashes_of(request: Request) -> list[bytes]:
    """The names of its blocks for somebody who has only its tokens and its salt."""
    given = getattr(request, "cache_salt", None)
    salt = json.dumps(["", given]).encode() if given else b""
    return HashScheme(BLOCK_TOKENS).block_hashes(request.all_token_ids, salt=salt)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_tokens_and_a_salt_name_what_is_saved(salt: str | None) -> None:
    """So that a proxy, or a command, finds an engine's blocks."""
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    request = Request("r", TOKENS, cache_salt=salt)
    side.begun(request)
    ((hashes, _),) = store.asked
    assert hashes == hashes_of(request)[:2]


def matched(
    tokens: list[int], has: int, *, computed: int = 0
) -> tuple[StoreScheduler, Request, tuple[int | None, bool]]:
    """A request of which a store has so many blocks, and what vLLM is told."""
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    request = Request("r", tokens)
    side.begun(request)
    for asked, said in store.asked:
        said.set_result(min(has, len(asked)))
    return side, request, side.matched(request, computed)


def test_what_vllm_has_itself_waits_for_no_answer() -> None:
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    request = Request("r", TOKENS)
    side.begun(request)
    assert side.matched(request, 4) == (None, False)
    assert side.matched(request, 8) == (0, False)


def first(ids: list[int], computed: int, tokens: int) -> Output:
    return Output({"r": tokens}, [New("r", (ids,), computed)])


@pytest.mark.parametrize(
    ("tokens", "has", "computed", "found"),
    [
        (10, 0, 0, 0),
        (10, 1, 0, 4),
        (10, 2, 0, 8),
        (10, 2, 4, 4),
        (10, 2, 8, 0),
        (8, 2, 0, 4),  # vLLM computes the last token itself
        (4, 1, 0, 0),
    ],
)
def test_hits_are_trimmed(tokens: int, has: int, computed: int, found: int) -> None:
    *_, told = matched(TOKENS[:tokens], has, computed=computed)
    assert told == (found, found > 0)


def test_it_waits_for_the_answer_of_the_store() -> None:
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    request = Request("r", TOKENS)
    side.begun(request)
    assert side.matched(request, 0) == (None, False)
    ((hashes, said),) = store.asked
    assert hashes == hashes_of(request)[:2]
    said.set_result(1)
    assert side.matched(request, 0) == (4, True)
    assert len(store.asked) == 1


def test_requests_that_read_no_prefix_load_none() -> None:
    side = StoreScheduler(BLOCK_TOKENS, Store().ask)
    asked = Request("r", TOKENS, skip_reading_prefix_cache=True)
    assert side.matched(asked, 0) == (0, False)


@pytest.mark.parametrize("found", [1, 2])
def test_what_was_not_loaded_is_saved_when_it_is_computed(found: int) -> None:
    """And nothing that was; vLLM goes back to the first block that was lost."""
    side, request, _ = matched(TOKENS, found)
    side.allocated(request, [[7, 8, 9]], 4 * found)
    hashes = hashes_of(request)
    step = side.step(Output({}))
    assert step.loads == [("r", hashes[:found], [7, 8][:found])]
    assert step.idle
    side.reported((), ["r"])
    step = side.step(first([7, 8, 9], 4, 6))
    assert step.saves == [("r", hashes[1:2], [8])]


def test_answers_are_saved_once_their_tokens_are_known() -> None:
    side, request, _ = matched(TOKENS, 0)
    side.allocated(request, [[7, 8, 9]], 0)
    assert side.step(first([7, 8, 9], 0, 10)).saves == [
        ("r", hashes_of(request)[:2], [7, 8])
    ]
    # Scheduled ahead of the token that the last step has generated.
    later = Cached(["r"], [None], [11])
    assert side.step(Output({"r": 1}, scheduled_cached_reqs=later)).saves == []
    request.all_token_ids += [1, 2]
    # An earlier pass has written it, so its save need not wait for this one.
    later = Cached(["r"], [([4],)], [12])
    step = side.step(Output({"r": 1}, scheduled_cached_reqs=later))
    assert step.written == [("r", hashes_of(request)[2:3], [9])]
    assert step.saves == []


def test_what_vllm_found_in_its_cache_is_saved_after_the_pass() -> None:
    """Another request may compute it in the same pass, as vLLM shares its blocks."""
    side, request, _ = matched(TOKENS, 0)
    side.allocated(request, [[7, 8, 9]], 0)
    step = side.step(first([7, 8, 9], 8, 2))
    assert step.written == []
    assert step.saves == [("r", hashes_of(request)[:2], [7, 8])]


def test_a_preempted_request_is_saved_from_its_beginning_again() -> None:
    """A worker may not have begun to save its blocks before."""
    side, request, _ = matched(TOKENS, 0)
    side.allocated(request, [[7, 8, 9]], 0)
    side.step(first([7, 8, 9], 0, 10))
    side.step(Output({}, preempted_req_ids={"r"}))
    again = Cached(["r"], [([3, 4, 5],)], [4])
    step = side.step(Output({"r": 6}, scheduled_cached_reqs=again))
    assert step.written == []
    assert step.saves == [("r", hashes_of(request)[:2], [3, 4])]


def test_blocks_are_freed_when_the_workers_say_so() -> None:
    side, request, _ = matched(TOKENS, 0)
    side.step(first([7, 8, 9], 0, 3))
    assert not side.finished(request)  # nothing was saved yet
    side, request, _ = matched(TOKENS, 0)
    side.step(first([7, 8, 9], 0, 10))
    assert side.finished(request)
    assert side.waiting
    assert side.step(Output({})).leaving == {"r"}
    side.reported(["r"], ())
    assert not side.waiting


def test_one_that_ends_while_it_is_loaded_is_freed_by_that_report() -> None:
    side, request, _ = matched(TOKENS, 2)
    side.allocated(request, [[7, 8, 9]], 8)
    assert not side.finished(request)
    assert side.step(Output({})).loads


@pytest.mark.parametrize(
    "request_",
    [
        # The embeddings are what is computed, and the ids beside them any.
        Request("r", TOKENS, prompt_embeds=object()),
        # An API of vLLM's lets these through.
        Request("r", [-1, *TOKENS[1:]]),
        Request("r", [2**70, *TOKENS[1:]]),
    ],
)
def test_a_prompt_that_has_no_name_is_neither_found_nor_saved(
    request_: Request,
) -> None:
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    side.begun(request_)
    assert side.matched(request_, 0) == (0, False)
    side.allocated(request_, [[7, 8, 9]], 0)
    assert not side.step(first([7, 8, 9], 0, 10)).saves
    assert not side.finished(request_)
    assert not store.asked


def test_what_is_saved_ends_with_the_tokens_that_have_names() -> None:
    side, request, _ = matched(TOKENS, 0)
    side.allocated(request, [[7, 8, 9]], 0)
    assert side.step(first([7, 8, 9], 0, 10)).saves
    request.all_token_ids += [1, -1, 3]
    for computed in (10, 11):
        later = Cached(["r"], [None], [computed])
        output = Output({"r": 13 - computed}, scheduled_cached_reqs=later)
        assert not side.step(output).saves
    assert side.finished(request)


def test_a_preempted_request_is_fenced_and_asks_again() -> None:
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    request = Request("r", TOKENS)
    side.begun(request)
    side.allocated(request, [[7, 8, 9]], 0)
    side.step(first([7, 8, 9], 0, 10))
    assert side.step(Output({}, preempted_req_ids={"r"})).fenced == {"r"}
    assert side.matched(request, 0) == (None, False)
    assert len(store.asked) == 2
    # It has drained, and nothing was saved since.
    assert not side.finished(request)


def test_an_adapter_of_the_same_name_at_another_place_is_another() -> None:
    """As vLLM's own names say, so that a name may be given to new weights."""
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    for number, path in enumerate(["/v1", "/v2", "/v1"]):
        adapter = SimpleNamespace(lora_name="sql", lora_path=path)
        side.begun(Request(f"r{number}", TOKENS, lora_request=adapter))
    (old, _), (new, _), (again, _) = store.asked
    assert old == again
    assert not {*old} & {*new}


def test_what_was_computed_before_all_is_forgotten_does_not_come_back() -> None:
    store = Store()
    side = StoreScheduler(BLOCK_TOKENS, store.ask)
    runs, waits = Request("r", TOKENS), Request("w", TOKENS)
    for request in (runs, waits):
        side.begun(request)
        store.asked[-1][1].set_result(2)
    assert side.matched(runs, 0) == (8, True)
    side.allocated(runs, [[7, 8, 9]], 0)
    side.step(first([7, 8, 9], 0, 4))
    side.forgotten()
    later = Cached(["r"], [None], [4])
    step = side.step(Output({"r": 6}, scheduled_cached_reqs=later))
    assert step.forgotten
    assert not step.saves
    assert not side.step(Output({})).forgotten
    assert side.matched(waits, 0) == (None, False)  # the store is asked again
    store.asked[-1][1].set_result(0)
    assert side.matched(waits, 0) == (0, False)
    side.allocated(waits, [[1, 2, 3]], 0)
    new = Output({"w": 10}, [New("w", ([1, 2, 3],), 0)])
    assert side.step(new).saves == [("w", hashes_of(waits)[:2], [1, 2])]
    assert side.finished(runs)
