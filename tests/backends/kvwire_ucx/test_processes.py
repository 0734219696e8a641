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

pytestmark = needs_ucx

INTERVAL_S, MISSES = 0.2, 3
SLACK_S = 5.0
HUGE = 32 << 20


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
    """What goes on when the peer dies: nothing, or messages of many chunks."""
    connection = there.connection
    if what == "idle":
        return [connection.recv(2)]
    message = bytes(HUGE)
    requests: list[Request[Any]] = [connection.send(1, message) for _ in range(8)]
    await requests[0]
    return [*requests[1:], connection.recv(2)]


async def all_end(
    comm: Communicator, requests: list[Request[Any]], expected: type[Exception]
) -> None:
    """Every request ends, the last one in an error, and gives its memory back."""
    ends = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(ends[-1], expected)
    assert all(isinstance(end, expected) for end in ends if end is not None)
    for request in requests:
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
        await all_end(comm, requests, ConnectionLost)


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
        await all_end(comm, requests, PeerUnresponsive)
        there.signal(signal.SIGCONT)
        assert await there.last_words() != ""
