"""Messages, puts and gets of a GPU's memory between two processes that share it.

Without a GPU, a device of the tests takes its place.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire.limits import KIB, MIB
from tests.gpu.devices import KINDS, need_gpu
from tests.support.runs import Beside, beside
from tests.support.simulated_device import SimulatedDevice

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
SIZES: Final = (1, 16 * KIB, 300 * KIB + 3, 5 * MIB)
LATE_S: Final = 1.0
_TO_PEER, _BACK, _DATA = 1, 2, 3

Bytes = npt.NDArray[np.uint8]


class Gpu(Protocol):
    """Arrays on a GPU, and kernels on this thread's current stream."""

    big_bytes: int

    def array(self, values: Bytes) -> Any:
        """An array with these values."""

    def values(self, array: Any) -> Bytes:
        """What it holds, once all kernels are over."""

    def write_late(self, array: Any, values: Bytes) -> None:
        """Queue a kernel that takes LATE_S, and one that writes to an array."""

    def read_late(self, array: Any) -> Callable[[], Bytes]:
        """Queue a kernel that takes LATE_S, and one that copies an array."""

    def close(self) -> None:
        """Nothing uses it any more."""


class Torch:
    big_bytes = 256 * MIB

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def array(self, values: Bytes) -> Any:
        return self._torch.from_numpy(values).cuda()

    def values(self, array: Any) -> Bytes:
        self._torch.cuda.synchronize()
        host: Bytes = array.cpu().numpy()
        return host

    def write_late(self, array: Any, values: Bytes) -> None:
        source = self.array(values)
        self._torch.cuda._sleep(int(LATE_S * 1e9))
        array.copy_(source)

    def read_late(self, array: Any) -> Callable[[], Bytes]:
        self._torch.cuda._sleep(int(LATE_S * 1e9))
        copied = array.clone()
        return lambda: self.values(copied)

    def close(self) -> None:
        pass


class Simulated:
    big_bytes = 8 * MIB

    def __init__(self) -> None:
        self._device = SimulatedDevice(1024 * MIB)
        self._stream = self._device.stream()
        self._device.set_current(self._stream)

    def array(self, values: Bytes) -> Any:
        return self._device.array(values)

    def values(self, array: Any) -> Bytes:
        self._stream.record().synchronize()
        found: Bytes = array.read()
        return found

    def write_late(self, array: Any, values: Bytes) -> None:
        self._stream.call(_spin)
        self._stream.call(lambda: array.write(values))

    def read_late(self, array: Any) -> Callable[[], Bytes]:
        found = list[Bytes]()
        self._stream.call(_spin)
        self._stream.call(lambda: found.append(array.read()))

        def read() -> Bytes:
            self._stream.record().synchronize()
            return found[0]

        return read

    def close(self) -> None:
        self._device.close()


def _spin() -> None:
    end = time.perf_counter() + LATE_S
    while time.perf_counter() < end:
        pass


def gpu(kind: str) -> Gpu:
    """The memory of this process."""
    return Simulated() if kind == "simulated" else Torch()


def content(nbytes: int, seed: int = 1) -> Bytes:
    """What both processes know to be in a message."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# --- the peer -------------------------------------------------------------------------


class Answers:
    """Sends, receives and grants what it is asked for."""

    def __init__(
        self, memory: Gpu, comm: kvwire.Communicator, connection: kvwire.Connection
    ) -> None:
        self._memory = memory
        self._comm = comm
        self._connection = connection
        self._array: Any = None

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        nbytes = asked["nbytes"]
        values = content(nbytes)
        if asked["do"] == "send":
            await self._connection.send(_DATA, self._memory.array(values))
            return {}
        if asked["do"] == "recv":
            array = self._memory.array(np.zeros_like(values))
            await self._connection.recv(_DATA, into=array)
            got = self._memory.values(array)
            return {"right": bool(np.array_equal(got, values))}
        if asked["do"] == "grant":
            self._array = self._memory.array(np.zeros_like(values))
            region = self._comm.register(self._array, "readwrite")
            return {"grant": region.grant(self._connection).to_bytes().hex()}
        got = self._memory.values(self._array)
        return {"right": bool(np.array_equal(got, values))}


async def be_peer(kind: str) -> None:
    """Answer until the other process has closed its end."""
    async with kvwire.open() as comm:
        print(await comm.listen("127.0.0.1:0"), flush=True)
        connection = await comm.accept()
        answers = Answers(gpu(kind), comm, connection)
        while True:
            try:
                asked = json.loads(bytes(await connection.recv(_TO_PEER)))
            except kvwire.ConnectionClosed:
                return
            answer = await answers.answer(asked)
            await connection.send(_BACK, json.dumps(answer).encode())


# --- this process ---------------------------------------------------------------------


class Checks:
    """Asks the peer, and looks at what has come."""

    def __init__(
        self, memory: Gpu, peer: Beside, connection: kvwire.Connection
    ) -> None:
        self.memory = memory
        self.peer = peer
        self.connection = connection

    async def ask(self, what: str, nbytes: int) -> None:
        """Have the peer do something; :meth:`answer` is how it went."""
        asked = json.dumps({"do": what, "nbytes": nbytes}).encode()
        await self.connection.send(_TO_PEER, asked)

    async def answer(self) -> Any:
        return json.loads(bytes(await self.connection.recv(_BACK)))

    async def grant(self, nbytes: int) -> kvwire.Grant:
        await self.ask("grant", nbytes)
        return kvwire.Grant.from_bytes(bytes.fromhex((await self.answer())["grant"]))

    def zeros(self, nbytes: int) -> Any:
        return self.memory.array(np.zeros(nbytes, np.uint8))

    def holds(self, array: Any, nbytes: int) -> bool:
        return np.array_equal(self.memory.values(array), content(nbytes))


@pytest.fixture(params=KINDS)
async def checks(request: pytest.FixtureRequest) -> AsyncIterator[Checks]:
    need_gpu(request.param)
    memory = gpu(request.param)
    words = ("-m", "tests.gpu.test_messages", request.param)
    async with beside(*words, kind=Beside) as peer, kvwire.open() as comm:
        yield Checks(memory, peer, await comm.connect(await peer.line()))
        assert comm.quarantined_bytes == 0
    memory.close()


@pytest.mark.parametrize("nbytes", SIZES)
async def test_bytes_are_right_in_every_direction(checks: Checks, nbytes: int) -> None:
    c = checks
    await c.ask("recv", nbytes)
    await c.connection.send(_DATA, c.memory.array(content(nbytes)))
    assert (await c.answer())["right"], "wrong bytes were received"
    array = c.zeros(nbytes)
    await c.ask("send", nbytes)
    assert await c.connection.recv(_DATA, into=array) == nbytes
    await c.answer()
    assert c.holds(array, nbytes)
    grant = await c.grant(nbytes)
    await c.connection.put(array, grant)
    await c.ask("look", nbytes)
    assert (await c.answer())["right"], "wrong bytes were put"
    array = c.zeros(nbytes)
    await c.connection.get(grant, into=array)
    assert c.holds(array, nbytes)


async def test_a_send_waits_for_the_kernel_that_writes(checks: Checks) -> None:
    """And the call does not."""
    c, nbytes = checks, SIZES[-1]
    array = c.zeros(nbytes)
    await c.ask("recv", nbytes)
    c.memory.write_late(array, content(nbytes))
    began = time.perf_counter()
    sending = c.connection.send(_DATA, array)
    assert time.perf_counter() - began < LATE_S / 2, "the call waited for a kernel"
    await sending
    assert (await c.answer())["right"], "sent before a kernel had written it"


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
        await c.ask("send", nbytes)
        await c.connection.recv(_DATA, into=array)
        await c.answer()
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
    await c.ask("look", nbytes)
    assert (await c.answer())["right"], "wrong bytes after cancels"


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
    c.peer.signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*requests, return_exceptions=True)
        for request in requests:
            await request.released()
    assert any(isinstance(one, kvwire.ConnectionLost) for one in found), found
    assert c.holds(array, nbytes)


if __name__ == "__main__":
    asyncio.run(be_peer(sys.argv[1]))
