"""Messages, puts and gets of a GPU's memory between two processes that share it.

Without a GPU, a device of the tests takes its place.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire.limits import KIB, MIB
from tests.gpu.devices import KINDS, need_gpu
from tests.gpu.peer import LATE_S, Peer, Torch, gpu, serve, started

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
SIZES: Final = (1, 16 * KIB, 300 * KIB + 3, 5 * MIB)
_DATA = 3

Bytes = npt.NDArray[np.uint8]


def content(nbytes: int, seed: int = 1) -> Bytes:
    """What both processes know to be in a message."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# --- the peer -------------------------------------------------------------------------


class Answers:
    """Sends, receives and grants what it is asked for."""

    def __init__(
        self, memory: Torch, comm: kvwire.Communicator, connection: kvwire.Connection
    ) -> None:
        self._memory = memory
        self._comm = comm
        self._connection = connection
        self._array: Any = None

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        what, values = asked["do"], content(asked["nbytes"])
        if what == "send":
            await self._connection.send(_DATA, self._memory.array(values))
            return {}
        if what != "look":
            self._array = self._memory.array(np.zeros_like(values))
        if what == "grant":
            region = self._comm.register(self._array, "readwrite")
            return {"grant": region.grant(self._connection).to_bytes().hex()}
        if what == "recv":
            await self._connection.recv(_DATA, into=self._array)
        got = self._memory.values(self._array)
        return {"right": bool(np.array_equal(got, values))}


async def be_peer(kind: str) -> None:
    async with kvwire.open() as comm:
        memory = gpu(kind)
        await serve(comm, lambda there: Answers(memory, comm, there).answer)


# --- this process ---------------------------------------------------------------------


class Checks:
    """Asks the peer, and looks at what has come."""

    def __init__(self, memory: Torch, peer: Peer) -> None:
        self.memory = memory
        self.peer = peer
        self.connection = peer.connection

    async def grant(self, nbytes: int) -> kvwire.Grant:
        answer = await self.peer.ask("grant", nbytes=nbytes)
        return kvwire.Grant.from_bytes(bytes.fromhex(answer["grant"]))

    def zeros(self, nbytes: int) -> Any:
        return self.memory.array(np.zeros(nbytes, np.uint8))

    def holds(self, array: Any, nbytes: int) -> bool:
        return np.array_equal(self.memory.values(array), content(nbytes))


@pytest.fixture(params=KINDS)
async def checks(request: pytest.FixtureRequest) -> AsyncIterator[Checks]:
    need_gpu(request.param)
    memory = gpu(request.param)
    async with started("tests.gpu.test_messages", request.param) as (comm, peer):
        yield Checks(memory, peer)
        assert comm.quarantined_bytes == 0
    memory.close()


@pytest.mark.parametrize("nbytes", SIZES)
async def test_bytes_are_right_in_every_direction(checks: Checks, nbytes: int) -> None:
    c = checks
    await c.peer.begin("recv", nbytes=nbytes)
    await c.connection.send(_DATA, c.memory.array(content(nbytes)))
    assert (await c.peer.answer())["right"], "wrong bytes were received"
    array = c.zeros(nbytes)
    await c.peer.begin("send", nbytes=nbytes)
    assert await c.connection.recv(_DATA, into=array) == nbytes
    await c.peer.answer()
    assert c.holds(array, nbytes)
    grant = await c.grant(nbytes)
    await c.connection.put(array, grant)
    await c.peer.begin("look", nbytes=nbytes)
    assert (await c.peer.answer())["right"], "wrong bytes were put"
    array = c.zeros(nbytes)
    await c.connection.get(grant, into=array)
    assert c.holds(array, nbytes)


async def test_a_send_waits_for_the_kernel_that_writes(checks: Checks) -> None:
    """And the call does not."""
    c, nbytes = checks, SIZES[-1]
    array = c.zeros(nbytes)
    await c.peer.begin("recv", nbytes=nbytes)
    c.memory.write_late(array, content(nbytes))
    began = time.perf_counter()
    sending = c.connection.send(_DATA, array)
    assert time.perf_counter() - began < LATE_S / 2, "the call waited for a kernel"
    await sending
    assert (await c.peer.answer())["right"], "sent before a kernel had written it"


@pytest.mark.parametrize("verb", ["recv", "get"])
async def test_what_comes_waits_for_the_kernel_that_reads(
    checks: Checks, verb: str
) -> None:
    c, nbytes = checks, SIZES[-1]
    array = c.zeros(nbytes)
    grant = await c.grant(nbytes)
    await c.connection.put(c.memory.array(content(nbytes)), grant)
    seen = c.memory.read_late(array)
    if verb == "recv":
        await c.peer.begin("send", nbytes=nbytes)
        await c.connection.recv(_DATA, into=array)
        await c.peer.answer()
    else:
        await c.connection.get(grant, into=array)
    assert not seen().any(), "written to before a kernel had read it"
    assert c.holds(array, nbytes)


async def test_puts_that_are_cancelled_at_any_time(checks: Checks) -> None:
    """Their memory is released, and one that is not cancelled is whole."""
    c, nbytes = checks, checks.memory.big_bytes
    grant = await c.grant(nbytes)
    array = c.memory.array(content(nbytes))
    for turns in (0, 1, 3, 10, 30, 100):
        request = c.connection.put(array, grant)
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await request.released()
    await c.connection.put(array, grant)
    await c.peer.begin("look", nbytes=nbytes)
    assert (await c.peer.answer())["right"], "wrong bytes after cancels"


async def test_a_peer_that_is_killed(checks: Checks) -> None:
    """Requests under way are lost, and all memory is free."""
    c, nbytes = checks, checks.memory.big_bytes
    grant = await c.grant(nbytes)
    array = c.memory.array(content(nbytes))
    requests = [
        c.connection.put(array, grant),
        c.connection.get(grant, into=c.zeros(nbytes)),
        c.connection.recv(_DATA, into=c.zeros(nbytes)),
    ]
    await asyncio.sleep(0)
    c.peer.process.signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*requests, return_exceptions=True)
        for request in requests:
            await request.released()
    assert any(isinstance(one, kvwire.ConnectionLost) for one in found), found
    assert c.holds(array, nbytes)


if __name__ == "__main__":
    asyncio.run(be_peer(sys.argv[1]))
