"""Workers of two engines, on real sockets: what arrives, and when memory is free."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire import Connection, Incoming
from kvwire_vllm.metadata import WorkerStep
from kvwire_vllm.metrics import REASONS
from kvwire_vllm.receiving import Patience
from packages.vllm.tests.support import fakes, steps
from tests.support.traces import Traces
from tests.support.waiting import eventually


@pytest.mark.parametrize("stream", ["layer", "chunk"])
def test_a_prompt_arrives(stream: str) -> None:
    with steps.workers(stream=stream) as (p, d):
        steps.ask(d, p)
        steps.give(p, d)
        assert steps.arrives(d)
        assert d.side.take_errors() == set()
        # Only now does the scheduler end it, and hears at once that it has drained.
        assert p.side.finished(()) == (set(), set())
        assert steps.drained(p)


def test_chunks_leave_before_the_prompt_is_whole() -> None:
    with steps.workers() as (p, d):
        steps.ask(d, p)
        steps.give_first(p, d, stop=5)
        assert eventually(lambda: d.holds(steps.INTO[:1]))
        assert d.side.finished(()) == (set(), set())
        steps.prefill(p, WorkerStep(written=[steps.written(steps.FROM[1:], 10)]))
        assert steps.arrives(d)


def test_a_prompt_that_was_computed_before_it_is_asked_for() -> None:
    patience = Patience(60.0, published_s=60.0)
    with steps.workers(patience=patience) as (p, d):
        steps.give(p)
        steps.ask(d, p, computed=True)
        assert steps.arrives(d)
        assert d.side.take_errors() == set()


@pytest.mark.parametrize("stream", ["layer", "chunk"])
def test_results_are_asked_for_before_a_draft_model_has_run(stream: str) -> None:
    """As vLLM's second model runner does: the drafter writes the last layer later."""
    *model, draft = fakes.NAMES
    with steps.workers(stream=stream) as (p, d):
        steps.ask(d, p)
        p.side.begin_step(steps.sending(steps.FROM, 10, steps.addresses([d])))
        for name in model:
            p.write(name, steps.FROM)
            p.side.layer_written(name)
        p.side.start_loads()
        assert p.side.finished(()) == (set(), set())
        assert not p.side.departures["p"].finished
        if stream == "layer":
            assert eventually(lambda: d.holds(steps.INTO[:2], len(model)))
        assert d.side.finished(()) == (set(), set())
        p.write(draft, steps.FROM)
        p.side.layer_written(draft)
        p.side.step_written()
        assert steps.arrives(d)
        # The scheduler has seen the answer, and ends the request in its next step.
        p.side.begin_step(WorkerStep())
        assert steps.drained(p)


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
    with steps.engines(producers, consumers) as (there, here):
        for d in here:
            steps.fetch(d, steps.fetching(steps.addresses(there), stages=producers[1]))
        for p in there:
            steps.prefill(
                p, steps.sending(steps.FROM, 10, steps.addresses(here), consumers[1])
            )
        for d in here:
            assert steps.arrives(d)
        for p in there:
            assert steps.drained(p)


def test_what_cannot_be_sent_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr("kvwire.Communicator.publish", fail)
    with steps.workers() as (p, _):
        steps.give(p)
        assert steps.drained(p)


# --- prompts that do not arrive -------------------------------------------------------

# Blocks that were here before are other requests' too.
CACHED = pytest.mark.parametrize("cached", [0, 1])
# What is counted where one engine acts while the other connects.
ANY = ("unpublished", "missing", "unreachable")


@contextmanager
def expect_missing(
    cached: int, *reasons: str, patient: bool = False, leaves: bool = False
) -> Iterator[tuple[fakes.Worker, fakes.Worker]]:
    """Two workers; not all of a prompt comes, and one of the reasons is counted.

    What is missing is told without what was here, since vLLM ends each request that
    uses such a block. Where engines are patient, it ends long before a load or a lease
    does. What prefill has sent drains, unless it leaves.
    """
    load_s, lease_s = (600.0, 30.0) if patient else (0.4, 0.3)
    patience = Patience(load_s, published_s=0.05)
    with steps.workers(patience=patience, lease_s=lease_s) as (p, d):
        yield p, d
        assert eventually(lambda: steps.received(d))
        errors, observed = d.side.take_errors(), d.side.take_observed()
        assert set(steps.INTO[1:]) <= errors <= set(steps.INTO[cached:])
        # Its first block may have come where its rest did not.
        assert steps.INTO[0] in errors or cached or d.holds(steps.INTO[:1])
        assert observed.pop("missing_blocks") == [len(errors)]
        counted = REASONS.keys() & observed.keys()
        assert len(counted) == bool(reasons)
        assert counted <= {*reasons}
        assert leaves or steps.drained(p)


@CACHED
def test_nobody_listens(cached: int) -> None:
    with expect_missing(cached, "unreachable", patient=True) as (_, d):
        steps.fetch(d, steps.fetching(("127.0.0.1:9",), cached))


@CACHED
def test_there_are_more_stages_than_layers(cached: int) -> None:
    stages = len(fakes.NAMES) + 1
    gone = ("127.0.0.1:9",) * stages
    with expect_missing(cached, "refused", patient=True) as (p, d):
        steps.fetch(d, steps.fetching(gone, cached, stages=stages))
        steps.prefill(p, steps.sending(steps.FROM, 10, gone, stages))


@CACHED
def test_nobody_publishes(cached: int) -> None:
    with expect_missing(cached, *ANY) as (p, d):
        steps.ask(d, p, cached=cached)


@CACHED
def test_it_was_fetched_before(cached: int) -> None:
    """Prefill has answered where it was: nobody waits for long."""
    with expect_missing(cached, "unpublished", patient=True) as (p, d):
        steps.give(p)
        p.side.finished(("p",))
        steps.ask(d, p)
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == set()
        assert "unpublished" not in d.side.take_observed()
        steps.ask(d, p, cached=cached, computed=True)


@CACHED
def test_its_lease_is_over(cached: int) -> None:
    """Nobody came in time, so its blocks are free."""
    with expect_missing(cached, *ANY) as (p, d):
        steps.give(p)
        assert steps.drained(p)
        steps.ask(d, p, cached=cached)


@CACHED
def test_it_is_another_prompt(cached: int) -> None:
    with expect_missing(cached, *ANY) as (p, d):
        steps.give(p)
        step = steps.fetching(steps.addresses([p]), cached)
        step.loads[0].hashes = {"0": steps.HASHES[::-1]}
        steps.fetch(d, step)
    assert d.tensors[fakes.NAMES[0]].max() == fakes.FREE


@CACHED
@pytest.mark.parametrize("who", ["prefill preempts", "prefill leaves", "time is over"])
def test_it_ends_in_the_middle(who: str, cached: int) -> None:
    leaves = who == "prefill leaves"
    with expect_missing(cached, *ANY, leaves=leaves) as (p, d):
        steps.ask(d, p, cached=cached)
        steps.give_first(p)
        if who == "prefill preempts":
            p.side.fence(WorkerStep(fenced={"p"}))
        elif leaves:
            p.side.close()


@CACHED
@pytest.mark.parametrize("reasons", [("unpublished",), ()], ids=["prefill", "decode"])
def test_one_side_ends_it(reasons: tuple[str, ...], cached: int) -> None:
    """Decode's own end has no reason that is counted."""
    with expect_missing(cached, *reasons, patient=True) as (p, d):
        steps.ask(d, p, cached=cached)
        steps.give_first(p)
        if reasons:
            p.side.finished(("p",))
        else:
            d.side.finished(("d",))


@CACHED
@pytest.mark.parametrize(("there", "stages"), [((2, 1), 1), ((1, 2), 1), ((1, 3), 2)])
def test_a_request_that_names_too_few_ranks(
    there: tuple[int, int], stages: int, cached: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All that the first ranks have arrives, and none of it is used."""
    with steps.engines(there, (1, 1)) as (others, (d,)):
        some = others[:stages]
        steps.fetch(d, steps.fetching(steps.addresses(some), cached, stages=stages))
        for p in some:
            steps.give(p)
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == set(steps.INTO[cached:])
    assert any("none of the ranks in the request has" in m for m in caplog.messages)


@CACHED
def test_what_one_rank_of_several_cannot_be_asked_for(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others touch no block any more when it is reported."""
    begun: list[Incoming] = []
    pull = Connection.pull

    def second_fails(*what: Any, **more: Any) -> Incoming:
        if begun:
            raise RuntimeError("out of something")
        begun.append(pull(*what, **more))
        return begun[-1]

    monkeypatch.setattr(Connection, "pull", second_fails)
    with steps.engines((2, 1), (1, 1)) as (there, (d,)):
        steps.fetch(d, steps.fetching(steps.addresses(there), cached))
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == set(steps.INTO[cached:])
        (one,) = begun
        assert one.is_drained


def test_blocks_that_were_here_are_not_written_to_where_nothing_names_them() -> None:
    """The sender cannot know then which blocks are not wanted."""
    with steps.workers() as (p, d):
        send = steps.sending(steps.FROM, 10)
        send.sends[0].hashes = {}
        steps.prefill(p, send)
        load = steps.fetching(steps.addresses([p]), 1)
        load.loads[0].hashes = {}
        steps.fetch(d, load)
        assert eventually(lambda: steps.received(d))
        here = steps.INTO[:1]
        assert all((d.read(name)[here] == fakes.FREE).all() for name in fakes.NAMES)
        assert d.side.take_errors() == set(steps.INTO[1:])


@pytest.mark.parametrize(("there", "here"), [(4, 2), (2, 4), (4, 8)])
def test_blocks_of_other_sizes(there: int, here: int) -> None:
    """What is the same prompt shows its content, and not the hashes of its blocks."""
    rng, counts = np.random.default_rng(7), (-(-10 // there), -(-10 // here))
    p, d = (fakes.Worker(block_tokens=size) for size in (there, here))
    with closing(p), closing(d):
        for tensor in p.tensors.values():
            tensor[:] = rng.random(tensor.shape, np.float32)
        blocks, into = list(range(1, 1 + counts[0])), list(range(3, 3 + counts[1]))
        for content, lost in ((b"one", set[int]()), (b"other", set(into))):
            load, send = (
                steps.fetching(steps.addresses([p])),
                steps.sending(blocks, 10, steps.addresses([d])),
            )
            load.loads[0].blocks = {"0": into}
            load.loads[0].hashes = {"0": [b"%d" % at for at in into]}
            load.loads[0].content = content
            send.sends[0].hashes = {"0": [b"%d" % at for at in blocks]}
            send.sends[0].content = b"one"
            steps.fetch(d, load)
            p.side.begin_step(send)
            p.side.step_written()
            assert eventually(lambda: steps.received(d))
            assert d.side.take_errors() == lost
            assert steps.drained(p)
        for name in fakes.NAMES:
            assert np.array_equal(
                in_tokens(p.tensors[name][blocks]), in_tokens(d.tensors[name][into])
            )


def in_tokens(blocks: Any) -> Any:
    """The prompt's ten tokens of some blocks: (head, token, number)."""
    count, heads, tokens, numbers = blocks.shape
    by_head = blocks.transpose(1, 0, 2, 3)
    return by_head.reshape(heads, count * tokens, numbers)[:, :10]


@pytest.mark.parametrize("order", list(fakes.ORDERS))
def test_memory_in_any_order_of_vllm(order: str) -> None:
    """To and from an engine whose attention backend has the first."""
    for there, here in ((order, "LBHNC"), ("LBHNC", order)):
        p, d = fakes.Worker(order=there), fakes.Worker(order=here)
        with closing(p), closing(d):
            steps.ask(d, p)
            steps.give(p)
            assert steps.arrives(d)
            others = [block for block in range(fakes.BLOCKS) if block not in steps.INTO]
            assert all(
                (d.read(name)[others] == fakes.FREE).all() for name in fakes.NAMES
            )


def test_what_is_here_is_neither_sent_nor_written_to() -> None:
    with steps.workers() as (p, d):
        steps.give(p)
        steps.ask(d, p, cached=1)
        assert eventually(lambda: steps.received(d))
        assert all(
            (tensor[steps.INTO[0]] == fakes.FREE).all() for tensor in d.tensors.values()
        )
        assert d.tensors[fakes.NAMES[0]][steps.INTO[1], 0, 0, 0] == 100


def test_a_rank_whose_heads_others_send_has_sent_at_once() -> None:
    """Eight ranks of a model with four heads: every second one has nothing to do."""
    with closing(fakes.Worker(1, 8)) as worker:
        worker.side.begin_step(steps.sending(steps.FROM, 10, ("127.0.0.1:9",)))
        worker.forward(steps.FROM)
        assert worker.side.finished(()) == (set(), set())
        assert worker.side.finished(("p", "other")) == ({"p"}, set())


def test_preempted_blocks_are_free_when_the_fence_returns() -> None:
    with steps.workers() as (p, d):
        steps.ask(d, p)
        steps.give_first(p)
        p.side.fence(WorkerStep(fenced={"p", "somebody-else"}))
        for tensor in p.tensors.values():
            tensor[:] = 7
        assert eventually(lambda: steps.received(d))
        errors = d.side.take_errors()
        assert set(steps.INTO[1:]) <= errors
        assert steps.INTO[0] in errors or d.holds(steps.INTO[:1])


def test_a_span_that_nobody_can_take_costs_no_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of an engine that traces, where OpenTelemetry is not installed."""
    monkeypatch.setitem(sys.modules, "kvwire.observe.opentelemetry", None)
    with steps.workers() as (p, d):
        steps.ask(d, p)
        steps.give(p)
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == set()


def test_nobody_wants_it_any_more() -> None:
    """Whose client traces nothing."""
    with steps.workers() as (p, d):
        steps.give(p)
        p.side.finished(("p",))
        assert p.side.departures
        remote = steps.addresses([p])
        steps.fetch(d, steps.fetching(remote, declined=True, traceparent=""))
        assert eventually(lambda: steps.freed(p))
        assert d.side.finished(()) == (set(), set())


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("unequal", {"profile": {"vllm_weights": "others"}}),
        ("untrusted", {"trust": "psk"}),
    ],
)
def test_why_engines_share_nothing(
    reason: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """By the reason that is counted; the other engine is there and has the prompt."""
    if reason == "untrusted":
        key = tmp_path / "key"
        key.write_text("ab" * 32)
        key.chmod(0o600)
        config = config | {"psk_file": str(key)}
    with (
        closing(fakes.Worker(config={"profile": {"vllm_weights": "mine"}})) as p,
        closing(fakes.Worker(config=config, load_timeout_s=0.3)) as d,
    ):
        steps.give(p)
        steps.ask(d, p)
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == set(steps.INTO)
        assert d.side.take_observed() == {"missing_blocks": [3.0], reason: [1.0]}


def test_both_ends_are_spans_of_the_request() -> None:
    traces = Traces()
    with steps.workers() as (p, d):
        for worker in (p, d):
            worker.side.trace(traces.provider)
        steps.ask(d, p)
        steps.give(p)
        assert steps.arrives(d)
        assert steps.drained(p)
    spans = traces.spans()
    assert spans.keys() == {"kvwire send", "kvwire receive"}
    for span in spans.values():
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:x}-{span.parent.span_id:x}" in steps.SPAN


def test_a_step_that_only_waits_ends_with_what_it_waits_for() -> None:
    with steps.workers() as (p, d):
        steps.ask(d, p)
        steps.give(p)
        for _ in range(1000):
            d.side.begin_step(WorkerStep(idle=True))
            if steps.received(d):
                break
        assert d.holds(steps.INTO[:2])
        p.side.begin_step(WorkerStep(idle=True))
        assert steps.drained(p)
