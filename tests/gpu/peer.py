"""Two processes that share a device: this one asks, and the other one does it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy.typing as npt

import kvwire
from kvwire.limits import MIB
from tests.support.runs import Beside, beside
from tests.support.simulated_device import SimulatedDevice

LATE_S: Final = 1.0
_TO_PEER, _BACK = 1, 2
Values = npt.NDArray[Any]


class Torch:
    """Arrays on a GPU, and kernels on this thread's current stream."""

    way = "cuda_ipc"
    big_bytes = 256 * MIB

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def array(self, values: Values) -> Any:
        return self._torch.from_numpy(values).cuda()

    def values(self, array: Any) -> Values:
        """What it holds, once all kernels are over."""
        self._torch.cuda.synchronize()
        host: Values = array.cpu().numpy()
        return host

    def write(self, array: Any, values: Values) -> None:
        """Write to it; the kernels are over when this returns."""
        array.copy_(self._torch.from_numpy(values))
        self._torch.cuda.current_stream().synchronize()

    def write_late(self, array: Any, values: Values) -> None:
        """Queue a kernel that takes LATE_S, and one that writes to an array."""
        source = self.array(values)
        self._torch.cuda._sleep(int(LATE_S * 1e9))
        array.copy_(source)

    def read_late(self, array: Any) -> Callable[[], Values]:
        """Queue a kernel that takes LATE_S, and one that copies an array."""
        self._torch.cuda._sleep(int(LATE_S * 1e9))
        copied = array.clone()
        return lambda: self.values(copied)

    def close(self) -> None:
        """Nothing uses it any more."""


class Simulated(Torch):
    """The same on a device of the tests."""

    way = "simulated_ipc"
    big_bytes = 8 * MIB

    def __init__(self) -> None:
        self._device = SimulatedDevice(1024 * MIB)
        self._stream = self._device.stream()
        self._device.set_current(self._stream)

    def array(self, values: Values) -> Any:
        return self._device.array(values)

    def values(self, array: Any) -> Values:
        self._stream.record().synchronize()
        found: Values = array.read()
        return found

    def write(self, array: Any, values: Values) -> None:
        array.write(values)

    def write_late(self, array: Any, values: Values) -> None:
        self._stream.call(_spin)
        self._stream.call(lambda: array.write(values))

    def read_late(self, array: Any) -> Callable[[], Values]:
        found = list[Values]()
        self._stream.call(_spin)
        self._stream.call(lambda: found.append(array.read()))

        def read() -> Values:
            self._stream.record().synchronize()
            return found[0]

        return read

    def close(self) -> None:
        self._device.close()


def _spin() -> None:
    end = time.perf_counter() + LATE_S
    while time.perf_counter() < end:
        pass


def gpu(kind: str) -> Torch:
    """The memory of this process."""
    return Simulated() if kind == "simulated" else Torch()


class Peer:
    """The other process, and what it is asked for."""

    def __init__(self, process: Beside, connection: kvwire.Connection) -> None:
        self.process = process
        self.connection = connection

    async def begin(self, what: str, **more: Any) -> None:
        """Have it do something; :meth:`answer` is how it went."""
        asked = json.dumps({"do": what, **more}).encode()
        await self.connection.send(_TO_PEER, asked)

    async def answer(self) -> Any:
        return json.loads(bytes(await self.connection.recv(_BACK)))

    async def ask(self, what: str, **more: Any) -> Any:
        await self.begin(what, **more)
        return await self.answer()


@asynccontextmanager
async def started(
    module: str, kind: str, **config: Any
) -> AsyncIterator[tuple[kvwire.Communicator, Peer]]:
    """A module as the other process, connected to a communicator of this one."""
    async with (
        beside("-m", module, kind, kind=Beside) as process,
        kvwire.open(**config) as comm,
    ):
        yield comm, Peer(process, await comm.connect(await process.line()))


async def serve(
    comm: kvwire.Communicator,
    answering: Callable[[kvwire.Connection], Callable[[Any], Awaitable[Any]]],
) -> None:
    """Be the other process until this one has closed its end."""
    print(await comm.listen("127.0.0.1:0"), flush=True)
    connection = await comm.accept()
    answer = answering(connection)
    while True:
        try:
            asked = json.loads(bytes(await connection.recv(_TO_PEER)))
        except kvwire.ConnectionClosed:
            return
        said = json.dumps(await answer(asked)).encode()
        await connection.send(_BACK, said)
