"""Workers: they sleep when nothing happens, and wake when something does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvwire.errors import BackendUnavailable
from kvwire_ucx import worker as module
from kvwire_ucx.binding import ERR_CANCELED
from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.context import (
    ABANDONED_MAX,
    Context,
    Resource,
    no_port_up,
)
from kvwire_ucx.library import ACTIVE, port_state
from kvwire_ucx.requests import MemoryHandles
from kvwire_ucx.worker import UcxEndpoint, Worker
from tests.backends.kvwire_ucx import newcomer
from tests.backends.kvwire_ucx.support import (
    SHARED_MEMORY,
    TCP,
    needs_ucx,
    transports_of_this_loop,
)
from tests.support.tree import ROOT

pytestmark = needs_ucx

TAG = 77


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    context = Context({"TLS": transports_of_this_loop()})
    made = [Worker(context, asyncio.get_running_loop()) for _ in range(count)]
    try:
        yield made
    finally:
        for worker in made:
            worker.close()
        context.close()


def endpoint(worker: Worker, peer: Worker) -> UcxEndpoint:
    version = worker.context.library.version
    there = UcxBootstrap(lane=1, version=version, address=peer.address)
    return UcxEndpoint(worker, there, lambda status: None)


class Told:
    """How operations have ended."""

    def __init__(self) -> None:
        self.how: list[tuple[int, int]] = []
        self._changed = asyncio.Event()

    def __call__(self, status: int, nbytes: int) -> None:
        self.how.append((status, nbytes))
        self._changed.set()

    async def wait(self) -> tuple[int, int]:
        await self._changed.wait()
        return self.how[0]


async def gone(endpoint: UcxEndpoint, worker: Worker) -> None:
    """Close an endpoint and wait until its worker may be destroyed."""
    done, idle = asyncio.Event(), asyncio.Event()
    endpoint.close(done.set)
    await done.wait()
    worker.when_idle(idle.set)
    await idle.wait()


async def test_a_pending_receive_costs_nothing() -> None:
    """No turn of the loop is taken while nothing arrives: none is polled for."""
    with workers(1) as (worker,):
        told, idle = Told(), asyncio.Event()
        request = worker.receive(MemoryHandles(memoryview(bytearray(5))), TAG, told)
        worker.when_idle(idle.set)
        await idle.wait()
        turns: list[str] = []
        worker._on_idle = lambda: turns.append("a turn was taken")
        for _ in range(50):
            await asyncio.sleep(0)
        assert turns == []
        worker.wake()
        for _ in range(3):
            await asyncio.sleep(0)
        assert turns == ["a turn was taken"]
        assert told.how == []
        worker.cancel(request)
        assert await told.wait() == (ERR_CANCELED, 0)


async def test_the_end_of_a_worker_ends_what_is_pending() -> None:
    told = Told()
    with workers(1) as (worker,):
        worker.receive(MemoryHandles(memoryview(bytearray(5))), TAG, told)
    assert told.how == [(ERR_CANCELED, 0)]


async def test_a_worker_to_which_a_peer_has_just_connected_can_be_closed() -> None:
    """At each step of the connection, and the process lives; UCX 1.13 ended it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", newcomer.__name__, transports_of_this_loop()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    closed, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert closed.split() == [b"%d" % steps for steps in range(newcomer.STEPS)]


async def test_an_address_that_leads_nowhere_is_refused() -> None:
    with workers(1) as (worker,):
        version = worker.context.library.version
        nowhere = UcxBootstrap(lane=1, version=version, address=bytes(40))
        with pytest.raises(BackendUnavailable, match="UCX cannot reach the peer"):
            UcxEndpoint(worker, nowhere, lambda status: None)


async def test_the_child_of_a_process_that_has_used_ucx_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_first_process", 1)
    context = Context({})
    try:
        with pytest.raises(BackendUnavailable, match=r'forked from 1.*"spawn"'):
            Worker(context, asyncio.get_running_loop())
    finally:
        context.close()


# --- contexts: what UCX finds under which settings, and that RDMA can be required -----


def transports(given: dict[str, str]) -> set[str]:
    context = Context(given)
    try:
        return {resource.transport for resource in context.resources}
    finally:
        context.close()


def is_rdma(transport: str) -> bool:
    return Resource(transport, "a device").is_rdma


def test_it_lists_what_the_settings_leave() -> None:
    assert transports({"TLS": TCP}) == {"tcp"}
    assert {"tcp", "self", "sysv", "posix"} <= transports({"TLS": SHARED_MEMORY})


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    assert transports({"TLS": TCP}) == {"self"}


def test_requiring_rdma_says_what_was_found_instead() -> None:
    if any(is_rdma(transport) for transport in transports({})):
        pytest.skip("this machine has RDMA, and UCX uses it")
    words = r"require_rdma: UCX 1\.\d+\.\d+ .* finds no RDMA device, only .*tcp/lo"
    with pytest.raises(BackendUnavailable, match=words):
        Context({"require_rdma": "yes"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"KEEPALIVE_INTERVAL": "soon"}, "does not take the setting KEEPALIVE"),
        ({"TLS": "pigeons"}, "no context: No such device"),
    ],
)
def test_ucx_says_what_is_wrong_with_settings(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(BackendUnavailable, match=words):
        Context(given)


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        *((name, True) for name in ("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_verbs")),
        *((name, True) for name in ("rc", "srd", "gga_mlx5")),
        *((name, False) for name in ("tcp", "sysv", "posix", "cma", "self", "xpmem")),
        *((name, False) for name in ("cuda_copy", "cuda_ipc", "rdmacm")),
    ],
)
def test_rdma_is_told_by_the_transport(transport: str, expected: bool) -> None:
    assert is_rdma(transport) is expected


@pytest.mark.parametrize(
    ("states", "refused"),
    [
        ({"mlx5_0:1": "DOWN"}, "no RDMA port is up: mlx5_0:1 is DOWN"),
        (
            {"a:1": "DOWN", "b:1": "gone"},
            "no RDMA port is up: a:1 is DOWN, b:1 is gone",
        ),
        ({"a:1": "DOWN", "b:1": "ACTIVE"}, ""),
        ({"a:1": ""}, ""),
        ({}, ""),
    ],
    ids=["down", "removed", "one of two", "unknown", "no device"],
)
def test_no_worker_is_opened_while_no_port_is_up(
    states: dict[str, str], refused: str
) -> None:
    assert no_port_up(states) == refused


def test_the_kernel_s_word_for_a_port(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    assert port_state("mlx5_0:1", tmp_path) == ACTIVE
    assert port_state("mlx5_1:1", tmp_path) == "gone"
    assert port_state("mlx5_0:1", tmp_path / "nothing") == ""


async def test_workers_that_cannot_be_freed_are_kept_and_few() -> None:
    """And the context that calls into them lives as long."""
    context = Context({"TLS": TCP})
    kept = [Worker(context, asyncio.get_running_loop()) for _ in range(ABANDONED_MAX)]
    for worker in kept:
        context.check_open()
        worker.abandon()
    other = Context({"TLS": TCP})  # as another communicator has
    for each in (context, other):
        with pytest.raises(BackendUnavailable, match=f"free {ABANDONED_MAX} lanes"):
            each.check_open()
    other.close()
    handle = context.handle
    context.close()
    assert context.abandoned == kept
    for worker in kept:  # as this UCX can
        context.library.ucp.worker_destroy(worker.handle)
        context.release(worker)
    context.abandoned.clear()
    context.library.ucp.cleanup(handle)
