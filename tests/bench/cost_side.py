"""What connections and transfers cost: memory while idle, memory while open, stalls."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvwire.cli.bench.fragments import LEFT, RIGHT, FragmentsSide, FragmentWork
from kvwire.cli.bench.side import End
from kvwire.limits import KIB
from tests.bench.loop_watch import watched

IDLE: Final = "idle"
OPEN: Final = "open"
PEAK: Final = "peak"
STALLS: Final = "stalls"
CPU: Final = "cpu"
_GO: Final = 1
# Made before any is counted: imports, caches and pools of the allocator.
_WARM_UP: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWork(FragmentWork):
    """A transfer, and what of it is measured; see :class:`CostSide`."""

    measure: str
    repeat: int


class CostSide(FragmentsSide):
    """One measure at a time, at both sides together.

    * ``idle``: ``repeat`` more connections, and what memory each of them takes;
    * ``open``: ``repeat`` transfers of one block, of which nothing is ready;
    * ``peak``: the most memory that a transfer takes besides its payload;
    * ``cpu``: CPU seconds of ``repeat`` transfers one after the other;
    * ``stalls``: likewise, and how long every callback took.
    """

    work_type = CostWork

    async def drive(self, work: FragmentWork) -> dict[str, Any]:
        return await self._measure(work, LEFT)

    async def serve(self, work: FragmentWork) -> dict[str, Any]:
        return await self._measure(work, RIGHT)

    async def _measure(self, work: FragmentWork, side: int) -> dict[str, Any]:
        assert isinstance(work, CostWork)
        self.have(work, side)
        measure, count = work.measure, work.repeat
        if measure == IDLE:
            return await self._idle(count, side)
        if measure == OPEN:
            return await self._open_transfers(side, count)
        await self._move(work, side)  # a warm-up
        if measure == PEAK:
            gc.collect()
            with _traced() as taken:
                await self._move(work, side)
                return {"bytes": taken()[1]}
        if measure == CPU:
            before_s = time.process_time()
            for _ in range(count):
                await self._move(work, side)
            return {"cpu_s": time.process_time() - before_s}
        with watched() as stalls:
            for _ in range(count):
                await self._move(work, side)
        return stalls.answer()

    async def _idle(self, count: int, side: int) -> dict[str, Any]:
        more = self.communicator.accept if side == RIGHT else self.one_more
        kept = [await more() for _ in range(_WARM_UP)]
        before = resident_bytes()
        kept += [await more() for _ in range(count)]
        after = resident_bytes()
        await self._meet()
        for connection in kept:
            connection.abort()
        return {"bytes": (after - before) / count}

    async def _open_transfers(self, side: int, count: int) -> dict[str, Any]:
        """Each side begins its ends; they are matched, and nothing is ever ready."""
        ends = [self._begin(side) for _ in range(_WARM_UP)]
        await self._meet()
        gc.collect()
        with _traced() as taken:
            ends += [self._begin(side) for _ in range(count)]
            await self._meet()
            gc.collect()
            open_bytes = taken()[0]
        await self._meet()
        for end in ends:
            end.abort("the benchmark has what it needs")
            await end.drained()
        return {"bytes": open_bytes / count}

    def _begin(self, side: int) -> End:
        number, cache, block = self.next_id(), self.pool.cache, self.pool.blocks[:1]
        if side == LEFT:
            return self.connection.pull(number, cache, block)
        return self.communicator.publish(number, cache, block)

    async def _move(self, work: FragmentWork, side: int) -> None:
        await (self.ask if side == LEFT else self.offer)(work, self.pool.blocks)

    async def _meet(self) -> None:
        """Both sides are here."""
        sent = asyncio.ensure_future(self._send_go())
        await self.connection.recv(_GO)
        await sent

    async def _send_go(self) -> None:
        await self.connection.send(_GO, b"")


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
