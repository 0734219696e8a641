"""What connections and transfers cost: memory while idle, memory while open, stalls."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import LEFT, RIGHT
from kvwire.cli.bench.sides.fragments_half import GO, FragmentsHalf, Pool
from kvwire.limits import KIB
from tests.bench.loop_watch import watched

IDLE: Final = "idle"
OPEN: Final = "open"
PEAK: Final = "peak"
STALLS: Final = "stalls"
CPU: Final = "cpu"
# Made before any is counted: imports, caches and pools of the allocator.
_WARM_UP: Final = 16


class CostHalf(FragmentsHalf):
    """One measure at a time, at both sides together.

    * ``idle``: ``count`` more connections, and what memory each of them takes;
    * ``open``: ``count`` transfers of one block, of which nothing is ready;
    * ``peak``: the most memory that a transfer takes besides its payload;
    * ``cpu``: CPU seconds of ``count`` transfers one after the other;
    * ``stalls``: likewise, and how long every callback took.
    """

    _address = ""

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        self._address = str(address)
        return await super().connect(address)

    async def drive(
        self, work: Work, measure: str = STALLS, count: int = 1
    ) -> dict[str, Any]:
        """Left: see the class; ``work`` is what a transfer moves."""
        return await self._measure(work, LEFT, measure, count)

    async def serve(
        self, work: Work, measure: str = STALLS, count: int = 1
    ) -> dict[str, Any]:
        """Right: likewise."""
        return await self._measure(work, RIGHT, measure, count)

    async def _measure(
        self, work: Work, side: int, measure: str, count: int
    ) -> dict[str, Any]:
        pool = self._have(work, side)
        if measure == IDLE:
            return await self._idle(count, side)
        if measure == OPEN:
            return await self._open_transfers(pool, side, count)
        await self._move(work, pool, side)  # a warm-up
        if measure == PEAK:
            return await self._peak(work, pool, side)
        if measure == CPU:
            before_s = time.process_time()
            for _ in range(count):
                await self._move(work, pool, side)
            return {"cpu_s": time.process_time() - before_s}
        with watched() as stalls:
            for _ in range(count):
                await self._move(work, pool, side)
        return stalls.answer()

    async def _idle(self, count: int, side: int) -> dict[str, Any]:
        kept = [await self._one_more(side) for _ in range(_WARM_UP)]
        before = resident_bytes()
        kept += [await self._one_more(side) for _ in range(count)]
        after = resident_bytes()
        await self._meet()
        for connection in kept:
            connection.abort()
        return {"bytes": (after - before) / count}

    async def _one_more(self, side: int) -> kvwire.Connection:
        if side == RIGHT:
            return await self._communicator.accept()
        return await self._communicator.connect(
            self._address, transport=self._transport
        )

    async def _open_transfers(
        self, pool: Pool, side: int, count: int
    ) -> dict[str, Any]:
        """Each side begins its ends; they are matched, and nothing is ever ready."""
        block = [pool.blocks[0]]
        ends = [self._begin(pool, block, side) for _ in range(_WARM_UP)]
        await self._meet()
        gc.collect()
        with _traced() as taken:
            ends += [self._begin(pool, block, side) for _ in range(count)]
            await self._meet()
            gc.collect()
            open_bytes = taken()[0]
        await self._meet()
        for end in ends:
            end.abort("the benchmark has what it needs")
            await end.drained()
        return {"bytes": open_bytes / count}

    def _begin(
        self, pool: Pool, block: list[int], side: int
    ) -> kvwire.Incoming | kvwire.Outgoing:
        self._number += 1
        if side == LEFT:
            return self._connection.pull(self._number, pool.cache, block)
        return self._communicator.publish(self._number, pool.cache, block)

    async def _peak(self, work: Work, pool: Pool, side: int) -> dict[str, Any]:
        gc.collect()
        with _traced() as taken:
            await self._move(work, pool, side)
            return {"bytes": taken()[1]}

    async def _move(self, work: Work, pool: Pool, side: int) -> None:
        move = self._ask if side == LEFT else self._offer
        await move(work, pool.cache, pool.blocks)

    async def _meet(self) -> None:
        """Both sides are here."""
        sent = asyncio.ensure_future(self._send_go())
        await self._connection.recv(GO)
        await sent

    async def _send_go(self) -> None:
        await self._connection.send(GO, b"")


@contextmanager
def _traced() -> Iterator[Callable[[], tuple[int, int]]]:
    """What Python and NumPy have allocated since, now and at most."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


def resident_bytes() -> int:
    """Memory of this process that lies in RAM, after the garbage has been collected."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * KIB
