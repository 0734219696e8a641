"""Two processes with their data over NIXL: it arrives, and a killed one is noticed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest

import kvwire
from kvwire import Communicator, ConnectionLost
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.support.child import started

pytestmark = [needs_nixl, pytest.mark.timeout(60)]

CHILD = "tests.backends.kvwire_nixl.child"
# Longer than those of other tests: a starved child must not pass for a dead one.
INTERVAL_S = 0.6


@pytest.fixture
async def comm() -> AsyncIterator[Communicator]:
    async with kvwire.open(
        name="parent",
        ping_interval_s=INTERVAL_S,
        close_timeout_s=0.5,
        require=("nixl",),
    ) as found:
        yield found


async def test_a_peer_reads_what_is_sent(comm: Communicator) -> None:
    async with started(comm, CHILD, INTERVAL_S) as there:
        assert there.connection.transport == "nixl"
        message = np.arange(16 << 20, dtype=np.uint8)
        for _ in range(4):
            await there.connection.send(1, message)


async def test_a_killed_peer_is_known_and_all_memory_is_free(
    comm: Communicator,
) -> None:
    async with started(comm, CHILD, INTERVAL_S) as there:
        message = bytes(32 << 20)
        requests = [there.connection.send(1, message) for _ in range(8)]
        await requests[0]
        there.signal(signal.SIGKILL)
        await there.connection.wait_closed()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(ends[-1], ConnectionLost)
        for request in requests:
            await request.released()
        assert len(comm._state.buffers) == 0


def test_a_process_with_nixl_exits_well() -> None:
    """The wheel and the system have libraries of one name, which end it otherwise."""
    code = """
from kvwire_nixl import library, settings
library.NixlAgent(settings.parse({}), "name").close()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=50)
    assert done.returncode == 0
