"""What runs in one process alone: memory copies, and transports within a process."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import FragmentWork
from kvwire.cli.bench.sides.fragments_half import FragmentsHalf
from kvwire.cli.bench.sides.half import cpu_s, digest

Bytes: TypeAlias = npt.NDArray[np.uint8]

SOLO_CALLS: Final = frozenset({"start", "prepare", "check", "drive", "verify", "cpu"})


class Solo(ABC):
    """One process that does both sides' work.

    Attributes:
        work_type: What its works are.
    """

    work_type: ClassVar[type[Work]] = FragmentWork

    @abstractmethod
    async def start(self) -> dict[str, Any]:
        """Get ready; the answer is facts for the JSON document."""

    async def prepare(self, work: Work) -> dict[str, Any]:
        """Get ready for a work; neither its time nor its CPU counts."""
        del work
        return {}

    @abstractmethod
    async def check(self, work: Work) -> dict[str, Any]:
        """Move random bytes once: the digests of what was ``sent`` and ``arrived``."""

    @abstractmethod
    async def drive(self, work: Work) -> dict[str, Any]:
        """One round; ``values`` are its samples."""

    async def verify(self, work: Work) -> dict[str, Any]:
        """Look at what the last round has moved; neither time nor CPU counts.

        Raises:
            RuntimeError: It is not what it should be.
        """
        del work
        return {}

    async def cpu(self) -> dict[str, Any]:
        """CPU seconds of this process."""
        return cpu_s()

    @abstractmethod
    async def close(self) -> None:
        """End what was begun."""


class InprocSolo(Solo):
    """Two communicators of one loop.

    Args:
        transport: Its name.
        pool_bytes: The largest pool of all works.
    """

    def __init__(self, transport: str, pool_bytes: int) -> None:
        self._left = FragmentsHalf(transport, pool_bytes)
        self._right = FragmentsHalf(transport, pool_bytes)

    async def start(self) -> dict[str, Any]:
        """See Solo."""
        address = (await self._right.listen())["address"]
        accepted = asyncio.ensure_future(self._right.accept())
        facts = await self._left.connect(address)
        await accepted
        return facts

    async def prepare(self, work: Work) -> dict[str, Any]:
        """See Solo."""
        given = await self._right.prepare(work)
        return await self._left.use(work, given)

    async def check(self, work: Work) -> dict[str, Any]:
        """See Solo."""
        right, left = await asyncio.gather(
            self._right.check_right(work), self._left.check_left(work)
        )
        return {"sent": right["digest"], "arrived": left["digest"]}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Solo."""
        served = asyncio.ensure_future(self._right.serve(work))
        found = await self._left.drive(work)
        await served
        return found

    async def close(self) -> None:
        """See Solo."""
        await asyncio.gather(self._left.close(), self._right.close())


class MemcpySolo(Solo):
    """One copy of as many bytes that lie side by side: what memory does at best.

    Args:
        pool_bytes: At least as many.
    """

    def __init__(self, pool_bytes: int) -> None:
        rng = np.random.default_rng()
        self._source = rng.integers(0, 256, pool_bytes, np.uint8)
        self._sink = np.zeros(pool_bytes, np.uint8)

    async def start(self) -> dict[str, Any]:
        """See Solo."""
        return {"numpy": np.__version__}

    async def check(self, work: Work) -> dict[str, Any]:
        """See Solo."""
        source, sink = self._parts(work)
        np.copyto(sink, source)
        return {"sent": digest(source.data), "arrived": digest(sink.data)}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Solo."""
        source, sink = self._parts(work)
        began = time.perf_counter()
        np.copyto(sink, source)
        return {"values": [source.size / (time.perf_counter() - began)]}

    async def close(self) -> None:
        """See Solo."""

    def _parts(self, work: Work) -> tuple[Bytes, Bytes]:
        nbytes = work.nbytes * work.count
        return self._source[:nbytes], self._sink[:nbytes]
