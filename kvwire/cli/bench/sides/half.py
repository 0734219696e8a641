"""The calls that a half of a pair answers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import kvwire
from kvwire.cli.bench.case import Work

CALLS: Final = frozenset(
    {
        *("listen", "accept", "connect", "prepare", "use", "check_left"),
        *("check_right", "drive", "serve", "cpu"),
    }
)
HOST: Final = "127.0.0.1"
_DIGEST_BYTES: Final = 16


class Half(ABC):
    """One half: the right one listens and serves, the left one drives and has the time.

    The order of calls is listen, accept and connect; then for each work prepare, use,
    both checks, and any number of rounds.

    Attributes:
        work_type: What its works are.
    """

    work_type: ClassVar[type[Work]] = Work

    @abstractmethod
    async def listen(self) -> dict[str, Any]:
        """Right: begin to listen; ``address`` is where."""

    @abstractmethod
    async def accept(self) -> dict[str, Any]:
        """Right: wait for the left one."""

    @abstractmethod
    async def connect(self, address: Any) -> dict[str, Any]:
        """Left: connect to it; the answer is facts for the JSON document."""

    async def prepare(self, work: Work) -> dict[str, Any]:
        """Right: get ready; the answer is given to :meth:`use`."""
        return {}

    async def use(self, work: Work, given: dict[str, Any]) -> dict[str, Any]:
        """Left: get ready."""
        return {}

    @abstractmethod
    async def check_left(self, work: Work) -> dict[str, Any]:
        """Move random bytes once; ``digest`` is that of this half's bytes."""

    @abstractmethod
    async def check_right(self, work: Work) -> dict[str, Any]:
        """The other half of :meth:`check_left`."""

    @abstractmethod
    async def drive(self, work: Work) -> dict[str, Any]:
        """Left: one round; ``values`` are its samples."""

    @abstractmethod
    async def serve(self, work: Work) -> dict[str, Any]:
        """Right: what :meth:`drive` needs of the other half."""

    async def cpu(self) -> dict[str, Any]:
        """CPU seconds of this process, the kernel's on its behalf included."""
        return cpu_s()

    @abstractmethod
    async def close(self) -> None:
        """End what was begun."""


class ConnectedHalf(Half):
    """A half with one communicator of kvwire, and one connection.

    Args:
        transport: Its name.
    """

    by_link: ClassVar[bool] = False
    """The transport is that of the link, instead of a lane beside one over TCP."""

    _communicator: kvwire.Communicator
    _connection: kvwire.Connection

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._opened = False
        # Of the last transfer: both sides count alike.
        self._number = 0

    async def listen(self) -> dict[str, Any]:
        """See Half."""
        await self._open("bench-right")
        scheme = self._transport if self.by_link else "tcp"
        where = "inproc://" if self._transport == "inproc" else f"{scheme}://{HOST}:0"
        return {"address": str(await self._communicator.listen(where))}

    async def accept(self) -> dict[str, Any]:
        """See Half."""
        self._connection = await self._communicator.accept()
        return {}

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        await self._open("bench-left")
        self._connection = await self._communicator.connect(
            address, transport=self._transport
        )
        loop = type(asyncio.get_running_loop()).__module__
        return {
            "kvwire": kvwire.__version__,
            "python": platform.python_version(),
            "loop": loop.partition(".")[0],
            "transport": str(self._connection.transport_report),
        }

    async def close(self) -> None:
        """See Half."""
        if self._opened:
            self._communicator.abort()
            await self._communicator.close()

    async def _open(self, name: str) -> None:
        self._communicator = await kvwire.open(name=name)
        self._opened = True


async def over(end: kvwire.Incoming | kvwire.Outgoing) -> None:
    """Wait for the outcome of a transfer, and until its memory is free.

    Raises:
        RuntimeError: It is not complete.
    """
    outcome = await end
    if not outcome.complete:
        raise RuntimeError(f"the transfer did not end well: {outcome!r}")
    await end.drained()


def cpu_s() -> dict[str, Any]:
    """The answer to the call ``cpu``."""
    return {"cpu_s": time.process_time()}


def digest(data: bytes | bytearray | memoryview) -> str:
    """What two halves compare instead of the bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def fill(memory: memoryview) -> str:
    """Fill memory with random bytes; their digest."""
    memory[:] = os.urandom(len(memory))
    return digest(memory)
