"""One prompt of two engines: the steps that name it, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvwire.kv.hashing import HashScheme
from kvwire_vllm.metadata import (
    ComputedTokens,
    LoadPrompt,
    SendPrompt,
    WorkerStep,
)
from packages.vllm.tests.support.fakes import BLOCK_TOKENS, Worker
from tests.support.waiting import eventually

TOKENS = list(range(100, 110))  # two blocks and a half
SPAN = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"  # of the client, as W3C names it
HASHES = HashScheme(BLOCK_TOKENS).block_hashes(TOKENS)
FROM, INTO = [3, 1, 4], [9, 2, 6]


@contextmanager
def workers(**settings: Any) -> Iterator[tuple[Worker, Worker]]:
    with engines((1, 1), (1, 1), **settings) as ((p,), (d,)):
        yield p, d


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


def addresses(group: list[Worker]) -> tuple[str, ...]:
    return tuple(worker.side.address for worker in group)


def sending(
    blocks: list[int], stop: int, remote: tuple[str, ...] = (), stages: int = 1
) -> WorkerStep:
    send = SendPrompt(
        request_id="p",
        transfer_id="t",
        tokens=len(TOKENS),
        listed={"0": len(TOKENS)},
        blocks={"0": blocks},
        hashes={"0": HASHES},
        remote=remote,
        stages=stages,
        traceparent=SPAN,
    )
    return WorkerStep(sends=[send], written=[written([], stop)])


def written(blocks: list[int], stop: int) -> ComputedTokens:
    """A step's part of the prompt: more blocks, and tokens up to one."""
    return ComputedTokens(request_id="p", blocks={"0": blocks}, stop=stop)


def fetching(remote: tuple[str, ...], cached: int = 0, **more: Any) -> WorkerStep:
    load = LoadPrompt(
        request_id="d",
        transfer_id="t",
        listed={"0": len(TOKENS)},
        blocks={"0": INTO},
        cached={"0": cached},
        hashes={"0": HASHES},
        remote=remote,
        **{"traceparent": SPAN, **more},
    )
    return WorkerStep(loads=[load])


def fetch(worker: Worker, step: WorkerStep) -> None:
    worker.side.begin_step(step)
    worker.side.start_loads()


def ask(worker: Worker, *there: Worker, **more: Any) -> None:
    """Have a worker fetch the prompt from others."""
    fetch(worker, fetching(addresses([*there]), **more))


def give(worker: Worker, *there: Worker, stages: int = 1) -> None:
    """Have a worker compute the whole prompt, and send it, perhaps to others alone."""
    prefill(worker, sending(FROM, len(TOKENS), addresses([*there]), stages))


def give_first(worker: Worker, *there: Worker, stop: int = 4) -> None:
    """Have a worker compute what fits into the prompt's first block, and a little."""
    prefill(worker, sending(FROM[:1], stop, addresses([*there])), FROM[:1])


def received(worker: Worker) -> bool:
    """Whether the scheduler has just heard that the prompt is there."""
    return worker.side.finished(()) == (set(), {"d"})


def freed(worker: Worker) -> bool:
    """Whether the scheduler has heard that the prompt's blocks are free."""
    worker.side.finished(())
    return not worker.side.departures


def drained(worker: Worker) -> bool:
    """End the prompt at prefill; whether its blocks come free."""
    worker.side.finished(("p",))
    return eventually(lambda: freed(worker))


def prefill(worker: Worker, step: WorkerStep, blocks: list[int] = FROM) -> None:
    worker.side.begin_step(step)
    worker.forward(blocks)


def arrives(worker: Worker) -> bool:
    """Whether the prompt is there in the end, whole."""
    return eventually(lambda: received(worker)) and worker.holds(INTO[:2])
