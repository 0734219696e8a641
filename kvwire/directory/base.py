"""The contract of a directory, and the code that all kinds of directories share.

A directory is a table of keys and small values with leases. A subclass writes, erases
and follows values; announcing, renewing, watching and retrying are implemented here,
the same for all kinds.

A subclass promises:

* ``write`` returns once every later ``follow`` yields the value. The value expires if
  it is not written again within ``lease_s`` (or a few times as long: followers count
  leases themselves).
* ``follow`` first yields all existing values in one batch, which may be empty, and then
  each change soon after it was made. Writing the same bytes again is a change as well,
  because it renews a lease.
* A failure raises an ``OSError``, such as :exc:`~kvwire.ConnectError`. The call may
  then be repeated, even if the server was restarted and has lost its data.
* Values are not interpreted: they are bytes, up to the permitted length.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import ClassVar, Final, Self, TypeAlias, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvwire.aio import (
    AsyncWith,
    Upkeep,
    cancelled_once,
    end_task,
    gather_all,
    run_to_completion,
    start_task,
)
from kvwire.directory.members import Change, Members
from kvwire.directory.record import Record
from kvwire.directory.selector import Selector
from kvwire.errors import (
    ClosedOK,
    ConnectError,
    UsageError,
    check_credentials,
    nearest,
    shown,
)

# An unreachable directory is tried again after a pause that doubles.
DIRECTORY_RETRY_S: Final = 0.1
DIRECTORY_RETRY_S_MAX: Final = 5.0
# How long a close waits for the directory to remove records.
WITHDRAW_TIMEOUT_S: Final = 1.0

logger: logging.Logger = logging.getLogger("kvwire.directory")

T = TypeVar("T")
Batch: TypeAlias = Mapping[str, bytes | None]
"""Values by their keys; None where a key is gone."""


class Directory(AsyncWith, ABC):
    """Holds the records of members. Bound to the loop on which it is used.

    Args:
        url: Its address, with options after a question mark.

    Raises:
        UsageError: It is not a URL, or has an option that this kind of directory lacks.

    Attributes:
        options: The options that a URL may have, with their defaults.
        read_only: The party that announces members, if they cannot do so themselves;
            otherwise "".
        many_hosts: Whether a URL may name several hosts, separated by commas.
        ignored: The number of invalid records that watchers have found.
        reason: Why it cannot be watched; empty while it can.
    """

    # A directory that has not listed its members by then counts as unreachable.
    list_s: float = 10.0
    options: ClassVar[Mapping[str, str]] = {}
    read_only: ClassVar[str] = ""
    many_hosts: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        check_credentials(url)
        try:
            self.url: SplitResult = urlsplit(url)
            hosts = self.url.netloc.rpartition("@")[2].split(",")
            for host in hosts:
                urlsplit(f"//{host}").port  # noqa: B018 - it is read here
        except ValueError as exc:
            # Show nothing else of the URL, which may contain a password.
            raise UsageError(f"directory {url.partition(':')[0]}: {exc}") from None
        given = dict(parse_qsl(self.url.query, keep_blank_values=True))
        for option in given:
            if option not in self.options:
                hint = nearest(option, self.options) if self.options else "it has none"
                raise UsageError(f"directory {self}: no option {option!r}; {hint}")
        if len(hosts) > 1 and not self.many_hosts:
            raise UsageError(f"directory {self}: pass one host, not {len(hosts)}")
        self.given: dict[str, str] = {**self.options, **given}
        self.ignored: int = 0
        self.reason: str = ""
        self._announcements: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self._ending: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        """Return its address, without the password that its URL may contain."""
        host = self.url.netloc.rpartition("@")[2]
        return f"{self.url.scheme}:{'//' if host else ''}{host}{self.url.path}"

    # --- for subclasses ---------------------------------------------------------------

    @abstractmethod
    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        """Write a value, or renew it.

        Raises:
            OSError: The directory cannot be reached, or does not accept the value now.
            UsageError: The directory can never accept the value.

        Cancel safety: the value may have been written.
        """

    @abstractmethod
    async def erase(self, key: str) -> None:
        """Erase a value, if it is there.

        Raises:
            OSError: The directory cannot be reached.

        Cancel safety: the value may have been erased.
        """

    @abstractmethod
    def follow(self) -> AsyncGenerator[Batch, None]:
        """Yield all entries, and then each change; see the module's docstring.

        Raises:
            OSError: The directory cannot be reached, or no longer.

        Cancel safety: safe, it only reads.
        """

    async def disconnect(self) -> None:
        """Release all resources; called when no other call is running.

        It is called once, and again only if it has raised.

        Cancel safety: everything is released in any case.
        """

    @contextmanager
    def failing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Convert these errors, and OSError, to ConnectError."""
        reported: tuple[type[Exception], ...] = (*kinds, OSError)
        try:
            yield
        except reported as exc:
            text = str(exc) or type(exc).__name__
            raise ConnectError(f"directory {self}: {text}", address=str(self)) from exc

    def seconds(self, option: str) -> float:
        """Return an option that is a number of seconds above 0.

        Raises:
            UsageError: The option is not such a number.
        """
        with suppress(ValueError):
            value = float(self.given[option])
            if 0 < value < float("inf"):
                return value
        raise UsageError(
            f"directory {self}: {option}={self.given[option]!r}; pass a number of "
            "seconds above 0"
        )

    # --- members ----------------------------------------------------------------------

    def check(self, record: Record) -> None:
        """Check that a record may be announced here.

        Raises:
            UsageError: The record is not allowed, or members cannot announce themselves
                here.
        """
        record.encode()
        if self.read_only:
            raise UsageError(f"directory {self}: {self.read_only} announces members")

    async def announce(self, record: Record) -> None:
        """Write a record, and renew it until it is withdrawn.

        Returns after the first write, however long the directory cannot be reached
        before. The record replaces an earlier one with the same key.

        Raises:
            UsageError: The record is not allowed, or members cannot announce themselves
                here.
            ClosedOK: The directory was closed.

        Cancel safety: the announcement continues; :meth:`withdraw` ends it.
        """
        self.check(record)
        value = record.encode()
        if self._closed:
            raise ClosedOK(f"directory {self} is closed")
        old = self._announcements.pop(record.key, None)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keeper = start_task(self._renew(record, value, old, written))
        self._announcements[record.key] = keeper  # bounded: MEMBERS_MAX, by the caller
        await asyncio.wait({keeper, written}, return_when=asyncio.FIRST_COMPLETED)
        if keeper.done() and not keeper.cancelled():
            keeper.result()

    async def withdraw(self, key: str) -> None:
        """Stop announcing a record, and erase it if the directory can be reached.

        Otherwise the record expires with its lease. Never raises.

        Cancel safety: safe, the announcement has ended, and the record expires with its
        lease.
        """
        keeper = self._announcements.pop(key, None)
        if keeper is None:
            return
        # It replaces the keeper, so that a concurrent announce waits for its end.
        eraser = start_task(self._withdraw(key, keeper))
        self._announcements[key] = eraser
        await asyncio.wait({eraser})
        if not eraser.cancelled():
            eraser.result()

    async def watch(
        self, selector: Selector | str = ""
    ) -> AsyncGenerator[Change, None]:
        """Iterate over changes of the members that a selector matches, without end.

        Existing members are reported as joined. While the directory cannot be reached,
        it is retried, and no changes are reported. Invalid records are counted in
        ``ignored`` and skipped. Close the iterator when it is no longer needed
        (``contextlib.aclosing``).

        Raises:
            UsageError: The selector is not valid.

        Cancel safety: cancelling ``anext`` ends the iterator.
        """
        members = Members(Selector.parse(selector))
        # A server whose watches break right after each list is not asked without pause.
        steady_s = DIRECTORY_RETRY_S_MAX
        upkeep = Upkeep(DIRECTORY_RETRY_S, DIRECTORY_RETRY_S_MAX, steady_s=steady_s)
        async for _ in upkeep:
            try:
                async with _closing(self._changes(members, upkeep)) as changes:
                    async for change in changes:
                        yield change
                # A lease has expired: all entries are read again, without a pause.
            except OSError as exc:
                reason = _text(exc)
                self.reason = f"the directory cannot be watched: {reason}"
                members.suspend(asyncio.get_running_loop().time())
                if upkeep.lost(reason):
                    logger.warning(
                        "watching directory %s failed: %s; retrying", self, reason
                    )

    async def members(self, selector: Selector | str = "") -> tuple[Record, ...]:
        """Return the members that a selector matches now.

        Raises:
            ConnectError: The directory cannot be reached.
            UsageError: The selector is not valid.

        Cancel safety: safe, it only reads.
        """
        members = Members(Selector.parse(selector))
        await cancelled_once(self._read_all(members))
        return tuple(members)

    async def close(self) -> None:
        """Withdraw all records that were announced here, and disconnect. Never raises.

        Cancel safety: only the waiting is cancelled: the close continues by itself;
        call it again to wait for its end.
        """
        self._closed = True
        end = self._ending
        if end is None or (end.done() and (end.cancelled() or end.exception())):
            end = self._ending = start_task(self._withdraw_all())
        await asyncio.shield(end)

    async def __aenter__(self) -> Self:
        """Return the directory; it is closed at the end of the block."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close it, even if the task is cancelled."""
        await run_to_completion(self.close())

    # --- inside -----------------------------------------------------------------------

    async def _read_all(self, members: Members) -> None:
        """Read all entries once, into a table."""
        async with _closing(self.follow()) as batches:
            async for batch in batches:
                self._take(members, batch)
                break

    async def _withdraw_all(self) -> None:
        await gather_all(*map(self.withdraw, list(self._announcements)))
        await self.disconnect()

    async def _withdraw(self, key: str, keeper: asyncio.Task[None]) -> None:
        try:
            await end_task(keeper)
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self.erase(key)
        except OSError as exc:  # a timeout is an OSError as well
            details = (self, key, _text(exc))
            logger.info("directory %s: %s was not withdrawn: %s", *details)
        finally:
            if self._announcements.get(key) is asyncio.current_task():
                del self._announcements[key]

    async def _renew(
        self,
        record: Record,
        value: bytes,
        old: asyncio.Task[None] | None,
        written: asyncio.Future[None],
    ) -> None:
        """Write a record three times per lease until it is withdrawn.

        After each write it checks whether the record was withdrawn, because a library
        may swallow the cancellation of a write.
        """
        if old is not None:
            await end_task(old)
        pause_s = record.lease_s / 3
        upkeep = Upkeep(DIRECTORY_RETRY_S, pause_s)
        me = asyncio.current_task()
        async for _ in upkeep:
            if self._announcements.get(record.key) is not me:
                return
            try:
                async with asyncio.timeout(record.lease_s):
                    await self.write(record.key, value, record.lease_s)
            except OSError as exc:
                if upkeep.lost(_text(exc)):
                    logger.warning(
                        "announcing %r in directory %s failed: %s; retrying",
                        record.name,
                        self,
                        upkeep.reason,
                    )
                continue
            upkeep.back()
            if not written.done():
                written.set_result(None)
            await asyncio.sleep(pause_s)

    async def _changes(
        self, members: Members, upkeep: Upkeep
    ) -> AsyncGenerator[Change, None]:
        """Yield changes until a lease expires; then all entries must be read again.

        The server may have silently lost the watch although the member is alive. So a
        silent watch never removes a member by itself: the next watch reads all entries
        first, and only then do leases end.
        """
        loop = asyncio.get_running_loop()
        async with _closing(self.follow()) as batches:
            pending = asyncio.ensure_future(anext(batches, None))
            try:
                while True:
                    if members.doubts:
                        await asyncio.wait({pending}, timeout=self.list_s)
                        if not pending.done():
                            raise TimeoutError(
                                f"no list arrived within {self.list_s:g} s"
                            )
                    else:
                        patience_s = members.expires_in(loop.time())
                        await asyncio.wait({pending}, timeout=patience_s)
                    changes = []
                    if pending.done():
                        batch = pending.result()
                        if batch is None:
                            raise ConnectionError("the watch has ended")
                        upkeep.back()
                        changes = self._take(members, batch)
                        members.doubts = False  # the first batch has all entries
                        pending = asyncio.ensure_future(anext(batches, None))
                    for change in changes:
                        yield change
                    if members.doubt(loop.time()):
                        return
                    for change in members.expire(loop.time()):
                        yield change
            finally:
                await run_to_completion(end_task(pending))

    def _take(self, members: Members, batch: Batch) -> list[Change]:
        """Apply a batch of entries to a table, and count invalid records."""
        now = asyncio.get_running_loop().time()
        members.resume(now)
        self.reason = ""
        known = members.ignored
        changes = []
        for key, raw in batch.items():
            change = members.remove(key) if raw is None else members.put(key, raw, now)
            if change is not None:
                changes.append(change)
        self.ignored += members.ignored - known
        if members.ignored and not known:
            logger.warning("directory %s: ignored an entry: %s", self, members.reason)
        return changes


def _text(error: OSError) -> str:
    """Return an error's text for logs; a timeout has none of its own."""
    return shown(str(error) or "it does not answer", 200)


@asynccontextmanager
async def _closing(changes: AsyncGenerator[T, None]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator at the end, even in a cancel scope that cancels the closing."""
    try:
        yield changes
    finally:
        await run_to_completion(changes.aclose())
