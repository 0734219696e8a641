"""The budget of retries: a share of all requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvwire_vllm.proxy.limits import (
    PROXY_RETRY_MAX,
    PROXY_RETRY_RESERVE,
    PROXY_RETRY_SHARE,
)


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
