"""Deadlines and patience, on the running loop's clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable
from datetime import timedelta
from typing import Any

from kvwire.errors import UsageError

_STARTED = time.monotonic()
"""No instant of this process lies before it."""


def absolute(deadline: float | timedelta | None) -> float | None:
    """The deadline as a time of the running loop's clock.

    A deadline is an instant, ``loop.time() + 2``. People also write the 2 alone. A
    number smaller than the clock was when this process began cannot be an instant of
    its life, so it is read as seconds from now; a ``timedelta`` always is.

    Raises:
        UsageError: Not a number, negative, or not finite.
    """
    if deadline is None:
        return None
    now = asyncio.get_running_loop().time()
    if isinstance(deadline, timedelta):
        seconds, from_now = deadline.total_seconds(), True
    else:
        seconds, from_now = float(deadline), deadline < _STARTED
    if not math.isfinite(seconds) or seconds < 0:
        raise UsageError(
            f"deadline={deadline!r}: pass a time of the loop's clock "
            f"(loop.time() + 2), or a timedelta from now"
        )
    return now + seconds if from_now else seconds


async def at_most(
    timeout_s: float, coroutines: Iterable[Coroutine[Any, Any, None]]
) -> None:
    """Run coroutines side by side; what is not through in time is cancelled.

    Cancel safety: all of them are cancelled as well.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
