"""Messages, puts and gets between two processes: ``python -m tests.gpu.messages``.

All memory is a GPU's; both processes use the same one. It checks the bytes of every
direction, tensors that kernels still write or read, cancels, and a peer that is killed;
and prints rates beside those of host memory. It takes half a minute. With
``--simulated`` a device of the tests takes the GPU's place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.limits import KIB, MIB
from tests.support.pairs import until
from tests.support.runs import Beside, beside
from tests.support.simulated_device import SimulatedDevice

SIZES: Final = (1, 16 * KIB, 300 * KIB + 3, 5 * MIB)
LATE_S: Final = 0.2
ROUNDS: Final = 7
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


def _spin() -> None:
    end = time.perf_counter() + LATE_S
    while time.perf_counter() < end:
        pass


def gpu(*, simulated: bool) -> Gpu:
    """The memory of this process."""
    return Simulated() if simulated else Torch()


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
            made = values if asked["host"] else self._memory.array(values)
            await self._connection.send(_DATA, made)
            return {}
        if asked["do"] == "recv":
            into = np.zeros_like(values)
            array = into if asked["host"] else self._memory.array(into)
            await self._connection.recv(_DATA, into=array)
            got = into if asked["host"] else self._memory.values(array)
            return {"right": bool(np.array_equal(got, values))}
        if asked["do"] == "grant":
            self._array = self._memory.array(np.zeros_like(values))
            region = self._comm.register(self._array, "readwrite")
            return {"grant": region.grant(self._connection).to_bytes().hex()}
        got = self._memory.values(self._array)
        return {"right": bool(np.array_equal(got, values))}


async def be_peer(*, simulated: bool) -> None:
    """Answer until the other process has closed its end."""
    async with kvwire.open() as comm:
        print(await comm.listen("127.0.0.1:0"), flush=True)
        connection = await comm.accept()
        answers = Answers(gpu(simulated=simulated), comm, connection)
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

    def __init__(self, memory: Gpu, connection: kvwire.Connection) -> None:
        self.memory = memory
        self.connection = connection

    async def ask(self, what: str, nbytes: int, *, host: bool = False) -> None:
        """Have the peer do something; :meth:`answer` is how it went."""
        asked = json.dumps({"do": what, "nbytes": nbytes, "host": host}).encode()
        await self.connection.send(_TO_PEER, asked)

    async def answer(self) -> Any:
        return json.loads(bytes(await self.connection.recv(_BACK)))

    def zeros(self, nbytes: int) -> Any:
        return self.memory.array(np.zeros(nbytes, np.uint8))

    def require(self, array: Any, values: Bytes) -> None:
        """Fail unless an array holds these values."""
        assert np.array_equal(self.memory.values(array), values), "wrong bytes"

    async def bytes_of_all(self) -> None:
        for nbytes in SIZES:
            values = content(nbytes)
            await self.ask("recv", nbytes)
            await self.connection.send(_DATA, self.memory.array(values))
            assert (await self.answer())["right"], "wrong bytes were received"
            array = self.zeros(nbytes)
            await self.ask("send", nbytes)
            assert await self.connection.recv(_DATA, into=array) == nbytes
            await self.answer()
            self.require(array, values)
            grant = await self.grant(nbytes)
            await self.connection.put(array, grant)
            await self.ask("look", nbytes)
            assert (await self.answer())["right"], "wrong bytes were put"
            array = self.zeros(nbytes)
            await self.connection.get(grant, into=array)
            self.require(array, values)
        print(f"bytes: {len(SIZES)} sizes right in every direction")

    async def grant(self, nbytes: int) -> kvwire.Grant:
        await self.ask("grant", nbytes)
        return kvwire.Grant.from_bytes(bytes.fromhex((await self.answer())["grant"]))

    async def behind_kernels(self) -> None:
        nbytes = SIZES[-1]
        values = content(nbytes)
        array = self.zeros(nbytes)
        await self.ask("recv", nbytes)
        self.memory.write_late(array, values)
        began = time.perf_counter()
        sending = self.connection.send(_DATA, array)
        took = time.perf_counter() - began
        assert took < LATE_S / 2, f"the call waited {took:.3f} s for a kernel"
        await sending
        assert (await self.answer())["right"], "sent before a kernel had written it"
        for verb in ("recv", "get"):
            array = self.zeros(nbytes)
            grant = await self.grant(nbytes)
            await self.connection.put(self.memory.array(values), grant)
            seen = self.memory.read_late(array)
            if verb == "recv":
                await self.ask("send", nbytes)
                await self.connection.recv(_DATA, into=array)
                await self.answer()
            else:
                await self.connection.get(grant, into=array)
            assert not seen().any(), "written to before a kernel had read it"
            self.require(array, values)
        print("kernels: a send, a recv and a get waited for those before them")

    async def cancelled(self) -> None:
        nbytes = self.memory.big_bytes
        grant = await self.grant(nbytes)
        array = self.memory.array(content(nbytes))
        ended = 0
        for turns in (0, 1, 3, 10, 30, 100):
            request = self.connection.put(array, grant)
            for _ in range(turns):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await request.released()
            ended += 1
        await self.connection.put(array, grant)
        await self.ask("look", nbytes)
        assert (await self.answer())["right"], "wrong bytes after cancels"
        print(f"cancelled: {ended} puts of {nbytes // MIB} MiB, then one that is whole")

    async def rates(self) -> None:
        nbytes = self.memory.big_bytes
        into = np.empty(nbytes, np.uint8)
        for host in (True, False):
            array = into if host else self.zeros(nbytes)
            times = list[float]()
            for _ in range(ROUNDS):
                await self.ask("send", nbytes, host=host)
                await until(lambda: _DATA in self.connection.unreceived)
                began = time.perf_counter()
                await self.connection.recv(_DATA, into=array)
                times.append(time.perf_counter() - began)
                await self.answer()
            rate = nbytes / statistics.median(times) / 1e9
            where = "host memory" if host else "the GPU"
            print(f"message of {nbytes // MIB} MiB: {rate:.2f} GB/s, {where}")

    async def killed(self, peer: Beside) -> None:
        nbytes = self.memory.big_bytes
        grant = await self.grant(nbytes)
        array = self.memory.array(content(nbytes))
        requests = [
            self.connection.put(array, grant),
            self.connection.get(grant, into=self.zeros(nbytes)),
            self.connection.recv(_DATA, into=self.zeros(nbytes)),
        ]
        await asyncio.sleep(0)
        peer.signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            found = await asyncio.gather(*requests, return_exceptions=True)
            for request in requests:
                await request.released()
        lost = sum(isinstance(one, kvwire.ConnectionLost) for one in found)
        assert lost, found
        self.require(array, content(nbytes))
        print(f"peer killed: {lost} of {len(requests)} requests lost, all memory free")


async def check(peer: Beside, *, simulated: bool) -> None:
    """Check everything, the death of the peer last of all."""
    address = await peer.line()
    async with kvwire.open() as comm:
        connection = await comm.connect(address)
        checks = Checks(gpu(simulated=simulated), connection)
        print(f"over {connection.transport}")
        await checks.bytes_of_all()
        await checks.behind_kernels()
        await checks.cancelled()
        await checks.rates()
        await checks.killed(peer)
        assert comm.quarantined_bytes == 0


async def main(arguments: argparse.Namespace) -> None:
    """Be one of the two processes."""
    simulated: bool = arguments.simulated
    if arguments.peer:
        await be_peer(simulated=simulated)
        return
    words = ["-m", "tests.gpu.messages", "--peer"]
    if simulated:
        words.append("--simulated")
    async with beside(*words, kind=Beside) as peer:
        await check(peer, simulated=simulated)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--simulated", action="store_true")
    asyncio.run(main(parser.parse_args()))
    sys.exit(0)
