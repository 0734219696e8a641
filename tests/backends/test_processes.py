"""Processes that die, stop, fork, exit and come back, with their data over a lane.

Each is at one end of a real connection to this process. Times are judged loosely, since
a busy machine is late for reasons of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kvwire
from kvwire import Communicator, ConnectionLost, PeerUnresponsive, Request
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx import support as ucx
from tests.support import inside
from tests.support.child import GRANTED_BYTES, Child, child
from tests.support.pairs import until
from tests.support.runs import python

# Longer than those of other tests: a starved child must not pass for a dead one.
INTERVAL_S, MISSES = 0.6, 3
SLACK_S = 5.0
HUGE = GRANTED_BYTES
WORK = ("idle", "sending", "putting", "getting")


@pytest.fixture(
    params=[
        "tcp",
        pytest.param("ucx", marks=ucx.needs_ucx),
        pytest.param("nixl", marks=needs_nixl),
    ]
)
async def comm(request: pytest.FixtureRequest) -> AsyncIterator[Communicator]:
    """UCX sends large messages, and with NIXL the child reads them where they lie.

    Over `local` all has arrived before anybody can be killed.
    """
    backend = request.param
    settings: dict[str, str] = {}
    if backend == "ucx":
        settings = {"TLS": ucx.transports_of_this_loop()}
    async with kvwire.open(
        name="parent",
        ping_interval_s=INTERVAL_S,
        ping_misses=MISSES,
        close_timeout_s=0.5,
        require=(backend,),
        backends={backend: settings},
    ) as found:
        yield found


def now() -> float:
    return asyncio.get_running_loop().time()


async def under_way(there: Child, what: str) -> list[Request[Any]]:
    """What goes on when the peer dies: nothing, or requests of many chunks."""
    requests = begun(there, what)
    if what != "idle":
        await requests.pop(0)
    return requests


def begun(there: Child, what: str) -> list[Request[Any]]:
    connection, grant = there.connection, there.grant
    if what == "idle":
        return [connection.recv(2)]
    memory = bytearray(HUGE)
    requests: list[Request[Any]]
    if what == "sending":
        requests = [connection.send(1, memory) for _ in range(8)]
    elif what == "putting":
        requests = [connection.put(memory, grant) for _ in range(8)]
    else:
        requests = [connection.get(grant, bytearray(HUGE)) for _ in range(8)]
    return [*requests, connection.recv(2)]


async def all_end(
    comm: Communicator,
    requests: list[Request[Any]],
    expected: tuple[type[Exception], ...],
) -> None:
    """Every request ends, the last one in an error, and gives its memory back."""
    ends = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(ends[-1], expected)
    assert all(isinstance(end, expected) for end in ends if end is not None)
    for request in requests:
        await request.released()
    assert len(inside.buffers(comm)) == 0


@pytest.mark.parametrize("what", WORK)
async def test_a_killed_peer_is_known_and_all_memory_is_free(
    comm: Communicator, what: str
) -> None:
    async with child(comm) as there:
        assert (there.connection.transport,) == comm.config.require
        requests = await under_way(there, what)
        killed = now()
        there.signal(signal.SIGKILL)
        await there.connection.wait_closed()
        print(f"killed while {what}: known after {(now() - killed) * 1e3:.1f} ms")
        assert now() - killed < SLACK_S
        # The silence may be noticed first, where the kernel is slow to end a process.
        await all_end(comm, requests, (ConnectionLost, PeerUnresponsive))


@pytest.mark.slow
@pytest.mark.parametrize(
    "comm", [pytest.param("nixl", marks=needs_nixl)], indirect=True
)
async def test_memory_in_quarantine_is_free_when_the_stopped_peer_dies(
    comm: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    """We are reading its own, and cannot cancel that."""
    async with child(comm) as there:
        requests = begun(there, "getting")
        lane: Any = inside.lanes(there.connection).open[0].lane
        await until(lambda: lane.received_bytes)
        there.signal(signal.SIGSTOP)
        await until(lambda: "stays in quarantine" in caplog.text)
        assert there.connection.closed
        assert len(inside.buffers(comm))
        there.signal(signal.SIGKILL)
        await there.connection.wait_closed()
        await all_end(comm, requests, (PeerUnresponsive,))


# --- processes of their own -----------------------------------------------------------

_ROOT = Path(__file__).resolve().parents[2]
_BEGIN = """
import asyncio, os, sys
import kvwire
from kvwire.testing.harness import loopback

async def exchange(close=True):
    settings = {"ucx": {"TLS": sys.argv[1]}}
    async with loopback("ucx", backends=settings, require=("ucx",)) as pair:
        message = bytes(3 << 20)
        request = pair.ab.send(7, message)
        assert await pair.ba.recv(7) == message
        await request
        if not close:
            os.write(1, b"done")
            sys.exit(0)
"""


def run(code: str, tls: str) -> str:
    """What a process prints that exits by itself, and well."""
    done = python("-X", "faulthandler", "-c", _BEGIN + code, tls, cwd=_ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FORK_BEFORE = """
from kvwire.backend import registry
assert registry.availability("ucx").available
child = os.fork()
asyncio.run(exchange())
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""
FORK_AFTER = """
asyncio.run(exchange())
child = os.fork()
if not child:
    try:
        asyncio.run(exchange())
    except kvwire.BackendUnavailable as exc:
        os._exit(0 if "was forked from" in str(exc) else 2)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
asyncio.run(exchange())
print("done")
"""


@ucx.needs_ucx
@pytest.mark.slow
@pytest.mark.parametrize("tls", ucx.TRANSPORTS)
@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(3): asyncio.run(exchange())\nprint('done')",
        "asyncio.run(exchange(close=False))",
        FORK_BEFORE,
        FORK_AFTER,
    ],
    ids=["loops in a row", "an exit midway", "a fork before", "a fork after is told"],
)
def test_a_process_with_ucx_does_as_others_do(code: str, tls: str) -> None:
    assert run(code, tls) == "done"


@needs_nixl
def test_a_process_with_nixl_exits_well() -> None:
    """The wheel and the system have libraries of one name, which end it otherwise."""
    code = """
from kvwire_nixl import library, settings
library.NixlAgent(settings.parse({}), "name").close()
print("done")
"""
    assert run(code, "") == "done"
