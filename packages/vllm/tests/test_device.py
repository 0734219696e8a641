"""Workers whose caches lie on a GPU: what orders their kernels and kvwire's copies.

A simulated device plays the GPU. Its kernels are queued and happen later, and a test
can stop them, so a copy that is too early moves the wrong bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from kvwire import BackendUnavailable, UsageError
from kvwire.limits import MIB
from kvwire_vllm.metadata import WorkerStep
from kvwire_vllm.sending import PromptSend
from packages.vllm.tests.support import steps
from packages.vllm.tests.support.fakes import FREE, NAMES, Worker
from tests.support import inside
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import eventually

FAILURE = "an illegal memory access"


class Gpus:
    """Makes workers, each on a device of its own or in host memory."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def worker(self, **settings: Any) -> Worker:
        device = SimulatedDevice()
        self._stack.callback(device.close)
        return self.host_worker(device=device, **settings)

    def host_worker(self, **settings: Any) -> Worker:
        return self._stack.enter_context(closing(Worker(**settings)))

    def of(self, worker: Worker) -> SimulatedDevice:
        assert worker.device is not None
        return worker.device

    def blocked(self, worker: Worker) -> threading.Event:
        """Have its kernels wait until this is set; the device does everything else."""
        gate = self._gate()
        assert worker.compute is not None
        worker.compute.call(lambda: void(gate.wait()))
        return gate

    def stalled(self, worker: Worker) -> threading.Event:
        """Have the loop of its kvwire wait until this is set."""
        gate = self._gate()

        async def stall() -> None:
            gate.wait()

        worker.side.engine.start(stall())
        return gate

    def _gate(self) -> threading.Event:
        made = threading.Event()
        self._stack.callback(made.set)
        return made


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with ExitStack() as stack:
        yield Gpus(stack)


def let_run(*workers: Worker) -> None:
    """Give everything the time to happen that is going to happen by itself."""
    for _ in range(100):
        for worker in workers:
            worker.side.engine.run(asyncio.sleep(0))


def void(_: object) -> None:
    """For work whose result nobody wants."""


def copying(worker: Worker) -> bool:
    engine = worker.side.engine

    async def look() -> bool:
        links = engine.communicator.live_connections
        return any(not inside.staging(link).quiet for link in links)

    return engine.run(look())


def untouched(worker: Worker) -> bool:
    return all((worker.read(name) == FREE).all() for name in NAMES)


# --- sending --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["layer", "chunk"])
def test_a_layer_is_read_once_the_gpu_has_written_it(gpus: Gpus, stream: str) -> None:
    """The forward pass returns before its first kernel has run."""
    p = gpus.worker(stream=stream)
    d = gpus.worker()
    steps.ask(d, p)
    steps.give_first(p, d)
    assert eventually(lambda: d.holds(steps.INTO[:1]))
    # There is a link now, and the plan is made: nothing else is left to wait for.
    gate = gpus.blocked(p)
    steps.prefill(p, WorkerStep(written=[steps.written(steps.FROM[1:], 10)]))
    let_run(p, d)
    assert d.side.finished(()) == (set(), set())
    gate.set()
    assert steps.arrives(d)
    assert d.side.take_errors() == set()
    assert steps.drained(p)


@pytest.mark.parametrize("stream", ["layer", "chunk"])
def test_an_event_is_recorded_where_the_hook_is_called(gpus: Gpus, stream: str) -> None:
    """Not when the transfer begins, on another thread and behind other work."""
    p, d = gpus.worker(stream=stream), gpus.worker()
    loop, gate = gpus.stalled(p), gpus.blocked(p)
    steps.give(p)
    loop.set()
    steps.ask(d, p)
    let_run(p, d)
    assert d.side.finished(()) == (set(), set())
    gate.set()
    assert steps.arrives(d)


@pytest.mark.parametrize(
    ("settings", "hooks", "events"),
    [
        ({"stream": "layer"}, len(NAMES), len(NAMES)),
        ({"stream": "layer", "group_bytes": MIB}, len(NAMES), 2),
        ({"stream": "layer"}, 1, 2),
        ({"stream": "layer"}, 0, 1),
        ({"stream": "chunk"}, len(NAMES), 1),
    ],
    ids=[
        "layers",
        "groups",
        "a hook that is not called",
        "a full CUDA graph",
        "chunks",
    ],
)
def test_as_few_events_as_there_are_orders(
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    hooks: int,
    events: int,
) -> None:
    p, d = gpus.worker(**settings), gpus.worker()
    recorded = counted(gpus.of(p), monkeypatch)
    gate = gpus.blocked(p)
    p.side.begin_step(steps.sending(steps.FROM, 10))
    for name in NAMES:
        p.write(name, steps.FROM)
        if name in NAMES[:hooks]:
            p.side.layer_written(name)
            p.side.layer_written(f"{name}.indexer")  # has no cache that is moved
    p.side.step_written()
    assert len(recorded) == events
    gate.set()
    steps.ask(d, p)
    assert steps.arrives(d)


def test_a_step_that_sends_nothing_records_nothing(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = gpus.worker()
    recorded = counted(gpus.of(p), monkeypatch)
    p.side.begin_step(WorkerStep())
    p.side.start_loads()
    p.forward(steps.FROM)
    assert recorded == []


def counted(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    recorded: list[object] = []
    record = device.record_current

    def noting() -> object:
        recorded.append(record())
        return recorded[-1]

    monkeypatch.setattr(device, "record_current", noting)
    return recorded


# --- fetching -------------------------------------------------------------------------


def test_blocks_are_written_once_the_gpu_no_longer_uses_them(gpus: Gpus) -> None:
    """With asynchronous scheduling the last pass of their last request still runs."""
    p, d = gpus.host_worker(), gpus.worker()
    seen: list[bool] = []
    gate = gpus.blocked(d)
    assert d.compute is not None
    d.compute.call(lambda: seen.append(untouched(d)))
    steps.ask(d, p)
    steps.give(p, d)
    let_run(p, d)
    assert d.side.finished(()) == (set(), set())
    gate.set()
    assert eventually(lambda: steps.received(d))
    assert seen == [True]
    assert d.holds(steps.INTO[:2])


def test_a_request_that_ends_before_its_blocks_were_free(gpus: Gpus) -> None:
    """Nothing was written to them, and prefill hears of it."""
    p, d = gpus.host_worker(), gpus.worker()
    gate = gpus.blocked(d)
    steps.ask(d, p)
    steps.give(p, d)
    let_run(p, d)
    d.side.finished(("d",))
    gate.set()
    assert eventually(lambda: steps.received(d))
    assert untouched(d)
    assert steps.drained(p)


def test_a_gpu_that_fails_before_the_blocks_were_free(gpus: Gpus) -> None:
    """Every block is an error, and none is in quarantine: none was touched."""
    p, d = gpus.host_worker(), gpus.worker()
    gate = gpus.blocked(d)
    steps.ask(d, p)
    gpus.of(d).fail(FAILURE)
    gate.set()
    assert eventually(lambda: steps.received(d))
    assert d.side.take_errors() == set(steps.INTO)
    assert untouched(d)


# --- the end --------------------------------------------------------------------------


def being_copied(gpus: Gpus, **settings: Any) -> tuple[Worker, Worker]:
    """A prompt's first block on its way, its copy queued on prefill's held device."""
    p, d = gpus.worker(**settings), gpus.host_worker()
    steps.give_first(p)
    (departure,) = p.side.departures.values()
    assert isinstance(departure, PromptSend)
    assert eventually(
        lambda: (
            len(departure._parts) == 1
            and len(departure._parts[0]._log.log) == len(NAMES)
        )
    )
    gpus.of(p).hold()
    steps.ask(d, p)
    assert eventually(lambda: copying(p))
    return p, d


def test_blocks_are_not_free_while_a_copy_of_them_is_queued(gpus: Gpus) -> None:
    p, d = being_copied(gpus)
    p.side.finished(("p",))
    assert eventually(lambda: steps.received(d))
    let_run(p)
    assert not steps.freed(p)
    gpus.of(p).release()
    assert eventually(lambda: steps.freed(p))


@pytest.mark.parametrize("fence_s", [30.0, 0.01])
def test_a_fence_waits_for_a_copy_that_is_queued(gpus: Gpus, fence_s: float) -> None:
    """Also when the links were dropped: that ends no copy."""
    p, d = being_copied(gpus, fence_s=fence_s)
    fence = threading.Thread(target=p.side.fence, args=(WorkerStep(fenced={"p"}),))
    fence.start()
    assert eventually(lambda: steps.received(d))
    let_run(p)
    assert fence.is_alive()
    gpus.of(p).release()
    fence.join()
    assert copying(p) is False


def test_a_gpu_that_fails_under_a_copy_keeps_the_blocks(
    gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = being_copied(gpus, fence_s=0.01)
    gpus.of(p).fail(FAILURE)
    gpus.of(p).release()
    assert eventually(lambda: steps.received(d))
    assert steps.INTO[0] in d.side.take_errors()
    p.side.finished(("p",))
    assert eventually(
        lambda: not steps.freed(p) and "stay in quarantine" in caplog.text
    )
    (said,) = [r for r in caplog.records if "stay in quarantine" in r.message]
    assert FAILURE in said.message
    assert "request p" in said.message
    # Once, and not in every step.
    assert not steps.freed(p)
    assert len([r for r in caplog.records if "stay in quarantine" in r.message]) == 1
    with pytest.raises(BackendUnavailable, match="request p: the blocks stay"):
        p.side.fence(WorkerStep(fenced={"p"}))


def test_a_gpu_that_fails_under_what_arrives_keeps_the_blocks(
    gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler would let another request write to them."""
    p, d = gpus.host_worker(), gpus.worker()
    gpus.of(d).hold()
    steps.ask(d, p)
    steps.give(p)
    assert eventually(lambda: copying(d))
    gpus.of(d).fail(FAILURE)
    gpus.of(d).release()

    def said() -> bool:
        assert d.side.finished(()) == (set(), set())
        return "request d stay in quarantine" in caplog.text

    assert eventually(said)
    assert d.side.finished(("d",)) == (set(), set())


def test_a_forward_pass_that_fails_sends_nothing(gpus: Gpus) -> None:
    """Its blocks were not copied, so they are free."""
    p, d = gpus.worker(), gpus.host_worker()
    steps.ask(d, p)
    gate = gpus.blocked(p)
    steps.give(p)
    gpus.of(p).fail(FAILURE)
    gate.set()
    assert eventually(lambda: steps.received(d))
    assert d.side.take_errors() == set(steps.INTO)
    assert untouched(d)
    assert steps.drained(p)


def test_a_device_that_does_not_work_is_known_at_the_start(gpus: Gpus) -> None:
    worker = gpus.worker()
    gpus.of(worker).close()
    with pytest.raises(UsageError, match="does not exist, or was closed"):
        worker.side.register(worker.arrays)
