"""Workers of two engines, on real sockets: what arrives, and when memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import pytest

from kvwire.integrations.vllm import receiving
from kvwire.integrations.vllm.metadata import WorkerStep
from tests.integrations.vllm.fakes import (
    BLOCKS,
    FREE,
    NAMES,
    ORDERS,
    Worker,
)
from tests.integrations.vllm.steps import (
    FROM,
    HASHES,
    INTO,
    SPAN,
    addresses,
    arrives,
    drained,
    fetch,
    fetching,
    freed,
    prefill,
    received,
    sending,
    written,
)
from tests.support.traces import Traces
from tests.support.waiting import eventually


@contextmanager
def workers(
    producers: int = 1, consumers: int = 1, **settings: Any
) -> Iterator[tuple[list[Worker], list[Worker]]]:
    with engines((producers, 1), (consumers, 1), **settings) as (there, here):
        yield there, here


@contextmanager
def engines(
    *shapes: tuple[int, int], **settings: Any
) -> Iterator[tuple[list[Worker], ...]]:
    """Engines of some ranks a stage, and stages."""
    with ExitStack() as stack:
        made = tuple(
            [
                Worker(rank, ranks, stage=(stage, stages), **settings)
                for stage in range(stages)
                for rank in range(ranks)
            ]
            for ranks, stages in shapes
        )
        for group in made:
            for worker in group:
                stack.callback(worker.side.close)
        yield made


@pytest.mark.parametrize("stream", ["layer", "chunk", "request"])
def test_a_prompt_arrives(stream: str) -> None:
    with workers(stream=stream) as ((p,), (d,)):
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM, 10, addresses([d])))
        assert arrives(d)
        assert d.side.take_errors() == set()
        # Only now does the scheduler end it, and hears at once that it has drained.
        assert p.side.finished(()) == (set(), set())
        assert drained(p)


def test_chunks_leave_before_the_prompt_is_whole() -> None:
    with workers() as ((p,), (d,)):
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM[:1], 5, addresses([d])), FROM[:1])
        assert eventually(lambda: d.holds(INTO[:1]))
        assert d.side.finished(()) == (set(), set())
        prefill(p, WorkerStep(written=[written(FROM[1:], 10)]))
        assert arrives(d)


@pytest.mark.parametrize(
    ("producers", "consumers"),
    [
        ((1, 1), (2, 1)),
        ((2, 1), (1, 1)),
        ((2, 1), (4, 1)),
        ((4, 1), (2, 1)),
        ((1, 2), (1, 1)),
        ((1, 1), (1, 2)),
        ((1, 3), (2, 2)),
        ((4, 2), (1, 3)),
    ],
)
def test_engines_of_other_shapes(
    producers: tuple[int, int], consumers: tuple[int, int]
) -> None:
    """Ranks of each stage, and stages."""
    with engines(producers, consumers) as (there, here):
        for d in here:
            fetch(d, fetching(addresses(there), stages=producers[1]))
        for p in there:
            prefill(p, sending(FROM, 10, addresses(here), consumers[1]))
        for d in here:
            assert arrives(d)
        for p in there:
            assert drained(p)


@pytest.mark.parametrize(("there", "stages"), [((2, 1), 1), ((1, 2), 1), ((1, 3), 2)])
def test_a_request_that_names_too_few_ranks(
    there: tuple[int, int], stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All that the first ranks have arrives, and none of it is used."""
    with engines(there, (1, 1)) as (others, (d,)):
        some = others[:stages]
        fetch(d, fetching(addresses(some), stages=stages))
        for p in some:
            prefill(p, sending(FROM, 10))
        assert eventually(lambda: received(d))
        assert d.side.take_errors() == set(INTO)
    assert any(
        "none of the ranks that the request names has" in m for m in caplog.messages
    )


def test_a_request_that_names_more_stages_than_there_are_layers() -> None:
    """Nothing moves: prefill's blocks are free at once, and decode computes."""
    with workers() as ((p,), (d,)):
        nowhere = ("127.0.0.1:9",) * (len(NAMES) + 1)
        fetch(d, fetching(nowhere, stages=len(nowhere)))
        assert eventually(lambda: received(d))
        assert d.side.take_errors() == set(INTO)
        prefill(p, sending(FROM, 10, nowhere, len(nowhere)))
        assert drained(p)


@pytest.mark.parametrize(("there", "here"), [(4, 2), (2, 4), (4, 8)])
def test_blocks_of_other_sizes(there: int, here: int) -> None:
    """What is the same prompt shows its content, and not the hashes of its blocks."""
    rng, counts = np.random.default_rng(7), (-(-10 // there), -(-10 // here))
    p, d = (Worker(block_tokens=size) for size in (there, here))
    with closing(p), closing(d):
        for tensor in p.tensors.values():
            tensor[:] = rng.random(tensor.shape, np.float32)
        blocks, into = list(range(1, 1 + counts[0])), list(range(3, 3 + counts[1]))
        for content, lost in ((b"one", set[int]()), (b"other", set(into))):
            load, send = fetching(addresses([p])), sending(blocks, 10, addresses([d]))
            load.loads[0].blocks = {"kv": into}
            load.loads[0].hashes = {"kv": [b"%d" % at for at in into]}
            load.loads[0].content = content
            send.sends[0].hashes = {"kv": [b"%d" % at for at in blocks]}
            send.sends[0].content = b"one"
            fetch(d, load)
            p.side.begin_step(send)
            p.side.step_written()
            assert eventually(lambda: received(d))
            assert d.side.take_errors() == lost
            assert drained(p)
        for name in NAMES:
            assert np.array_equal(
                in_tokens(p.tensors[name][blocks]), in_tokens(d.tensors[name][into])
            )


def in_tokens(blocks: Any) -> Any:
    """The prompt's ten tokens of some blocks: (head, token, number)."""
    count, heads, tokens, numbers = blocks.shape
    by_head = blocks.transpose(1, 0, 2, 3)
    return by_head.reshape(heads, count * tokens, numbers)[:, :10]


@pytest.mark.parametrize("order", list(ORDERS))
def test_memory_in_any_order_of_vllm(order: str) -> None:
    """To and from an engine whose attention backend has the first."""
    for there, here in ((order, "LBHNC"), ("LBHNC", order)):
        p, d = Worker(order=there), Worker(order=here)
        with closing(p), closing(d):
            fetch(d, fetching(addresses([p])))
            prefill(p, sending(FROM, 10))
            assert arrives(d)
            others = [block for block in range(BLOCKS) if block not in INTO]
            assert all((d.read(name)[others] == FREE).all() for name in NAMES)


def test_what_is_here_is_neither_sent_nor_written_to() -> None:
    with workers() as ((p,), (d,)):
        prefill(p, sending(FROM, 10))
        fetch(d, fetching(addresses([p]), cached=1))
        assert eventually(lambda: received(d))
        assert all((tensor[INTO[0]] == FREE).all() for tensor in d.tensors.values())
        assert d.tensors[NAMES[0]][INTO[1], 0, 0, 0] == 100


def test_a_rank_whose_heads_others_send_has_sent_at_once() -> None:
    """Eight ranks of a model with four heads: every second one has nothing to do."""
    with closing(Worker(1, 8)) as worker:
        worker.side.begin_step(sending(FROM, 10, ("127.0.0.1:9",)))
        worker.forward(FROM)
        assert worker.side.finished(()) == (set(), set())
        assert worker.side.finished(("p", "other")) == ({"p"}, set())


def test_preempted_blocks_are_free_when_the_fence_returns() -> None:
    with workers() as ((p,), (d,)):
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM[:1], 4), FROM[:1])
        p.side.fence(WorkerStep(fenced={"p", "somebody-else"}))
        for tensor in p.tensors.values():
            tensor[:] = 7
        assert eventually(lambda: received(d))
        errors = d.side.take_errors()
        assert set(INTO[1:]) <= errors
        assert INTO[0] in errors or d.holds(INTO[:1])


def test_a_request_that_is_aborted_at_decode() -> None:
    """Its blocks are free when it is reported, and prefill's as well."""
    with workers() as ((p,), (d,)):
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM[:1], 4), FROM[:1])
        d.side.finished(("d",))
        assert eventually(lambda: received(d))
        assert drained(p)


def test_a_request_that_is_aborted_at_prefill() -> None:
    with workers() as ((p,), (d,)):
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM[:1], 4), FROM[:1])
        p.side.finished(("p",))
        assert eventually(lambda: received(d))
        assert set(INTO[1:]) <= d.side.take_errors()


def test_nobody_wants_it_any_more() -> None:
    with workers() as ((p,), (d,)):
        prefill(p, sending(FROM, 10))
        p.side.finished(("p",))
        assert p.side._departures
        fetch(d, fetching(addresses([p]), declined=True))
        assert eventually(lambda: freed(p))
        assert d.side.finished(()) == (set(), set())


def test_nobody_comes() -> None:
    with workers(lease_s=0.2) as ((p,), _):
        prefill(p, sending(FROM, 10))
        assert drained(p)


def test_the_other_engine_is_not_there() -> None:
    """Decode computes every block itself; prefill lives."""
    with workers(load_timeout_s=0.3, lease_s=0.3) as ((p,), (d,)):
        gone = ("127.0.0.1:9",)
        fetch(d, fetching(gone))
        assert eventually(lambda: received(d))
        assert d.side.take_errors() == set(INTO)
        prefill(p, sending(FROM, 10, gone))
        assert drained(p)


def test_a_prompt_that_was_fetched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill has said where it is, and it is there no more: nobody waits for long."""
    monkeypatch.setattr(receiving, "_PUBLISHED_WITHIN_S", 0.05)
    with workers() as ((p,), (d,)):
        prefill(p, sending(FROM, 10))
        p.side.finished(("p",))
        for missing in (set[int](), set(INTO)):
            fetch(d, fetching(addresses([p]), computed=True))
            assert eventually(lambda: received(d))
            assert d.side.take_errors() == missing


def test_another_prompt_is_refused() -> None:
    with workers() as ((p,), (d,)):
        prefill(p, sending(FROM, 10))
        step = fetching(addresses([p]))
        step.loads[0].hashes = {"kv": HASHES[::-1]}
        fetch(d, step)
        assert eventually(lambda: received(d))
        assert d.side.take_errors() == set(INTO)
        assert d.tensors[NAMES[0]].max() == FREE


def test_both_ends_are_spans_of_the_request() -> None:
    traces = Traces()
    with workers() as ((p,), (d,)):
        for worker in (p, d):
            worker.side.trace(traces.provider)
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM, 10))
        assert arrives(d)
        assert drained(p)
    spans = traces.spans()
    assert spans.keys() == {"kvwire send", "kvwire receive"}
    for span in spans.values():
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:x}-{span.parent.span_id:x}" in SPAN


def test_a_step_that_only_waits_ends_with_what_it_waits_for() -> None:
    with workers() as ((p,), (d,)):
        fetch(d, fetching(addresses([p])))
        prefill(p, sending(FROM, 10))
        for _ in range(1000):
            d.side.begin_step(WorkerStep(idle=True))
            if received(d):
                break
        assert d.holds(INTO[:2])
        p.side.begin_step(WorkerStep(idle=True))
        assert drained(p)
