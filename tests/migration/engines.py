"""Two engines without a model: a request that grows while it is copied, and a host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import kvwire
from kvwire.migration import Arrival, MigrationTarget, Written
from tests.support.caches import SPEC, Memory
from tests.support.pairs import Pair, connected

SIZE = SPEC.block_tokens
BLOCKS = [7, 3, 11, 0, 5, 9]


class Request:
    """Runs at the source; it has ``grows`` more tokens each time it is looked at."""

    def __init__(self, tokens: int, *, grows: int = 0, ends_at: int = 10**6) -> None:
        self.name = "r"
        self.memory = Memory()
        self.memory.stamp(BLOCKS)
        self.cache = self.memory.cache
        self.tokens, self.grows, self.ends_at = tokens, grows, ends_at
        self.said = b"its tokens"
        self.calls: list[str] = []
        self.on_pause: Callable[[], object] = lambda: None

    def written(self) -> Written | None:
        if "pause" not in self.calls:
            self.tokens = min(self.tokens + self.grows, len(BLOCKS) * SIZE)
        return None if self.tokens >= self.ends_at else Written(BLOCKS, self.tokens)

    async def pause(self) -> None:
        self.calls.append("pause")
        self.on_pause()
        await asyncio.sleep(0)

    def resume(self) -> None:
        self.calls.append("resume")

    def state(self) -> bytes:
        return self.said

    def release(self) -> None:
        self.calls.append("release")


class Host:
    """Is the engine at the other end; it has so many free blocks."""

    def __init__(
        self, communicator: kvwire.Communicator, free: int, spec: kvwire.KVSpec
    ) -> None:
        self.memory = Memory(spec)
        self.free = list(range(free))
        self.arrived: list[Arrival] = []
        self.on_start: Callable[[], object] = lambda: None
        self.target = MigrationTarget(
            *(communicator, self.memory.cache),
            take=self.take,
            give_back=self.free.extend,
            start=self.start,
        )

    def take(self, count: int) -> Sequence[int] | None:
        """Blocks, if there are so many."""
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def start(self, arrival: Arrival) -> None:
        self.on_start()
        self.arrived.append(arrival)


@asynccontextmanager
async def engines(
    *, free: int = 12, spec: kvwire.KVSpec = SPEC, **config: Any
) -> AsyncIterator[tuple[Pair, Host]]:
    """A connection whose far end takes requests."""
    async with connected(**config) as pair:
        host = Host(pair.far, free, spec)
        serving = asyncio.create_task(host.target.serve(pair.right))
        yield pair, host
        await pair.left.close()
        await serving
