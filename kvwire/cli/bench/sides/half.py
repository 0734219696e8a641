"""The calls that a half of a pair answers."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

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
