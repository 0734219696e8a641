"""Goals R12 to R14: dead peers are known soon, and the living are not called dead.

Times are printed (``pytest -rP``) and judged loosely, since a busy machine is late for
reasons of its own. Pings come every 0.2 s here instead of every 2 s; that the defaults
give 6 s is arithmetic, in tests/test_config.py.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kvwire
from kvwire import Communicator, ConnectionLost, PeerUnresponsive, Request
from tests.support import inside
from tests.support.caches import Memory
from tests.support.child import Child, child
from tests.support.depth import parameters
from tests.support.pairs import communicators, until
from tests.support.proxy import Cut, Direction, Ending, Proxy
from tests.support.runs import Beside, beside

INTERVAL_S, MISSES = 0.2, 3
SILENCE_S = INTERVAL_S * MISSES
# What a busy machine may add.
SLACK_S = 5.0
HUGE = 64 << 20

# A child takes half a second to start; what it is asked does not depend on our loop.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@pytest.fixture
async def comm() -> AsyncIterator[Communicator]:
    # Over `local` a huge message arrives before anybody can be killed.
    config = kvwire.Config(
        ping_interval_s=INTERVAL_S, ping_misses=MISSES, forbid=("local",)
    )
    async with kvwire.open(config, name="parent", close_timeout_s=0.5) as found:
        yield found


def now() -> float:
    return asyncio.get_running_loop().time()


async def under_way(there: Child, what: str) -> list[Request[int]]:
    """What goes on when the peer dies: nothing, or a message that fills the wire."""
    if what == "idle":
        return []
    request = there.connection.send(1, bytes(HUGE))
    await until(lambda: inside.core(there.connection).sending)
    return [request]


# --- R12: a killed process; requests over each transport are in backends/test_processes


@one_loop
@pytest.mark.parametrize("verb", ["pull", "push"])
@pytest.mark.parametrize("transport", ["tcp", "local"])
async def test_a_killed_producer_ends_its_transfers_soon(
    transport: str, verb: str
) -> None:
    """With the default settings: an outcome, and what landed before is kept."""
    async with (
        beside("-m", "tests.fault.producer", verb, kind=Beside) as process,
        kvwire.open(name="consumer") as comm,
    ):
        port = await process.line()
        conn = await comm.connect(f"127.0.0.1:{port}", transport=transport)
        ask = conn.pull if verb == "pull" else comm.expect
        inc = ask("x", Memory().cache, [0, 1])
        await inc.layer(1)
        process.signal(signal.SIGKILL)
        killed = now()
        outcome = await inc
        took_s = now() - killed
        print(f"{verb} over {transport}, killed: outcome after {took_s:.2f} s (1.5 s)")
        assert took_s < comm.config.restart_grace_s + SLACK_S
        assert not outcome.complete
        assert inc.layer_landed(0)
        assert "the peer has ended" in "; ".join(outcome.missing.reasons)


# --- R13: silence ---------------------------------------------------------------------


@one_loop
@pytest.mark.parametrize("what", parameters(["sending", "idle"], every=2))
async def test_a_stopped_peer_is_given_up(comm: Communicator, what: str) -> None:
    async with child(comm) as there:
        requests = await under_way(there, what)
        stopped = now()
        there.signal(signal.SIGSTOP)
        await there.connection.wait_closed()
        took_s = now() - stopped
        print(f"stopped while {what}: known after {took_s:.2f} s of {SILENCE_S:g} s")
        assert SILENCE_S - INTERVAL_S < took_s < SILENCE_S + SLACK_S
        for request in requests:
            with pytest.raises(PeerUnresponsive, match="silent for"):
                await request
            await request.released()
        there.signal(signal.SIGCONT)
        assert await there.last_words() == "ConnectionLost"


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("what", ["idle", "sending"])
async def test_one_silent_direction_is_enough(way: Direction, what: str) -> None:
    config: dict[str, Any] = {"ping_interval_s": INTERVAL_S, "close_timeout_s": 0.5}
    async with (
        communicators(**config) as (near, far),
        Proxy(await far.listen("127.0.0.1:0")) as proxy,
    ):
        left = await near.connect(proxy.address)
        right = await far.accept()
        waiting = [left.recv(1), right.recv(1)]
        if what == "sending":
            left.send(2, bytes(HUGE))
            right.recv(2, bytearray(HUGE))
        began = now()
        proxy.toxics = (Cut(way, 0, Ending.SILENCE),)
        await asyncio.gather(left.wait_closed(), right.wait_closed())
        assert now() - began < SILENCE_S + SLACK_S
        deaf, heard = waiting if way is Direction.TO_CLIENT else reversed(waiting)
        with pytest.raises(PeerUnresponsive):
            await deaf
        with pytest.raises(ConnectionLost):
            await heard


# --- R14: the living ------------------------------------------------------------------


async def expect_alive(there: Child) -> None:
    """A message is taken, and no ping has remained without an answer."""
    for _ in range(3):
        await there.connection.send(1, bytes(HUGE // 16))
    assert not there.connection.closed


@one_loop
@pytest.mark.parametrize("what", parameters(["sending", "idle"], every=2))
async def test_our_own_stall_is_forgiven(comm: Communicator, what: str) -> None:
    """A loop that a GPU synchronisation holds up for longer than peers may be silent.

    The peer gets no answer to its pings meanwhile, so it must be patient: it is stopped
    for as long, which is a stall of its own.
    """
    async with child(comm) as there:
        await under_way(there, what)
        there.signal(signal.SIGSTOP)
        threading.Event().wait(2 * SILENCE_S)
        there.signal(signal.SIGCONT)
        await expect_alive(there)


@one_loop
async def test_a_peer_that_was_stopped_for_less_is_not_given_up(
    comm: Communicator,
) -> None:
    async with child(comm) as there:
        there.signal(signal.SIGSTOP)
        stopped = asyncio.Event()
        asyncio.get_running_loop().call_later(SILENCE_S - 1.5 * INTERVAL_S, stopped.set)
        await stopped.wait()
        there.signal(signal.SIGCONT)
        await expect_alive(there)
