"""Threads for copies and system calls, so that the loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from kvwire.aio import CallThreads, run_to_completion
from kvwire.limits import MIB
from kvwire.memory.device.device_copies import DeviceCopies

T = TypeVar("T")

# For a concurrent put and get: each needs one thread to copy and one to wait for a
# disk.
_THREADS: Final = 4
# Copying less takes no longer than waking a thread, so the loop copies it itself.
TURN_BYTES: Final = 1 * MIB


class Threads:
    """Runs the work of one store on a few threads, started when first needed."""

    def __init__(self) -> None:
        self.devices: DeviceCopies = DeviceCopies()
        self._pool = CallThreads(_THREADS, thread_name_prefix="kvwire-store")

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function on a thread, and return its result.

        Raises:
            OSError: No thread can be started; the function is not called.

        Cancel safety: the function is finished first, since a copying thread cannot be
        stopped; then the cancellation is raised.
        """
        loop = asyncio.get_running_loop()
        return await run_to_completion(loop.run_in_executor(self._pool, function))

    def close(self) -> None:
        """End the threads, which must be idle."""
        self._pool.shutdown()
        self.devices.close()
