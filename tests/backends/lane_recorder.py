"""A lane handler that writes down what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvwire.backend import Landing
from kvwire.backend.lane import Lane, LaneHandler


class LaneRecorder(LaneHandler):
    """Notes every callback, and refuses one that comes after ``lane_closed``."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.received: list[Landing] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self._changed = asyncio.Event()

    def payload_sent(self, lane: Lane, token: object) -> None:
        self._note()
        self.sent.append(token)

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        self._note()
        self.received.append(landing)

    def lane_writable(self, lane: Lane) -> None:
        self._note()
        self.writable += 1

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        self._note()
        self.closed.append(error)

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait for callbacks until ``ready`` holds."""
        while not ready():
            assert not self.closed, f"closed with {self.closed[0]!r}"
            await self._change()

    async def moved(self, received: int = 0, sent: int = 0) -> None:
        """Wait until so many payloads are through, or the lane has ended."""
        while not self.closed and (
            len(self.received) < received or len(self.sent) < sent
        ):
            await self._change()

    async def end(self) -> Exception | None:
        """What the lane was closed with."""
        await self.until(lambda: self.closed)
        return self.closed[0]

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _note(self) -> None:
        assert not self.closed, "a callback after lane_closed"
        self._changed.set()
