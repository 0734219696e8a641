"""Pauses between tries."""

from __future__ import annotations

import random


class Backoff:
    """A random part of a limit that doubles, up to a last one.

    So many that have lost the same thing at once do not come back at once, and what
    stays away is asked for less and less often. Never less than half of the limit: a
    pause of nothing is none.

    Args:
        first_s: The longest first pause.
        last_s: The longest of all.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s = self._limit_s = first_s
        self._last_s = last_s

    def pause_s(self) -> float:
        """How long to wait before the next try; the one after may wait twice that."""
        limit_s, self._limit_s = self._limit_s, min(2 * self._limit_s, self._last_s)
        return random.uniform(limit_s / 2, limit_s)  # noqa: S311 - no secret

    def reset(self) -> None:
        """It has worked for long enough: begin with the first pause again."""
        self._limit_s = self._first_s
