"""ucxx of RAPIDS: ``send`` and ``recv`` of its asyncio endpoints, fragment by fragment.

Which transports UCX takes is said by UCX_TLS.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Coroutine
from typing import Any, Final

import numpy as np
import ucxx

from .serving import HOST, Peer

# Sends or receives that are waited for together.
_IN_FLIGHT: Final = 64


class Program(Peer):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._loop = asyncio.new_event_loop()
        self._signal = np.zeros(1, np.uint8)
        self._listener: Any = None
        self._endpoint: Any = None
        self._met = asyncio.Event()

    def listen(self) -> Any:
        async def listen() -> None:
            self._listener = ucxx.create_listener(self._accepted)

        self._loop.run_until_complete(listen())
        return self._listener.port

    def accept(self) -> None:
        self._loop.run_until_complete(self._met.wait())

    def connect(self, address: Any) -> dict[str, Any]:
        async def connect() -> None:
            self._endpoint = await ucxx.create_endpoint(HOST, address)

        self._loop.run_until_complete(connect())
        return {
            "ucxx": importlib.metadata.version("ucxx-cu12"),
            "UCX_TLS": os.environ.get("UCX_TLS", ""),
        }

    def move(self) -> None:
        """See Peer; a pull begins with a signal to the right side."""

        async def push() -> None:
            await self._send()
            await self._endpoint.recv(self._signal)

        async def pull() -> None:
            await self._endpoint.send(self._signal)
            await self._receive()

        self._loop.run_until_complete(push() if self.work["verb"] == "push" else pull())

    def serve(self) -> None:
        async def expect() -> None:
            await self._receive()
            await self._endpoint.send(self._signal)

        async def publish() -> None:
            await self._endpoint.recv(self._signal)
            await self._send()

        push = self.work["verb"] == "push"
        self._loop.run_until_complete(expect() if push else publish())

    async def _accepted(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._met.set()

    async def _send(self) -> None:
        fragments = self.fragments()
        await _some_at_once([self._endpoint.send(fragments[row]) for row in self.rows])

    async def _receive(self) -> None:
        fragments = self.fragments()
        await _some_at_once([self._endpoint.recv(fragments[row]) for row in self.rows])


async def _some_at_once(calls: list[Coroutine[Any, Any, Any]]) -> None:
    for first in range(0, len(calls), _IN_FLIGHT):
        await asyncio.gather(*calls[first : first + _IN_FLIGHT])
