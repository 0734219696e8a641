"""A directory in memory: a server that can be away, and clients that can be cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvwire.directory import Directory
from kvwire.directory.base import Batch
from kvwire.errors import ConnectError


class Hub:
    """The server of a directory: values, leases, and who follows."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, float]] = {}
        self.followers: dict[Directory, asyncio.Queue[Batch | None]] = {}
        self.cut: set[Directory] = set()
        self.away = False
        self.writes = 0
        self.written = asyncio.Event()

    @property
    def there(self) -> dict[str, bytes]:
        """The values, whether or not their leases are over."""
        return {key: value for key, (value, _) in self.values.items()}

    def check(self, who: Directory) -> None:
        """Refuse whoever cannot reach it now."""
        if self.away or who in self.cut:
            raise ConnectError("the directory does not answer")

    def lose(self, *who: Directory) -> None:
        """Break the connections of some, or of all, and let none in."""
        self.cut = set(who)
        self.away = not who
        for one in who or list(self.followers):
            if one in self.followers:
                self.followers[one].put_nowait(None)

    def tell(self, batch: Batch) -> None:
        """Tell those that can be reached."""
        for who, queue in self.followers.items():
            if who not in self.cut:
                queue.put_nowait(batch)


class MemoryDirectory(Directory):
    """A client of a hub, by default of one of its own."""

    def __init__(self, hub: Hub | None = None) -> None:
        super().__init__("memory://user:secret@host:1/path")
        self.hub = hub or Hub()

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        """Keep it; others hear of it."""
        self.hub.check(self)
        self.hub.writes += 1
        self.hub.written.set()
        self.hub.values[key] = value, asyncio.get_running_loop().time() + lease_s
        self.hub.tell({key: value})

    async def erase(self, key: str) -> None:
        self.hub.check(self)
        self.hub.values.pop(key, None)
        self.hub.tell({key: None})

    async def follow(self) -> AsyncGenerator[Batch, None]:
        """All that is there, and then each change, until it cannot be reached."""
        hub, queue = self.hub, asyncio.Queue[Batch | None]()
        hub.check(self)
        now = asyncio.get_running_loop().time()
        hub.followers[self] = queue
        try:
            yield {key: raw for key, (raw, until) in hub.values.items() if until > now}
            while True:
                batch = await queue.get()
                if batch is None:
                    raise ConnectError("the directory has gone")
                yield batch
        finally:
            hub.followers.pop(self, None)
