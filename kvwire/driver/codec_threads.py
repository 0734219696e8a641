"""Threads that encode and decode for transfers with ``codec=``, beside the loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Final

from kvwire.aio import CallThreads
from kvwire.errors import BackendUnavailable, ClosedOK, with_remedy
from kvwire.memory.device.device_copies import DeviceCopies

# One thread per layer that is coded at a time, if there are as many CPUs; more would
# only take turns.
_THREADS: Final = min(4, os.cpu_count() or 1)


class CodecThreads:
    """Run the codec jobs of one communicator; the threads start with the first job."""

    def __init__(self) -> None:
        self.devices: DeviceCopies = DeviceCopies()
        self._lock = threading.Lock()
        self._pool: CallThreads | None = None
        self._closed = False

    def run(
        self, job: Callable[[], None], then: Callable[[Exception | None], None]
    ) -> None:
        """Run a job, and call `then` once with its error or None. Thread-safe."""

        def work() -> None:
            try:
                job()
            except Exception as exc:  # noqa: BLE001 - passed on, whatever it is
                then(exc)
            else:
                then(None)

        refused: Exception = ClosedOK("the communicator is closed")
        with self._lock:
            if not self._closed:
                if self._pool is None:
                    self._pool = CallThreads(_THREADS, "kvwire-codec")
                try:
                    self._pool.submit(work)
                except OSError as exc:
                    refused = BackendUnavailable(f"codec: {with_remedy(exc)}")
                else:
                    return
        then(refused)

    async def close(self) -> None:
        """Wait for all jobs that were accepted; accept no more.

        Cancel safety: the jobs continue, and the threads end after them.
        """
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            try:
                await asyncio.to_thread(pool.shutdown)
            except (RuntimeError, OSError):  # no thread can be started
                pool.shutdown()
        self.devices.close()
