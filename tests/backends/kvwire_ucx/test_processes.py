"""Processes that die, stop, fork, exit and come back, with their data over UCX.

Each is at one end of a real connection to this process. Times are judged loosely, since
a busy machine is late for reasons of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kvwire
from kvwire import Communicator, ConnectionLost, PeerUnresponsive, Request
from tests.backends.kvwire_ucx.child import Child, child
from tests.backends.kvwire_ucx.support import needs_ucx, transports_of_this_loop
from tests.support.pairs import until

pytestmark = needs_ucx

INTERVAL_S, MISSES = 0.2, 3
SLACK_S = 3.0
HUGE = 64 << 20


@pytest.fixture
async def comm() -> AsyncIterator[Communicator]:
    async with kvwire.open(
        name="parent",
        ping_interval_s=INTERVAL_S,
        ping_misses=MISSES,
        close_timeout_s=0.5,
        require=("ucx",),
        backends={"ucx": {"TLS": transports_of_this_loop()}},
    ) as found:
        yield found


def now() -> float:
    return asyncio.get_running_loop().time()


async def under_way(there: Child, what: str) -> list[Request[Any]]:
    """What goes on when the peer dies: nothing, or a message of many chunks."""
    requests: list[Request[Any]] = [there.connection.recv(2)]
    if what == "sending":
        requests.append(there.connection.send(1, bytes(HUGE)))
        await until(lambda: there.connection.core.sending)
    return requests


async def all_fail(
    comm: Communicator, requests: list[Request[Any]], with_: type[Exception]
) -> None:
    """Every request fails, and gives its memory back."""
    for request in requests:
        with pytest.raises(with_):
            await request
        await request.released()
    assert len(comm.buffers) == 0


@pytest.mark.parametrize("what", ["idle", "sending"])
async def test_a_killed_peer_is_known_and_all_memory_is_free(
    comm: Communicator, what: str
) -> None:
    async with child(comm) as there:
        assert there.connection.transport == "ucx"
        requests = await under_way(there, what)
        killed = now()
        there.signal(signal.SIGKILL)
        await there.connection.wait_closed()
        print(f"killed while {what}: known after {(now() - killed) * 1e3:.1f} ms")
        assert now() - killed < SLACK_S
        await all_fail(comm, requests, ConnectionLost)


@pytest.mark.parametrize("what", ["idle", "sending"])
async def test_a_stopped_peer_is_known_and_all_memory_is_free(
    comm: Communicator, what: str
) -> None:
    async with child(comm) as there:
        requests = await under_way(there, what)
        stopped = now()
        there.signal(signal.SIGSTOP)
        await there.connection.wait_closed()
        took_s = now() - stopped
        print(f"stopped while {what}: known after {took_s:.2f} s")
        assert took_s < INTERVAL_S * (MISSES + 1) + SLACK_S
        await all_fail(comm, requests, PeerUnresponsive)
        there.signal(signal.SIGCONT)
        assert await there.last_words() != ""
