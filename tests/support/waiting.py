"""Waiting for what no event announces, such as the state of another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""How long what must happen may take: only a hang takes so long."""


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether something comes true while one may still be patient."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.05)
    return True
