"""An event loop whose clock jumps: leases, deadlines and pings in no time at all.

With the in-process backend nothing of a test waits for the outside world, so whenever
no callback is ready the loop's clock moves to the next timer instead of sleeping. What
takes 30 s of a lease takes microseconds, in the same order, every time.

A test that waits for something that no timer brings would hang on a real loop; here it
is told so, since there is nothing left that could happen.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


# A time that no real clock shows by chance.
START_S = 1_000_000.0
# Pings alone keep timers coming, so a test that waits for ever is ended by this.
LONGEST_S = 3600.0


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, or nothing but timers for an hour."""


class _Jump(selectors.DefaultSelector):
    """A selector that never sleeps; it moves the clock of its loop instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock("nothing is ready and no timer is set")
        if not ready and timeout:
            self.loop.advance(timeout)
            if self.loop.time() > START_S + LONGEST_S:
                raise Deadlock(f"{LONGEST_S:g} s of virtual time have passed")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time."""

    def __init__(self) -> None:
        selector = _Jump()
        selector.loop = self
        self._now = START_S
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


async def pass_time(seconds: float) -> None:
    """Let virtual time pass; whatever is due in it happens.

    Cancel safety: safe, it only waits.
    """
    if not isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
        raise RuntimeError("pass_time: this loop is in real time; wait for an event")
    await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, as ``asyncio.run`` does in real time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop, debug=False) as runner:
        return runner.run(main)
