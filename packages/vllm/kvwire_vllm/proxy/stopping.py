"""Ends running requests when the proxy stops; server.py decides when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvwire_vllm.proxy.client import EngineFailed


class Ending:
    """Ends running requests once the proxy has waited long enough for them."""

    def __init__(self) -> None:
        self._over = False
        self._waits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limits(self) -> AsyncIterator[None]:
        """Raise :exc:`EngineFailed` in this block when no time is left.

        Cancel safety: safe, it only limits.
        """
        stopped = EngineFailed(None, "the proxy was stopped")
        if self._over:
            raise stopped
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)  # bounded: PROXY_RUNNING_MAX and _WAITING_MAX
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if not wait.expired():
                raise
            raise stopped from None

    def end(self) -> None:
        """End all blocks under `limits` now: each raises."""
        self._over = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
