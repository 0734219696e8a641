"""Points at which a system call that writes fails, or the process ends.

Every write, sync, truncation and removal of a tier's files asks :data:`POINTS` first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvwire.store.file import File
from tests.store.files import Scripted

ERRORS = (errno.ENOSPC, errno.EIO)


@dataclass
class Plan:
    """What happens at which of the next calls.

    Attributes:
        at: The first call that it happens at, counted from 0.
        calls: At how many of them; after that all is well.
        torn: Whether half of a write is done first.
        code: The error that they fail with; 0 if they do not fail.
        end: Called there: what ends the process, or keeps what a killed one leaves.
        short: Whether writes move half of what they are given.
    """

    at: int = 0
    calls: int = 1
    torn: bool = False
    code: int = 0
    end: Callable[[], None] | None = None
    short: bool = False


class Points:
    """The calls of this process, and the plan for them."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._seen = 0
        self.hits = 0

    def arm(self, plan: Plan) -> None:
        """From the next call on this is the plan."""
        self._plan, self._seen, self.hits = plan, 0, 0

    def disarm(self) -> int:
        """From now on all is well; how many calls the plan has hit."""
        self._plan = None
        return self.hits

    def ask(self, tear: Callable[[], None] | None) -> bool:
        """One call is about to be made.

        Args:
            tear: Does half of it, if it writes.

        Returns:
            Whether it is to move less than it is given.

        Raises:
            OSError: It fails.
        """
        plan, seen = self._plan, self._seen
        self._seen += 1
        if plan is None or not plan.at <= seen < plan.at + plan.calls:
            return False
        self.hits += 1
        if plan.torn and tear is not None:
            tear()
        if plan.end is not None:
            plan.end()
        if plan.code:
            raise OSError(plan.code, os.strerror(plan.code))
        return plan.short


POINTS = Points()


class PointedFile(Scripted):
    """The file of images, whose calls that write are points."""

    def hook(self, *_: object) -> None:  # type: ignore[override]
        """Nothing: the calls are overridden here."""

    def pwritev(self, window: tuple[int, int], offset: int) -> int:
        """See File."""
        if POINTS.ask(lambda: self.tear(window, offset)):
            return self.tear(window, offset)
        return File.pwritev(self, window, offset)

    def sync(self) -> None:
        """See File."""
        POINTS.ask(None)
        File.sync(self)

    def allocate(self, offset: int, nbytes: int) -> None:
        """See File."""
        POINTS.ask(None)
        File.allocate(self, offset, nbytes)


def copied(directory: Path, into: Path) -> None:
    """What a process that is killed now leaves in a directory."""
    into.mkdir()
    for file in directory.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
