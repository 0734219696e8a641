"""Workers with several cache groups, which lie over each other as vLLM's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire import UsageError
from kvwire_vllm.caches import cache_shapes, layer_caches
from kvwire_vllm.config import VllmSettings
from kvwire_vllm.metadata import ComputedTokens, WorkerStep
from kvwire_vllm.references import References
from kvwire_vllm.scheduler import SchedulerSide
from kvwire_vllm.worker import WorkerSide
from packages.vllm.tests.support import steps
from packages.vllm.tests.support.fakes import (
    BLOCKS,
    SHAPE,
    New,
    Output,
    Request,
    chunk,
    vllm_configs,
)
from tests.support.waiting import eventually

LOST = {"do_remote_prefill": True, "transfer_id": "t", "remote": ["127.0.0.1:9"]}
PAGE = 2 * SHAPE.block_tokens * SHAPE.kv_heads * SHAPE.head_dim  # floats of a block
TOKENS = 10
FULL = replace(SHAPE, name="0 full", layers=("f.0", "f.1"))
WINDOW = replace(SHAPE, name="1 window", table=1, layers=("w.2", "w.3"), window=4)
STATE = replace(
    SHAPE,
    name="2 state",
    table=2,
    layers=("s.4",),
    block_tokens=64,
    kv_heads=1,
    total_kv_heads=1,
    head_dim=100,
    state=True,
)
SHAPES = (FULL, WINDOW, STATE)
FROM = {"0 full": [3, 1, 4], "1 window": [7, 8], "2 state": [11]}
INTO = {"0 full": [9, 2, 6], "1 window": [5, 13], "2 state": [12]}
LISTED = {str(shape.table): shape.listed_tokens(TOKENS) for shape in SHAPES}
HASHES = {
    name[0]: [b"%d %s" % (at, name.encode()) for at in range(len(ids))]
    for name, ids in FROM.items()
}


def of_tables(said: dict[str, Any]) -> dict[str, Any]:
    """As the scheduler's side says it: by block table, each of one group here."""
    return {name[0]: value for name, value in said.items()}


class Hybrid:
    """A worker with two pages of memory in a block, which each group sees its way."""

    def __init__(self, **settings: Any) -> None:
        self.memory = np.zeros((2, BLOCKS, PAGE), np.float32)
        sizes = (BLOCKS, SHAPE.kv_heads, SHAPE.block_tokens, 2 * SHAPE.head_dim)
        pages = [page.reshape(sizes) for page in self.memory]
        raw = self.memory[0].view(np.uint8)
        conv = raw[:, :40].view(np.float32)
        ssm = raw[:, 40:100].view(np.float16).reshape(BLOCKS, 5, 6)
        self.side = WorkerSide(VllmSettings(**settings), kvwire.Config.load(), SHAPES)
        self.side.register(
            {
                "f.0": pages[0],
                "f.1": pages[1],
                "w.2": pages[0],
                "w.3": pages[1],
                "s.4": [conv, ssm],
            }
        )

    def parts(self, blocks: dict[str, list[int]]) -> dict[str, Any]:
        state = self.memory[0].view(np.uint8)[blocks["2 state"], :100]
        found = {name: self.memory[:, ids] for name, ids in blocks.items()}
        return found | {"2 state": state}


@contextmanager
def pair(**settings: Any) -> Iterator[tuple[Hybrid, Hybrid]]:
    made = Hybrid(**settings), Hybrid(**settings)
    rng = np.random.default_rng(3)
    made[0].memory[:] = rng.random(made[0].memory.shape, np.float32)
    try:
        yield made
    finally:
        for one in made:
            one.side.close()


def sending(blocks: dict[str, list[int]], stop: int, remote: str = "") -> WorkerStep:
    step = steps.sending([], stop, (remote,) if remote else ())
    (send,) = step.sends
    send.listed, send.blocks, send.hashes = LISTED, of_tables(blocks), HASHES
    return step


def fetch(worker: Hybrid, remote: str, cached: dict[str, int] | None = None) -> None:
    step = steps.fetching((remote,))
    (load,) = step.loads
    load.listed, load.blocks, load.hashes = LISTED, of_tables(INTO), HASHES
    load.cached = dict.fromkeys(HASHES, 0) | of_tables(cached or {})
    worker.side.begin_step(step)
    worker.side.start_loads()


def received(worker: Hybrid) -> bool:
    return worker.side.finished(()) == (set(), {"d"})


@pytest.mark.parametrize("stream", ["layer", "chunk"])
def test_each_group_arrives_in_its_own_blocks(stream: str) -> None:
    with pair(stream=stream) as (p, d):
        fetch(d, p.side.address)
        # A chunk of four tokens completes a block that only the first group sends.
        p.side.begin_step(
            sending({"0 full": [3], "1 window": [], "2 state": [11]}, 4, d.side.address)
        )
        for name in ("f.0", "w.2", "w.3", "f.1"):
            p.side.layer_written(name)
        p.side.step_written()
        more = {"0 full": [1, 4], "1 window": [7, 8], "2 state": []}
        rest = ComputedTokens(request_id="p", blocks=of_tables(more), stop=TOKENS)
        p.side.begin_step(WorkerStep(written=[rest]))
        for name in ("f.0", "w.2", "w.3", "f.1"):
            p.side.layer_written(name)
        p.side.step_written()
        assert eventually(lambda: received(d))
        want, got = p.parts(FROM), d.parts(INTO)
        assert all(np.array_equal(want[name], got[name]) for name in want)
        others = sorted(set(range(BLOCKS)).difference(*INTO.values()))
        assert not d.memory[:, others].any()
        assert (d.side.take_errors(), d.side.take_failed()) == (set(), set())


def test_what_one_group_has_is_sent_to_the_others() -> None:
    with pair() as (p, d):
        p.side.begin_step(sending(FROM, TOKENS))
        p.side.step_written()
        fetch(d, p.side.address, {"0 full": 2, "1 window": 1})
        assert eventually(lambda: received(d))
        want, got = p.parts(FROM), d.parts(INTO)
        assert not got["0 full"][:, :2].any()
        assert not got["1 window"][:, 0].any()
        for name, cached in (("0 full", 2), ("1 window", 1)):
            assert np.array_equal(want[name][:, cached:], got[name][:, cached:])
        assert np.array_equal(want["2 state"], got["2 state"])


def test_requests_fail_where_ids_are_of_several_groups() -> None:
    with pair(load_timeout_s=0.3) as (_, d):
        fetch(d, "127.0.0.1:9")
        assert eventually(lambda: received(d))
        assert d.side.take_errors() == set()
        assert d.side.take_failed() == {"d"}
        assert d.side.take_failed() == set()


RAW = np.zeros((8, 100), np.uint8)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            [np.zeros((4, 9), np.uint8)],
            "its states have 9 bytes, but vLLM's config gives",
        ),
        ([np.zeros((4, 100), np.uint8).T[:4]], "are not contiguous"),
        (
            [np.zeros((4, 50), np.uint8), np.zeros((4, 50), np.uint8)],
            "are not contiguous",
        ),
        ([RAW[:4, :50], RAW[::2, 50:]], "are not contiguous"),
    ],
)
def test_states_that_lie_otherwise(parts: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        layer_caches({"s.4": parts}, [STATE])


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"no KV cache for layer 'f\.1'"):
        layer_caches({"f.0": np.zeros((4, 4, 4, 16), np.float32)}, [FULL])


@dataclass(frozen=True)
class FullAttention:
    """vLLM's spec of a layer."""

    num_kv_heads: int
    head_size: int
    block_size: int = 4


HEADS = {"model.0": (4, 8), "model.1": (4, 8), "draft.2": (2, 16)}


class Engine:
    """Both sides, of the configs that vLLM gives to its scheduler and to a worker.

    One table for layers of two shapes, as a model's and its draft model's. A scheduler
    knows one of them.
    """

    def __init__(self) -> None:
        specs = {
            name: FullAttention(num_kv_heads=heads, head_size=size)
            for name, (heads, size) in HEADS.items()
        }
        said, caches = vllm_configs(next(iter(specs.values())))
        _, of_worker = vllm_configs(SimpleNamespace(kv_cache_specs=specs))
        known = References(this_host=True)
        self.scheduler = SchedulerSide(cache_shapes(said, caches), known)
        shapes = cache_shapes(said, of_worker)
        self.profile = [shape.profile for shape in shapes]
        self.worker = WorkerSide(VllmSettings(), kvwire.Config.load(), shapes)
        self.memory = {
            name: np.zeros((BLOCKS, heads, 4, 2 * size), np.float32)
            for name, (heads, size) in HEADS.items()
        }
        self.worker.register(self.memory)
        self.scheduler.set_addresses({(0, 0): self.worker.address})


def test_layers_of_several_shapes_in_one_table() -> None:
    """Sent and fetched as both sides of an engine name their blocks."""
    p, d = Engine(), Engine()
    assert p.profile == ["full, 4 x 8", "full, 2 x 16"]
    try:
        tokens = list(range(100, 110))
        for name, memory in p.memory.items():
            memory[:] = np.random.default_rng(len(name)).random(memory.shape)
        sent = Request("p", tokens, {"do_remote_decode": True, "transfer_id": "t"})
        p.scheduler.allocated(sent, [[3, 1, 4]], 0)
        step = p.scheduler.step(Output({"p": 6}, [New("p", ([3, 1],))]))
        p.worker.begin_step(step)
        p.worker.step_written()
        step = p.scheduler.step(chunk("p", [4], 6, 4))
        p.worker.begin_step(step)
        p.worker.step_written()
        _, params = p.scheduler.finished(sent)
        wanted = Request("d", tokens, params)
        assert d.scheduler.matched(wanted, 4) == (6, True)
        d.scheduler.allocated(wanted, [[9, 2, 6]], 6)
        d.worker.begin_step(d.scheduler.step(Output({})))
        d.worker.start_loads()
        assert eventually(lambda: d.worker.finished(()) == (set(), {"d"}))
        assert not d.worker.take_errors()
        for name, memory in d.memory.items():
            assert np.array_equal(memory[[2, 6]], p.memory[name][[1, 4]])
            assert not np.delete(memory, [2, 6], axis=0).any()
    finally:
        p.worker.close()
        d.worker.close()


def test_what_is_lost_of_one_table_is_named_once() -> None:
    d = Engine()
    try:
        wanted = Request("d", list(range(10)), LOST)
        d.scheduler.allocated(wanted, [[9, 2, 6]], 10)
        d.worker.begin_step(d.scheduler.step(Output({})))
        d.worker.start_loads()
        assert eventually(lambda: d.worker.finished(()) == (set(), {"d"}))
        assert d.worker.take_errors() == {9, 2, 6}
        assert not d.worker.take_failed()
    finally:
        d.worker.close()
