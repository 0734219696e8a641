"""Waiting for what no event announces, such as the state of another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_PATIENCE_S = 30.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether something comes true while one may still be patient."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.05)
    return True
