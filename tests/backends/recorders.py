"""Handlers that write down what they are told: what those of all kinds have in common.

Those of links are in tests/backends/kvwire_tcp/recorder.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvwire.backend import Landing
from kvwire.backend.lane import Lane, LaneHandler


class Told:
    """What any handler is told; a callback that comes after the last one is refused."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait for callbacks until ``ready`` holds."""
        while not ready():
            assert not self.closed, f"closed with {self.closed[0]!r}"
            await self._change()

    async def end(self) -> Exception | None:
        """What the link or lane was closed with."""
        await self.until(lambda: self.closed)
        return self.closed[0]

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _note(self, callback: str) -> None:
        assert not self.closed, f"{callback} after the end"
        self._changed.set()


class LaneRecorder(Told, LaneHandler):
    """Notes every callback of a lane."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Landing] = []

    def payload_sent(self, lane: Lane, token: object) -> None:
        self._note("payload_sent")
        self.sent.append(token)

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        self._note("payload_received")
        self.received.append(landing)

    def lane_writable(self, lane: Lane) -> None:
        self._note("lane_writable")
        self.writable += 1

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        self._note("lane_closed")
        self.closed.append(error)

    async def moved(self, received: int = 0, sent: int = 0) -> None:
        """Wait until so many payloads are through, or the lane has ended."""
        while not self.closed and (
            len(self.received) < received or len(self.sent) < sent
        ):
            await self._change()
