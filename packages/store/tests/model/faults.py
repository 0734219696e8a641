"""Points at which a system call that writes fails, or the process or the power ends.

Every write, sync, truncation and removal of a tier's files asks :data:`POINTS` first,
those of SQLite as well.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvwire_store.tiers.directory import File, Views
from packages.store.tests.model.vfs import AskingVfs, Tear

ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
# What a disk writes as a whole.
_SECTOR: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens at which of the next calls.

    Attributes:
        at: The first call that it happens at, counted from 0.
        calls: At how many of them; after that all is well.
        torn: Whether half of a write is done first.
        code: The error that they fail with; 0 if they do not fail.
        end: Called there: what ends the process, or keeps what a killed one leaves.
        short: Whether writes move half of what they are given.
        reads: Whether reads are what fails.
    """

    at: int = 0
    calls: int = 1
    torn: bool = False
    code: int = 0
    end: Callable[[], None] | None = None
    short: bool = False
    reads: bool = False


class Points:
    """The calls of this process, the plan for them, and what a power cut leaves."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._seen = self._hits = 0
        self._synced: dict[Path, bytes] = {}
        self._watched: set[Path] = set()

    def arm(self, plan: Plan) -> None:
        """From the next call on this is the plan."""
        self._plan, self._seen, self._hits = plan, 0, 0

    def disarm(self) -> int:
        """From now on all is well; how many calls the last plan has hit."""
        self._plan = None
        return self._hits

    def ask(self, tear: Tear | None, *, reads: bool = False) -> bool:
        """One call is about to be made."""
        plan, seen = self._plan, self._seen
        if plan is None or plan.reads is not reads:
            return False
        self._seen += 1
        if not plan.at <= seen < plan.at + plan.calls:
            return False
        self._hits += 1
        if plan.torn and tear is not None:
            tear()
        if plan.end is not None:
            plan.end()
        if plan.code:
            raise OSError(plan.code, os.strerror(plan.code))
        return plan.short

    def forget(self) -> None:
        self.disarm()
        self._watched.clear()
        self._synced.clear()

    def watch(self, directory: Path) -> None:
        self._watched.add(directory)

    def synced(self, path: Path) -> None:
        """What a file holds now survives a power cut."""
        if path.parent in self._watched:
            self._synced[path] = path.read_bytes()

    def cut(self, directory: Path, into: Path, draw: random.Random) -> None:
        """What a power cut now leaves: of what was not synced, any sectors."""
        into.mkdir()
        for path in files(directory):
            now, then = path.read_bytes(), self._synced.get(path, b"")
            if not then and draw.random() < 0.3:
                continue  # its name was not synced either
            then = then[: len(now)].ljust(len(now), b"\0")
            left = bytearray(then)
            keep = draw.choice((0.0, 0.5, 1.0))
            for at in range(0, len(now), _SECTOR):
                if draw.random() < keep:
                    left[at : at + _SECTOR] = now[at : at + _SECTOR]
            (into / path.name).write_bytes(left)
            self._synced[into / path.name] = bytes(left)


POINTS: Final = Points()


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def copied(directory: Path, into: Path) -> None:
    """What a process that is killed now leaves in a directory."""
    into.mkdir()
    POINTS.watch(into)
    for path in files(directory):
        (into / path.name).write_bytes(path.read_bytes())
        POINTS.synced(into / path.name)


class PointedFile(File):
    """The file of images, whose calls are points."""

    def tear(self, views: Views, offset: int) -> int:
        """Write half of the first piece: what a call leaves that is cut off."""
        return os.pwrite(self._fd, views[0][: max(1, views[0].nbytes // 2)], offset)

    def preadv_at_once(self, views: Views, offset: int) -> int:
        raise BlockingIOError

    def pwritev(self, views: Views, offset: int) -> int:
        if POINTS.ask(lambda: self.tear(views, offset)):
            return self.tear(views, offset)
        return super().pwritev(views, offset)

    def preadv(self, views: Views, offset: int) -> int:
        POINTS.ask(None, reads=True)
        return super().preadv(views, offset)

    def sync(self) -> None:
        POINTS.ask(None)
        super().sync()
        POINTS.synced(self.path)

    def allocate(self, offset: int, nbytes: int) -> None:
        POINTS.ask(None)
        super().allocate(offset, nbytes)


# The default of this process, from here on.
AskingVfs(POINTS.ask, POINTS.synced)
