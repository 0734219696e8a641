"""What only shows in numbers: a little that is left each time, or kept alive."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvwire.testing.conformance.bench import open_descriptors
from kvwire.testing.conformance.check import require

T = TypeVar("T")


async def require_no_growth(
    cycle: Callable[[], Awaitable[None]], *, cycles: int, tolerance: int
) -> None:
    """Run something many times, and count what there is of what may leak.

    Args:
        cycle: Begins, ends, and waits until nothing of it is under way.
        cycles: How often; once more before, for what is made only once.
        tolerance: So many may be there that were not, for other reasons.

    Cancel safety: as that of ``cycle``.
    """
    await cycle()
    before = _counts()
    for _ in range(cycles):
        await cycle()
    gc.collect()
    for what, now in _counts().items():
        was = before[what]
        require(now <= was + tolerance, f"{was} {what} have become {now}")


def require_collected(seen: Sequence[weakref.ref[T]], what: str) -> None:
    """Nothing may keep these alive any more."""
    gc.collect()
    held = sum(alive() is not None for alive in seen)
    require(not held, f"{held} of {len(seen)} {what} are kept alive")


def _counts() -> dict[str, int]:
    return {
        "descriptors": len(open_descriptors()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }
