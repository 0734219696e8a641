"""How the proxy ends while requests are under way.

::

    SIGTERM           no new connection; requests go on
    stop_s later      those that wait get 503, and streams an error, as if their engine
                      had died
    2 s after that    connections of clients that take nothing, or say nothing, are cut
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from kvwire.extras import needed_by
from kvwire.integrations.vllm.proxy.client import EngineFailed

with needed_by("the proxy", extra="vllm"):
    import uvicorn

_UNREAD_S: Final = 2.0


class Ending:
    """Ends what is under way, once the proxy has waited for it long enough."""

    def __init__(self) -> None:
        self._over = False
        self._waits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limits(self) -> AsyncIterator[None]:
        """Raise :exc:`EngineFailed` in what is done here when there is no time left.

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
        """Leave no more time."""
        self._over = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)


def _protocol() -> Any:
    """Return what reads requests: httptools where it is, and h11 otherwise."""
    try:
        from kvwire.integrations.vllm.proxy.upgrades import (  # noqa: PLC0415
            PassingByProtocol,
        )
    except ModuleNotFoundError:
        return "h11"
    return PassingByProtocol


class ProxyServer(uvicorn.Server):
    """Serves the proxy until a signal, and for so many seconds what is under way."""

    def __init__(self, app: Any, host: str, port: int, ending: Ending, stop_s: float):
        config = uvicorn.Config(
            *(app, host, port), http=_protocol(), ws="none", log_level="warning"
        )
        # Whatever else still waits then is cancelled.
        config.timeout_graceful_shutdown = math.ceil(stop_s + 2 * _UNREAD_S)
        super().__init__(config)
        self._ending = ending
        self._stop_s = stop_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as the module says.

        Cancel safety: whatever is left is left.
        """
        loop = asyncio.get_running_loop()
        timers = (
            loop.call_later(self._stop_s, self._ending.end),
            loop.call_later(self._stop_s + _UNREAD_S, self._cut),
        )
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
