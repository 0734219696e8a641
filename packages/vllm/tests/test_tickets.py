"""Prompts that are computed before decode asks, which it reads by a ticket."""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvwire import Connection, RemoteWindow, UsageError
from kvwire_vllm import tickets
from kvwire_vllm.metadata import WorkerStep
from kvwire_vllm.peers import Peers
from kvwire_vllm.references import References
from kvwire_vllm.scheduler import SchedulerSide
from kvwire_vllm.tickets import OfferedBlocks
from packages.vllm.tests.support import fakes, steps
from packages.vllm.tests.support.fakes import New, Output, Request
from tests.support.waiting import eventually

FROM, INTO = steps.FROM, steps.INTO
HERE = References(this_host=True)
Params = dict[str, Any]


class Engine:
    """A scheduler's side, and the workers of its ranks."""

    def __init__(self, ranks: int = 1, stages: int = 1, **settings: Any) -> None:
        self.workers = [
            fakes.Worker(rank, ranks, stage=(stage, stages), **settings)
            for stage in range(stages)
            for rank in range(ranks)
        ]
        shape = self.workers[0].shape
        self.scheduler = SchedulerSide([shape], HERE)
        places = [(s, r) for s in range(stages) for r in range(ranks)]
        sides = [worker.side for worker in self.workers]
        self.scheduler.set_addresses(
            {place: side.address for place, side in zip(places, sides, strict=True)},
            {place: side.serial for place, side in zip(places, sides, strict=True)},
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def step(self, output: Output, computed: list[int] | None = None) -> None:
        """One step of every worker, which writes these blocks."""
        told = self.scheduler.step(output)
        for worker in self.workers:
            step = copy.deepcopy(told)  # vLLM's workers are processes
            worker.side.fence(step)
            worker.side.begin_step(step)
            if computed:
                worker.forward(computed)
            worker.side.start_loads()
            worker.side.step_written()

    def prefill(
        self,
        name: str = "p",
        blocks: list[int] = FROM,
        tokens: list[int] | None = None,
        between: Callable[[], object] = lambda: None,
    ) -> Params:
        """Compute a prompt, in two steps, that another engine reads later.

        Return the reference.
        """
        ids = steps.TOKENS if tokens is None else tokens
        request = Request(name, list(ids), {"do_remote_decode": True})
        self.scheduler.allocated(request, [blocks], 0)
        first = Output({name: 4}, [New(name, (blocks[:1],))])
        self.step(first, blocks[:1])
        between()
        self.step(fakes.chunk(name, blocks[1:], 4, len(ids) - 4), blocks)
        keeps, params = self.scheduler.finished(request)
        assert keeps
        assert params is not None
        self.over(name)
        return params

    def over(self, *names: str) -> set[str]:
        """Report the ends of requests; return those whose blocks vLLM frees now."""
        found = [worker.side.finished(names)[0] for worker in self.workers]
        drained = set.intersection(*found)
        self.scheduler.drained(drained)
        return drained

    def decode(
        self, params: Params, cached: int = 0, tokens: list[int] | None = None
    ) -> None:
        ids = steps.TOKENS if tokens is None else tokens
        request = Request("d", list(ids), dict(params))
        self.scheduler.allocated(request, [INTO], len(ids) - 4 * cached)
        self.step(Output({}))

    def arrives(self) -> bool:
        return all(
            eventually(partial(steps.received, worker)) for worker in self.workers
        )

    def errors(self) -> set[int]:
        return set().union(*(worker.side.take_errors() for worker in self.workers))

    def freed(self) -> bool:
        """Whether all of its prompts have been released."""
        self.over()
        return not any(worker.side.departures for worker in self.workers)


@contextmanager
def two(
    there: tuple[int, int] = (1, 1), here: tuple[int, int] = (1, 1), **settings: Any
) -> Iterator[tuple[Engine, Engine]]:
    with ExitStack() as stack:
        made = [Engine(*shape, **settings) for shape in (there, here)]
        for engine in made:
            stack.callback(engine.close)
        yield made[0], made[1]


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ((1, 1), (1, 1)),
        ((1, 1), (2, 1)),
        ((2, 1), (1, 1)),
        ((2, 1), (4, 1)),
        ((1, 2), (1, 1)),
        ((4, 2), (1, 3)),
    ],
)
def test_a_prompt_is_read(there: tuple[int, int], here: tuple[int, int]) -> None:
    """Whatever the ranks and stages; nothing is published, and a message frees it."""
    with two(there, here) as (p, d):
        params = p.prefill()
        for one in p.workers:
            assert not open_transfers(one)
        d.decode(params)
        assert d.arrives()
        assert d.errors() == set()
        assert all(worker.holds(INTO[:2]) for worker in d.workers)
        # Where an engine's ranks outnumber those it was told of, its lease ends it.
        if there == here:
            assert eventually(p.freed)


def test_blocks_that_are_here_are_not_written_to() -> None:
    with two() as (p, d):
        d.decode(p.prefill(), cached=1)
        assert d.arrives()
        (worker,) = d.workers
        assert all((t[INTO[0]] == fakes.FREE).all() for t in worker.tensors.values())
        assert worker.tensors[fakes.NAMES[0]][INTO[1], 0, 0, 0] == 100


def test_blocks_of_another_size() -> None:
    """They are read; but not if some of the prompt is here, which others use."""
    there, here = 2, 4
    with ExitStack() as stack:
        p, d = Engine(block_tokens=there), Engine(block_tokens=here)
        stack.callback(p.close)
        stack.callback(d.close)
        p.workers[0].tensors[fakes.NAMES[0]][:] = 5
        blocks, into = (list(range(1, 1 + -(-10 // n))) for n in (there, here))
        for cached in (0, 1):
            asked = Request("p", steps.TOKENS, {"do_remote_decode": True})
            p.scheduler.allocated(asked, [blocks], 0)
            p.step(Output({"p": 10}, [New("p", (blocks,))]))
            _, params = p.scheduler.finished(asked)
            p.over("p")
            request = Request("d", steps.TOKENS, params)
            d.scheduler.allocated(request, [into], 10 - here * cached)
            d.step(Output({}))
            assert d.arrives()
            assert d.errors() == set(into[cached:] if cached else ())
            assert eventually(p.freed)
        assert (d.workers[0].tensors[fakes.NAMES[0]][into[0]] == 5).all()


def test_a_prompt_that_was_read_before_is_missing_at_once() -> None:
    with two() as (p, d):
        params = p.prefill()
        for lost in (set[int](), set(INTO)):
            d.decode(params)
            assert d.arrives()
            assert d.errors() == lost
            observed = d.workers[0].side.take_observed()
            assert ("missing" in observed) is bool(lost)
            assert eventually(p.freed)
            p.step(Output({}))


def test_blocks_that_are_used_again_are_missing() -> None:
    """The reference is late: nothing of the next prompt counts as this one's."""
    with two(lease_s=0.01) as (p, d):
        params = p.prefill()
        assert eventually(p.freed)
        other = p.prefill("other", [*FROM[1:], 7], list(range(200, 210)))
        d.decode(params)
        assert d.arrives()
        assert d.errors() == set(INTO)
        assert other["ticket"] != params["ticket"]


def test_no_block_of_another_prompt_is_taken() -> None:
    """References come at once, late or twice, while prefill uses its blocks again."""
    chosen = random.Random(2)
    references: list[Params] = []
    landed: list[int] = []
    with two(lease_s=0.02) as (p, d):
        (source,) = p.workers
        (target,) = d.workers
        held: dict[str, list[int]] = {}

        def mark(number: int, name: str, blocks: list[int]) -> None:
            source.tensors[name][blocks] = number

        def room() -> bool:
            for name in p.over():
                del held[name]
            return sum(map(len, held.values())) <= fakes.BLOCKS - 3

        def read(number: int) -> None:
            d.decode(
                references[number], tokens=[*range(100 * number, 100 * number + 10)]
            )
            assert d.arrives()
            here = sorted({*INTO} - d.errors())
            landed.append(len(here))
            for tensor in target.tensors.values():
                assert (tensor[here] == number).all()

        for number in range(60):
            assert eventually(room)
            used = {block for blocks in held.values() for block in blocks}
            free = [block for block in range(fakes.BLOCKS) if block not in used]
            held[str(number)] = chosen.sample(free, 3)
            tokens = [*range(100 * number, 100 * number + 10)]
            source.write = partial(mark, number)  # type: ignore[method-assign]
            late = partial(read, chosen.randrange(max(0, number - 4), number + 1))
            if chosen.randrange(2) or not number:
                references.append(p.prefill(str(number), held[str(number)], tokens))
                late()
            else:
                late = partial(read, chosen.randrange(max(0, number - 4), number))
                references.append(
                    p.prefill(str(number), held[str(number)], tokens, between=late)
                )
    assert 0 < sum(landed) < 3 * len(landed)


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_ends(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dialled again, once; then the prompt is missing."""
    opened = Peers.window
    left = [times]

    async def cut(peers: Peers, connection: Connection) -> RemoteWindow:
        window = await opened(peers, connection)
        if left[0]:
            left[0] -= 1
            connection.abort("cut")
        return window

    monkeypatch.setattr(Peers, "window", cut)
    with two() as (p, d):
        d.decode(p.prefill())
        assert d.arrives()
        assert d.errors() == (set(INTO) if times == 2 else set())
        assert left == [0]


def test_two_prompts_that_begin_alike() -> None:
    """A block in both is offered until both are over."""
    with two() as (p, d):
        first = p.prefill("p", FROM)
        second = p.prefill("q", [FROM[0], 5, 6], [*steps.TOKENS[:4], *range(6)])
        d.decode(first)
        assert d.arrives()

        def one_is_over() -> bool:
            p.over()
            return len(p.workers[0].side.departures) == 1

        assert eventually(one_is_over)
        p.step(Output({}))
        d.decode(second, tokens=[*steps.TOKENS[:4], *range(6)])
        assert d.arrives()
        assert d.errors() == set()


def test_a_prompt_that_is_preempted_is_withdrawn_in_that_step() -> None:
    with two() as (p, d):
        params = p.prefill()
        output = Output({})
        output.preempted_req_ids = {"p"}
        p.step(output)
        d.decode(params)
        assert d.arrives()
        assert d.errors() == set(INTO)


def test_nobody_wants_it_any_more() -> None:
    """A request that ended before it was scheduled frees the blocks."""
    with two() as (p, d):
        params = p.prefill()
        d.scheduler.finished(Request("d", steps.TOKENS, dict(params)))
        d.step(Output({}))
        assert eventually(p.freed)


def test_the_ticket_of_another_prompt() -> None:
    """A client may combine what it was given; decode computes the prompt."""
    with two() as (p, d):
        params = p.prefill()
        d.decode(params, tokens=[*steps.TOKENS[:9], 7])
        assert d.arrives()
        assert d.errors() == set(INTO)
        assert (d.workers[0].tensors[fakes.NAMES[0]] == fakes.FREE).all()


def test_an_engine_that_was_restarted() -> None:
    """Another process at its address has other serials."""
    with two() as (p, d):
        params = p.prefill()
        other = Engine()
        try:
            params["remote"] = list(steps.addresses(other.workers))
            d.decode(params)
            assert d.arrives()
            assert d.errors() == set(INTO)
        finally:
            other.close()


def test_tickets_that_are_forged() -> None:
    """Whatever is changed, nothing lands that was not offered for this prompt."""
    with two() as (p, d):
        params = p.prefill()
        chosen = random.Random(1)
        raw = base64.b64decode(params["ticket"])
        for _ in range(30):
            forged = bytearray(raw)
            forged[chosen.randrange(len(raw))] ^= 1 << chosen.randrange(8)
            d.decode({**params, "ticket": base64.b64encode(forged).decode()})
            assert d.arrives()
            assert d.errors() == set(INTO)
        for broken in ("x", "AAAA", params["ticket"][:-8]):
            d.decode({**params, "ticket": broken})
            assert d.arrives()
            assert d.errors() == set(INTO)


@pytest.mark.parametrize("why", ["codec", "named", "no window"])
def test_what_is_published_as_before(why: str) -> None:
    """Prompts that are encoded, and those whose decode may ask at once."""
    settings: Params = {"codec": "int8"} if why == "codec" else {}
    engine = Engine(**settings)
    try:
        if why == "no window":
            engine.scheduler.set_addresses({(0, 0): engine.workers[0].side.address})
        more = {"transfer_id": "t"} if why == "named" else {}
        request = Request("p", steps.TOKENS, {"do_remote_decode": True, **more})
        engine.scheduler.allocated(request, [FROM], 0)
        step = engine.scheduler.step(Output({"p": 10}, [New("p", (FROM,))]))
        assert step.sends
        assert step.written
        _, params = engine.scheduler.finished(request)
        assert params is not None
        assert "ticket" not in params
    finally:
        engine.close()


def open_transfers(worker: Any) -> int:
    """How many transfers a worker's communicator has."""
    engine = worker.side.engine
    return int(engine.communicator.open_transfers)


def test_a_message_that_is_none() -> None:
    """It is ignored, and the next one frees the prompt."""
    with two() as (p, d):
        params = p.prefill()
        (worker,) = d.workers

        engine = worker.side.engine

        async def confuse() -> None:
            link = await engine.communicator.connect(p.workers[0].side.address)
            await link.send(tickets.RELEASE_TAG, b"\xc1")

        engine.run(confuse())
        d.decode(params)
        assert d.arrives()
        assert eventually(p.freed)


def test_generations_are_never_used_twice() -> None:
    """But by prompts that hold a block at the same time."""
    blocks = OfferedBlocks()
    first = blocks.take([3, 2000])
    assert np.array_equal(blocks.take([2000, 3]), first[::-1])
    assert blocks.give_back([3]) == []
    assert blocks.give_back([3, 2000]) == [3]
    again = blocks.take([3, 2000])
    assert again[0] != first[0]
    assert again[1] == first[1]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_ticket_for_other_ranks(ranks: int) -> None:
    generations = {"0": np.arange(2, dtype=np.uint64)}
    text = tickets.write({"0": [1, 2]}, generations, b"prompt", [b"s" * 16])
    assert tickets.read(text, ["0"], b"prompt", 1).blocks["0"].tolist() == [1, 2]
    with pytest.raises(UsageError, match=f"1 ranks; remote has {ranks}"):
        tickets.read(text, ["0"], b"prompt", ranks)
    with pytest.raises(UsageError, match=r"\(2,\) blocks per table.* 2 tables"):
        tickets.read(text, ["0", "1"], b"prompt", 1)


def test_a_step_without_metadata() -> None:
    """An idle step waits for a prompt that is being released."""
    with two() as (p, d):
        d.decode(p.prefill())
        assert d.arrives()
        (worker,) = p.workers
        worker.side.begin_step(WorkerStep(idle=True))
        assert eventually(p.freed)
