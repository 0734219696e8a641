"""Limits of a proxy: the requests it has at once, their bytes, and retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvwire.types import in_bytes
from kvwire_vllm.proxy.limits import (
    PROXY_BODIES_BYTES_MAX,
    PROXY_RETRY_MAX,
    PROXY_RETRY_RESERVE,
    PROXY_RETRY_SHARE,
    PROXY_RUNNING_MAX,
)


class TooMany(Exception):
    """Reports that the proxy has no room for a request now."""


class Admission:
    """Limits how many requests there are at once; engines queue them."""

    def __init__(
        self,
        running_max: int = PROXY_RUNNING_MAX,
        *,
        bodies_bytes_max: int = PROXY_BODIES_BYTES_MAX,
    ) -> None:
        self._running_max = running_max
        self._bodies_bytes_max = bodies_bytes_max
        self._held = 0
        self.running: int = 0  # requests that are read or answered
        self.rejected: int = 0  # requests refused so far

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Reserve a place for a request until it is answered.

        The yielded function reserves memory: each call adds that many bytes to the
        request.

        Raises:
            TooMany: There is no free place, or no room for the bytes.
        """
        if self.running >= self._running_max:
            raise self._full(f"{self.running} requests are running")
        held = 0

        def take(nbytes: int) -> None:
            nonlocal held
            if self._held + nbytes > self._bodies_bytes_max:
                raise self._full(f"requests of {in_bytes(self._held)} are running")
            self._held += nbytes
            held += nbytes

        self.running += 1
        try:
            yield take
        finally:
            self.running -= 1
            self._held -= held

    def _full(self, why: str) -> TooMany:
        self.rejected += 1
        return TooMany(f"{why}; try again later")


class RetryBudget:
    """Limits retries to a share of all requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = PROXY_RETRY_RESERVE
        self._at = clock()
        self.spent: int = 0  # retries so far
        self.refused: int = 0  # retries refused so far

    def deposit(self) -> None:
        """Add the share that one request earns."""
        self._left = min(PROXY_RETRY_MAX, self._left + PROXY_RETRY_SHARE)

    def spend(self) -> bool:
        """Return whether a retry is allowed, and charge it to the budget."""
        now = self._clock()
        if self._left < PROXY_RETRY_RESERVE:
            self._left = min(PROXY_RETRY_RESERVE, self._left + now - self._at)
        self._at = now
        if self._left < 1:
            self.refused += 1
            return False
        self._left -= 1
        self.spent += 1
        return True
