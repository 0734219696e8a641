"""A communicator's part in its directory: watches members and announces itself.

The configured directory is connected when it is first needed, and watched once a
selector names a peer. If the directory fails, existing connections stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from hashlib import sha256
from typing import Final

from kvwire.aio import end_task, start_task
from kvwire.directory import (
    Change,
    ChangeKind,
    Directory,
    Record,
    Selector,
    open_directory,
)
from kvwire.kv.paged import PagedCache

logger: logging.Logger = logging.getLogger("kvwire.connections")

# The user's own folder, which works without any server.
_DEFAULT: Final = "file:"


class Membership:
    """Watches a directory for the peers of one communicator, and announces it there.

    Args:
        url: The directory's URL; empty for this user's folder.

    Attributes:
        members: The known members by their keys.
    """

    def __init__(self, url: str) -> None:
        self._url = url or _DEFAULT
        # A configured directory is created at once, so that a wrong URL raises now.
        self._directory: Directory | None = open_directory(url) if url else None
        self._listeners: list[Callable[[Change], None]] = []
        self._announced = ""
        self._watching: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self.members: dict[str, Record] = {}

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call a listener with every later change."""
        self._begin_watching()
        self._listeners.append(listener)  # bounded: PEERS_MAX

    async def meant_by(self, selector: Selector) -> list[Record]:
        """Return the known members that match a selector.

        Raises:
            ConnectError: No members are known yet, and the directory cannot be reached.

        Cancel safety: safe, it only reads.
        """
        directory = self._begin_watching()
        if not self.members:  # the watch has reported no members yet, or there are none
            return list(await directory.members(selector))
        return [one for one in self.members.values() if selector.matches(one)]

    def _begin_watching(self) -> Directory:
        directory = self._opened()
        if self._watching is None:
            self._watching = start_task(self._watch(directory), lasting=True)
            self._watching.add_done_callback(_log_failure)
        return directory

    @property
    def reason(self) -> str:
        """Return why the directory cannot be watched; empty while it can."""
        return "" if self._directory is None else self._directory.reason

    def forget(self, listener: Callable[[Change], None]) -> None:
        """Stop calling a listener."""
        self._listeners.remove(listener)

    def announce(self, record: Record) -> None:
        """Announce a record in place of the previous one; returns at once."""
        directory = self._opened()
        self._announced = record.key
        directory.check(record)
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = start_task(directory.announce(record), lasting=True)
        self._announcing.add_done_callback(_log_failure)

    async def withdraw(self) -> None:
        """Withdraw the announcement.

        Cancel safety: safe, the record is not renewed, so its lease ends it.
        """
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        if self._directory is not None:
            await self._directory.withdraw(self._announced)

    def leave(self) -> None:
        """Begin to withdraw the announcement; :meth:`close` waits for the end.

        The loop need not be running.
        """
        if self._leaving is None and self._announcing is not None:
            loop = self._announcing.get_loop()
            self._leaving = asyncio.Task(self.withdraw(), loop=loop)

    async def close(self) -> None:
        """Withdraw the announcement, and close the directory.

        Cancel safety: safe, call it again.
        """
        if self._leaving is not None:
            await asyncio.wait({self._leaving})
        for task in (self._watching, self._announcing):
            if task is not None:
                await end_task(task)
        if self._directory is not None:
            await self._directory.close()

    def _opened(self) -> Directory:
        if self._directory is None:
            self._directory = open_directory(self._url)
        return self._directory

    async def _watch(self, directory: Directory) -> None:
        async with aclosing(directory.watch()) as changes:
            async for change in changes:
                if change.kind is ChangeKind.LEFT:
                    self.members.pop(change.record.key, None)
                else:
                    # bounded: MEMBERS_MAX, by the directory
                    self.members[change.record.key] = change.record
                for listener in tuple(self._listeners):
                    listener(change)


def spec_digests(cache: PagedCache) -> dict[str, str]:
    """Return for each cache group a digest of its spec, as 32 hexadecimal digits."""
    return {
        name: sha256(repr(group.spec.to_pairs()).encode()).hexdigest()[:32]
        for name, group in cache.groups.items()
    }


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the error that ended a task here; only a faulty plug-in raises one."""
    if not task.cancelled() and task.exception() is not None:
        logger.error(
            "the task that watches the directory has failed", exc_info=task.exception()
        )
