"""How long each callback of an asyncio loop holds it: every handle is timed.

The wall time includes what other processes take of the CPU, the CPU time does not. A
loop of uvloop runs its handles in C; what they call is the same code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stalls:
    """Every callback that was run.

    Attributes:
        wall_s: How long it took.
        cpu_s: How much CPU it used.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def answer(self) -> dict[str, Any]:
        """Counts, 99.9th percentiles and the longest, in seconds."""
        return {
            "callbacks": len(self.wall_s),
            "wall_p999_s": _p999(self.wall_s),
            "wall_max_s": max(self.wall_s, default=0.0),
            "cpu_p999_s": _p999(self.cpu_s),
            "cpu_max_s": max(self.cpu_s, default=0.0),
        }


@contextmanager
def watched() -> Iterator[Stalls]:
    """Time the callbacks of this process's asyncio loops until the end."""
    found = Stalls()
    handle: Any = asyncio.Handle
    run = handle._run

    def timed(self: asyncio.Handle) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        run(self)
        found.cpu_s.append(time.thread_time() - cpu_s)
        found.wall_s.append(time.perf_counter() - wall_s)

    handle._run = timed
    try:
        yield found
    finally:
        handle._run = run


def _p999(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[-(-999 * len(ordered) // 1000) - 1] if ordered else 0.0
