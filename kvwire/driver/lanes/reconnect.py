"""Open lanes in the place of those that have broken, while their connection lives.

A port that was down, a device that was reset or a limit of the system may cost a lane
and be no matter a minute later, and a connection may live for weeks. Only the client
asks for lanes, so this is its affair alone; data goes on over what is left meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvwire.aio import Backoff, start_task
from kvwire.driver.limits import RERAISE_S, RERAISE_S_MAX
from kvwire.errors import BackendUnavailable, KVWireError


class LaneReconnector:
    """Opens the lanes of one connection again, one after the other, with pauses.

    Args:
        lacks: Whether lanes are missing that are worth another try.
        attempt: Opens one. Raises BackendUnavailable if it does not come up, and any
            other error of kvwire if the connection has ended.
        ended: Called whenever nothing is being opened any more.
    """

    def __init__(
        self,
        lacks: Callable[[], bool],
        attempt: Callable[[], Awaitable[None]],
        ended: Callable[[], None],
    ) -> None:
        self._lacks = lacks
        self._attempt = attempt
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff(RERAISE_S, RERAISE_S_MAX)
        self._up_at = self._loop.time()
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Tell whether it waits for the next try, or makes one."""
        return self._task is not None

    def lost(self) -> None:
        """Open a lane in the place of one that broke, in a task of its own."""
        # One that breaks as soon as it is open is not to be opened without a pause.
        if self._loop.time() - self._up_at >= RERAISE_S_MAX:
            self._backoff.reset()
        if self._task is None and self._lacks():
            self._task = start_task(self._run())
            self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Open nothing more: the connection ends."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._lacks():
            await asyncio.sleep(self._backoff.pause_s())
            if not self._lacks():
                return
            try:
                await self._attempt()
            except BackendUnavailable:
                continue
            except KVWireError:
                return
            else:
                self._up_at = self._loop.time()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._ended()
