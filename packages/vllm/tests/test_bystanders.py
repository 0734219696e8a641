"""Blocks that were here before are other requests' too: nothing of them is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvwire import Connection
from kvwire_vllm import receiving
from kvwire_vllm.metadata import WorkerStep
from packages.vllm.tests.support import fakes, steps
from tests.support.waiting import eventually

Way = Callable[[fakes.Worker, fakes.Worker], None]
# The block that a system prompt of all has left behind, and those of this transfer.
SHARED, OWN = steps.INTO[:1], set(steps.INTO[1:])


def fetch(p: fakes.Worker, d: fakes.Worker, **more: bool) -> None:
    steps.ask(d, p, cached=1, **more)


def nobody_listens(_: fakes.Worker, d: fakes.Worker) -> None:
    steps.fetch(d, steps.fetching(("127.0.0.1:9",), cached=1))


def nobody_publishes(p: fakes.Worker, d: fakes.Worker) -> None:
    fetch(p, d)


def it_was_fetched_before(p: fakes.Worker, d: fakes.Worker) -> None:
    fetch(p, d, computed=True)


def its_lease_is_over(p: fakes.Worker, d: fakes.Worker) -> None:
    steps.give(p)
    assert steps.drained(p)
    fetch(p, d)


def it_is_another_prompt(p: fakes.Worker, d: fakes.Worker) -> None:
    steps.give(p)
    step = steps.fetching(steps.addresses([p]), cached=1)
    step.loads[0].hashes = {"0": steps.HASHES[::-1]}
    steps.fetch(d, step)


def begins(p: fakes.Worker, d: fakes.Worker) -> None:
    fetch(p, d)
    steps.give_first(p)


def prefill_preempts(p: fakes.Worker, d: fakes.Worker) -> None:
    begins(p, d)
    p.side.fence(WorkerStep(fenced={"p"}))


def prefill_ends_it(p: fakes.Worker, d: fakes.Worker) -> None:
    begins(p, d)
    p.side.finished(("p",))


def prefill_leaves(p: fakes.Worker, d: fakes.Worker) -> None:
    begins(p, d)
    p.side.close()


def its_time_is_over(p: fakes.Worker, d: fakes.Worker) -> None:
    begins(p, d)


def decode_ends_it(p: fakes.Worker, d: fakes.Worker) -> None:
    begins(p, d)
    d.side.finished(("d",))


@pytest.mark.parametrize(
    "way",
    [
        nobody_listens,
        nobody_publishes,
        it_was_fetched_before,
        its_lease_is_over,
        it_is_another_prompt,
        prefill_preempts,
        prefill_ends_it,
        prefill_leaves,
        its_time_is_over,
        decode_ends_it,
    ],
)
def test_blocks_that_were_here_are_not_reported(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a transfer ends: vLLM would end each request that uses such a block."""
    monkeypatch.setattr(receiving, "_PUBLISHED_WITHIN_S", 0.05)
    with steps.workers(load_timeout_s=0.4, lease_s=0.3) as (p, d):
        way(p, d)
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == OWN
        assert d.side.take_observed()["missing_blocks"] == [len(OWN)]


def test_nor_where_one_of_several_ranks_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pull, asked = Connection.pull, iter((True, False))

    def second_fails(*what: object, **more: object) -> object:
        if next(asked):
            return pull(*what, **more)  # type: ignore[arg-type]
        raise RuntimeError("out of something")

    monkeypatch.setattr(Connection, "pull", second_fails)
    with steps.engines((2, 1), (1, 1)) as (there, (d,)):
        steps.fetch(d, steps.fetching(steps.addresses(there), cached=1))
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == OWN


def test_nor_where_a_request_names_too_few_ranks() -> None:
    with steps.engines((2, 1), (1, 1)) as ((p, _), (d,)):
        fetch(p, d)
        steps.give(p)
        assert eventually(lambda: steps.received(d))
        assert d.side.take_errors() == OWN


def test_nor_written_to_where_nothing_names_them() -> None:
    """Whoever sends cannot know then which blocks are not wanted."""
    with steps.workers() as (p, d):
        send = steps.sending(steps.FROM, 10)
        send.sends[0].hashes = {}
        steps.prefill(p, send)
        load = steps.fetching(steps.addresses([p]), cached=1)
        load.loads[0].hashes = {}
        steps.fetch(d, load)
        assert eventually(lambda: steps.received(d))
        assert all((d.read(name)[SHARED] == fakes.FREE).all() for name in fakes.NAMES)
        assert d.side.take_errors() == OWN
