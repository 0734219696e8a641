"""Turns of lanes that UCX cannot free without their peers' answers.

::

    take() -- a turn left? -- yes --> held -- give_back() --> the first that waits
                 |                     |
                 no: it waits          +----- keep() -------> gone for this process

A lane waits without looking: a turn that is given back, on any thread, wakes the first
lane that waits, and the last turn that is kept wakes all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import final


@final
class Turns:
    """At most ``most`` holders at once, on all event loops of this process."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()  # communicators may be on several threads
        self._held: set[object] = set()  # bounded: most
        self._kept: set[object] = set()  # bounded: most
        # In the order of their arrival.
        self._waiting: dict[object, asyncio.Future[None]] = {}  # bounded: LANES_MAX

    @property
    def none_left(self) -> bool:
        """Return whether all turns are kept, so that waiting would have no end."""
        return len(self._kept) >= self.most

    async def take(self, holder: object) -> bool:
        """Wait for a turn; return whether there is one.

        There is none if ``none_left``, or if the holder has given it back meanwhile.

        Cancel safety: safe, the turn is then given back.
        """
        with self._lock:
            if len(self._held) < self.most:
                self._held.add(holder)
                return True
            if self.none_left:
                return False
            turn = asyncio.get_running_loop().create_future()
            self._waiting[holder] = turn
        try:
            await turn
        except BaseException:
            self.give_back(holder)
            raise
        return holder in self._held

    def give_back(self, holder: object) -> None:
        """Let the next one have the holder's turn, if it has one; it waits no more."""
        with self._lock:
            self._kept.discard(holder)
            self._held.discard(holder)
            turn = self._waiting.pop(holder, None)
            if turn is not None:
                _wake([turn])
            while self._waiting and len(self._held) < self.most:
                first = next(iter(self._waiting))
                self._held.add(first)
                if not _wake([self._waiting.pop(first)]):
                    self._held.discard(first)  # nobody takes it on a closed loop

    def keep(self, holder: object) -> None:
        """Keep the holder and its turn until the process ends."""
        with self._lock:
            self._held.add(holder)
            self._kept.add(holder)
            if self.none_left:
                _wake(self._waiting.values())
                self._waiting.clear()


def _wake(turns: Iterable[asyncio.Future[None]]) -> bool:
    """Wake those that wait, on their own loops; return whether each loop still runs."""
    woken = True
    for turn in turns:
        try:
            turn.get_loop().call_soon_threadsafe(_resolve, turn)
        except RuntimeError:
            woken = False
    return woken


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
