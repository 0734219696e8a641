"""Holes of a prompt that arrived in part: what a worker does, and what is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire_vllm.holes import HOLE, HoleFills, added, holes_in
from kvwire_vllm.metadata import BlockCopy, LoadPrompt, WorkerStep
from kvwire_vllm.own_server import OwnServer
from packages.vllm.tests.support import steps
from packages.vllm.tests.support.fakes import (
    BLOCK_TOKENS,
    Feature,
    New,
    Output,
    Request,
    Worker,
)
from packages.vllm.tests.support.own_http import OwnHTTP, serving
from packages.vllm.tests.support.steps import INTO, ask, engines, fetch, give_first
from tests.support.servers import free_port
from tests.support.waiting import eventually

NOTHING: tuple[set[str], set[str]] = (set(), set())
WITHIN_S = 60.0


@given(st.sets(st.integers(0, 40)), st.integers(41, 50), st.integers(1, 8))
def test_holes_cover_what_is_missing_before_what_landed(
    missing: set[int], count: int, gap: int
) -> None:
    holes = holes_in(sorted(missing), count, gap)
    filled = {place for hole in holes for place in hole}
    for place in missing - filled:
        # It belongs to the end, behind which hardly anything has landed.
        behind = [one for one in range(place, count) if one not in missing]
        assert all(
            sum(one > other for one in behind if one < after) < gap
            for other in missing - filled
            for after in [min((m for m in missing if m > other), default=count)]
        )
    for hole in holes:
        assert {hole.start, hole.stop - 1} <= missing
        landed = 0
        for place in hole:
            landed = 0 if place in missing else landed + 1
            assert landed < gap
    starts = [hole.start for hole in holes[1:]]
    ends = [hole.stop for hole in holes]
    assert all(start - stop >= gap for stop, start in zip(ends, starts, strict=False))


@pytest.mark.parametrize(
    ("missing", "holes"),
    [
        ([], []),
        ([3], [(3, 4)]),
        ([3, 4], [(3, 5)]),
        ([3, 5], [(3, 6)]),  # one block between is not worth it
        ([3, 6], [(3, 4), (6, 7)]),
        ([3, 9], [(3, 4)]),  # the end is the request's own
        ([3, 8], [(3, 4)]),
        ([*range(10)], []),
    ],
    ids=str,
)
def test_which_holes(missing: list[int], holes: list[tuple[int, int]]) -> None:
    assert holes_in(missing, 10, 2) == [range(*hole) for hole in holes]


def test_reports_of_two_ranks() -> None:
    first = {"a": (1, [3]), "b": (1, [])}
    assert added(first, {"b": (1, [7]), "c": (1, [])}) == {
        "a": (1, [3]),
        "b": (2, [7]),
        "c": (1, []),
    }


@contextmanager
def half() -> Iterator[Worker]:
    """A worker whose prompt's first block may have landed, and no other will."""
    with engines((1, 1), (1, 1)) as ((p,), (d,)):
        ask(d, p, fillable=True)
        give_first(p, d)
        p.side.finished(("p",))
        yield d


def landed(worker: Worker) -> bool:
    assert worker.side.finished(()) == NOTHING
    reports = worker.side.take_reports()
    return "d" in reports and {*INTO[1:]} <= {*reports["d"][1]}


def test_missing_blocks_are_the_schedulers_first() -> None:
    with half() as d:
        assert eventually(lambda: landed(d))
        assert d.side.take_errors() == set()
        d.side.begin_step(WorkerStep(settled={"d": INTO[2:]}))
        assert d.side.finished(()) == (set(), {"d"})
        assert d.side.take_errors() == set(INTO[2:])
        # Once.
        assert d.side.finished(()) == NOTHING
        assert d.side.take_reports() == {}


def test_a_request_that_ends_while_its_holes_are_computed() -> None:
    """vLLM keeps its blocks until they are reported, which they are at once."""
    with half() as d:
        assert eventually(lambda: landed(d))
        assert d.side.finished(("d",)) == (set(), {"d"})
        assert d.side.take_errors() == set()


def test_a_request_that_ends_before_anything_is_reported() -> None:
    """Nobody would settle it."""
    with engines((1, 1), (1, 1)) as ((p,), (d,)):
        ask(d, p, fillable=True)
        give_first(p, d)
        received = d.side.finished(("d",))
        assert received == (set(), {"d"}) or eventually(lambda: steps.received(d))
        assert d.side.take_reports() == {}
        p.side.finished(("p",))


def test_blocks_are_copied_around_the_pass_that_computes_a_hole() -> None:
    with engines((1, 1)) as ((worker,),):
        for name in worker.tensors:
            worker.write(name, [1, 2])
        step = WorkerStep(
            lent=[BlockCopy([1, 2], [7, 8])], filled=[BlockCopy([8, 9], [2, 3])]
        )
        fetch(worker, step)
        assert worker.holds([7, 8])
        for tensor in worker.tensors.values():
            assert (tensor[3] != tensor[8]).all()
        for name in worker.tensors:
            worker.write(name, [7, 8, 9])
        worker.side.step_written()
        assert worker.holds([7, 8, 9])
        assert worker.holds([1, 2, 3])
        # Each copy once, however often the hooks are called.
        for name in worker.tensors:
            worker.tensors[name][8] = 0
        fetch(worker, WorkerStep())
        worker.side.step_written()
        assert worker.holds([1, 2, 3])


def test_a_completion_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with serving() as server:
        own = OwnServer(server.url, "m")
        sent = own.post({"prompt": [5, 6], "max_tokens": 1})
        asked = server.asked.get(timeout=WITHIN_S)
        assert not sent.over
        asked.done.set()
        assert eventually(lambda: sent.over)
        assert (asked.path, asked.key) == ("/v1/completions", "Bearer secret")
        assert asked.body == {"model": "m", "prompt": [5, 6], "max_tokens": 1}
        own.post({"model": "adapter"})
        assert server.asked.get(timeout=WITHIN_S).body == {"model": "adapter"}


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_server_that_refuses_is_named_once(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(status) as server:
        server.free.set()
        own = OwnServer(server.url, "m")
        first, second = own.post({}), own.post({})
        assert eventually(lambda: first.over and second.over)
        assert len(caplog.messages) == 1
        assert f"HTTP {status}" in caplog.text
        assert '"http"' in caplog.text


def test_a_server_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    sent = OwnServer(f"http://127.0.0.1:{free_port()}", "m").post({})
    assert eventually(lambda: sent.over)
    assert "refused" in caplog.text


def test_what_is_cancelled_is_over_and_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server sees that its client is gone."""
    with serving() as server:
        sent = OwnServer(server.url, "m").post({})
        asked = server.asked.get(timeout=WITHIN_S)
        sent.cancel()
        assert eventually(lambda: sent.over and asked.gone)
        assert caplog.messages == []


# --- the scheduler's side -------------------------------------------------------------

PROMPT = list(range(1000, 1000 + 300 * BLOCK_TOKENS))
BLOCKS = list(range(500, 800))
HOLE_AT = 100


@contextmanager
def filling(
    ranks: int = 1, status: int = 200, **request: Any
) -> Iterator[tuple[HoleFills, OwnHTTP, Request]]:
    """A prompt of 300 blocks of 4 tokens, which other engines have."""
    with serving(status) as server:
        own = OwnServer(server.url, "m")
        holes = HoleFills(
            own,
            table="0",
            block_tokens=BLOCK_TOKENS,
            ranks=ranks,
            wait_s=WITHIN_S,
        )
        waiting = Request("r", PROMPT, {}, **request)
        watch(holes, waiting)
        yield holes, server, waiting
        holes.close()


def watch(holes: HoleFills, waiting: Request) -> LoadPrompt:
    load = LoadPrompt(
        request_id=waiting.request_id, transfer_id="t", blocks={"0": BLOCKS}
    )
    holes.watch(waiting, load)
    return load


def scheduled(holes: HoleFills, output: Output | None = None) -> WorkerStep:
    step = WorkerStep()
    holes.step(step, output or Output({}))
    return step


def own_request(server: OwnHTTP, tokens: int | None = None) -> tuple[Request, str]:
    """The request that the server was asked for, as vLLM has it, and its key."""
    body = server.asked.get(timeout=WITHIN_S).body
    params = body["kv_transfer_params"]
    salt = body.get("cache_salt")
    ids = body["prompt"][:tokens]
    return Request("own", ids, params, cache_salt=salt), params[HOLE]


def compute(holes: HoleFills, server: OwnHTTP) -> WorkerStep:
    """Have a hole computed in one step."""
    request, key = own_request(server)
    external = holes.matched(request, key, 0)
    blocks = list(range(-(-len(request.prompt_token_ids) // BLOCK_TOKENS)))
    holes.allocated(request, key, blocks, external)
    new = [New("own", (blocks,), external)]
    tokens = len(request.prompt_token_ids) - external
    return scheduled(holes, Output({"own": tokens}, new))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hole_is_asked_for_when_all_workers_have_reported(ranks: int) -> None:
    with filling(ranks, cache_salt="salt") as (holes, server, _):
        for rank in range(ranks):
            step = scheduled(holes)
            assert step.settled == {}
            assert server.asked.empty()
            holes.arrived({"r": (1, [BLOCKS[HOLE_AT]] if rank == 0 else [])})
        assert scheduled(holes).settled == {}
        step = compute(holes, server)
        first = [*range(HOLE_AT)]
        assert step.lent == [BlockCopy(BLOCKS[:HOLE_AT], first)]
        assert step.filled == [BlockCopy([HOLE_AT], [BLOCKS[HOLE_AT]])]
        assert step.settled == {"r": []}
        assert scheduled(holes) == WorkerStep()


def test_what_landed_on_one_worker_alone_is_missing() -> None:
    with filling(2) as (holes, server, _):
        holes.arrived({"r": (1, [BLOCKS[HOLE_AT]])})
        holes.arrived({"r": (1, [BLOCKS[HOLE_AT + 1], BLOCKS[-1]])})
        scheduled(holes)
        step = compute(holes, server)
        assert step.filled[0].into == BLOCKS[HOLE_AT : HOLE_AT + 2]
        assert step.settled == {"r": BLOCKS[-1:]}


def test_what_is_whole_is_not_asked_for() -> None:
    with filling(2) as (holes, server, _):
        holes.arrived({"r": (1, [])})
        holes.arrived({"r": (1, [])})
        assert scheduled(holes) == WorkerStep()
        assert server.asked.empty()


def test_a_prompt_with_pictures_is_not_watched() -> None:
    with filling() as (holes, _, waiting):
        assert watch(holes, waiting).fillable
        waiting.mm_features = [Feature("picture")]
        assert not watch(holes, waiting).fillable


def test_of_many_prompts_a_few_are_filled() -> None:
    with filling() as (holes, _, _):
        names = [f"r{number}" for number in range(20)]
        for name in names:
            watch(holes, Request(name, PROMPT, {}))
        holes.arrived({name: (1, [BLOCKS[HOLE_AT]]) for name in names})
        settled = scheduled(holes).settled
        assert len(settled) == 12
        assert set(map(tuple, settled.values())) == {(BLOCKS[HOLE_AT],)}
        for name in names:
            holes.finished(Request(name, PROMPT, {}))
        assert scheduled(holes) == WorkerStep()


@pytest.mark.parametrize(
    "other", [{"tokens": 4}, {"cache_salt": "another"}], ids=["tokens", "salt"]
)
def test_the_key_is_for_one_prompt(other: dict[str, Any]) -> None:
    with filling(cache_salt="salt") as (holes, server, _):
        holes.arrived({"r": (1, [BLOCKS[HOLE_AT]])})
        scheduled(holes)
        request, key = own_request(server, other.get("tokens"))
        request.cache_salt = other.get("cache_salt", request.cache_salt)
        assert holes.matched(request, key, 0) == 0
        holes.allocated(request, key, [1], 0)
        assert scheduled(holes) == WorkerStep()


def test_an_engine_that_is_refused_computes_all_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with filling(status=401) as (holes, server, waiting):
        server.free.set()
        holes.arrived({"r": (1, [BLOCKS[HOLE_AT]])})
        scheduled(holes)
        assert eventually(lambda: bool(caplog.messages))
        assert eventually(lambda: scheduled(holes).settled == {"r": [BLOCKS[HOLE_AT]]})
        # The key may be put right.
        assert watch(holes, waiting).fillable


def test_a_url_of_several_engines_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each would compute the prompt, and this one as well."""
    with filling() as (holes, server, waiting):
        server.free.set()
        holes.arrived({"r": (1, [BLOCKS[HOLE_AT]])})
        scheduled(holes)
        assert eventually(lambda: scheduled(holes).settled == {"r": [BLOCKS[HOLE_AT]]})
        assert "another engine has answered" in caplog.text
        assert not watch(holes, waiting).fillable
