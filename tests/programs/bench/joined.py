"""Both sides of a benchmark on one loop, so that a test can look at either."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvwire.cli.bench.side import BenchSide, W, require_same


class JoinedSide(BenchSide[W]):
    """Two sides on one loop, as one that needs no other."""

    def __init__(self, left: BenchSide[W], right: BenchSide[W]) -> None:
        super().__init__(left.options)
        self.left = left
        self.right = right

    async def connect(self, address: Any) -> dict[str, Any]:
        where = await self.right.listen()
        accepted = asyncio.ensure_future(self.right.accept())
        facts = await self.left.connect(where)
        await accepted
        return facts

    async def use(self, work: W, given: Any) -> None:
        await self.left.use(work, await self.right.prepare(work))

    async def fill(self, work: W) -> None:
        await self.left.fill(work)
        await self.right.fill(work)

    async def drive(self, work: W) -> Sequence[float]:
        seconds, _ = await asyncio.gather(self.left.drive(work), self.right.serve(work))
        return seconds

    async def digest(self, work: W) -> str:
        left = await self.left.digest(work)
        require_same(left, await self.right.digest(work))
        return left

    async def verify(self, work: W) -> None:
        await self.left.verify(work)

    async def close(self) -> None:
        await asyncio.gather(self.left.close(), self.right.close())
