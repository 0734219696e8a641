"""The reader's end of a peer's window."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.aio import Closing, LoopThread, absolute, running_loop, start_task
from kvwire.endpoint.request import Request
from kvwire.endpoint.windows.opened import OpenedWindow
from kvwire.endpoint.windows.reading import Reading, ReadQueue
from kvwire.endpoint.windows.ticket import read_ticket, write_ticket
from kvwire.endpoint.windows.window import as_cache
from kvwire.errors import (
    KVWireError,
    UsageError,
)
from kvwire.kv.blocks import Blocks, Ids
from kvwire.kv.fragments import Array
from kvwire.kv.outcome import Outcome
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from kvwire.memory.buffers import Memory
from kvwire.proto.state import RequestKind
from kvwire.types import Deadline

_READ: Final = RequestKind.READ
_new: Final = object.__new__


class RemoteWindow(Closing):
    """A peer's window, open for reading; created by ``await connection.window(name)``.

    Attributes:
        name: The name by which the owner exposes it.
    """

    def __init__(
        self,
        name: str,
        thread: LoopThread,
        opened: OpenedWindow,
        reopen: Callable[[], Awaitable[OpenedWindow]] | None = None,
    ) -> None:
        self.name: str = name
        self._thread = thread
        self._loop = thread.loop
        self._reopen = reopen
        self._opened = opened
        self._queue = ReadQueue(opened)
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        # Reads that wait for a connection.
        self._waiting: list[Reading] = []  # bounded: REQUESTS_MAX, by their callers

    def __repr__(self) -> str:
        return f"<RemoteWindow {self.name!r}, {self.way}>"

    @property
    def serial(self) -> bytes:
        """Return the serial in the window's tickets; reopening changes it."""
        return self._opened.serial

    @property
    def specs(self) -> dict[str, KVSpec]:
        """Return the spec of each group of the owner's cache."""
        return {group.name: group.spec for group in self._opened.geometry.groups}

    @property
    def way(self) -> str:
        """Return how blocks are read: "mapped", "process_vm_readv", "messages", ..."""
        opened = self._opened
        if opened.reader is not None:
            return opened.reader.way
        if opened.gone:
            return "closed" if self._closed else "not connected"
        return "messages"

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner's process, or the connection to it, has ended.

        Mapped memory outlives its owner: offered blocks can still be read, and are
        unchanged.
        """
        reader = self._opened.reader
        return bool(self._opened.gone) or (reader is not None and reader.owner_gone)

    def ticket(
        self, blocks: Mapping[str, Ids], generations: Mapping[str, Array]
    ) -> bytes:
        """Return the ticket of blocks whose generations are known.

        Use it if the owner consists of several processes, and one process draws the
        generations for all (:meth:`Window.offer`).

        Args:
            blocks: The owner's block ids, by group.
            generations: The generation of each, by group.

        Raises:
            UsageError: A group is missing, or the numbers of its blocks and generations
                differ.
        """
        opened = self._opened
        groups = [group.name for group in opened.geometry.groups]
        if set(groups) != set(blocks) or set(groups) != set(generations):
            raise UsageError(
                f"ticket: it has the groups {', '.join(sorted(blocks))}, and the "
                f"window has {', '.join(sorted(groups))}"
            )
        ids = [
            np.asarray(blocks[name], np.int64) + first
            for name, first in zip(groups, opened.first, strict=False)
        ]
        drawn = [np.asarray(generations[name], np.uint64) for name in groups]
        counts = [one.size for one in ids]
        if counts != [one.size for one in drawn]:
            raise UsageError("ticket: it must have one generation for each block")
        return write_ticket(
            opened.serial, counts, np.concatenate(ids), np.concatenate(drawn)
        )

    def get(
        self,
        ticket: bytes,
        into: PagedCache | Memory,
        blocks: Blocks | None = None,
        *,
        positions: slice | Sequence[int] | None = None,
        deadline: Deadline = None,
    ) -> Request[Outcome]:
        """Read blocks that the owner has offered.

        The result is an :class:`~kvwire.Outcome`: ``landed``, and ``missing`` with the
        reasons: withdrawn, damaged, or gone. A missing block may have been overwritten
        in part.

        Args:
            ticket: The ticket that the owner's ``offer`` returned.
            into: A writable cache; or writable memory, for a window of plain bytes.
            blocks: As many block ids of ``into`` as the ticket's tokens need, in the
                ticket's order, or ``{group: ids}``. For plain bytes, None means block 0
                and the following blocks.
            positions: The blocks to read, as positions in the ticket; None for all.
                Only for tickets of one group.
            deadline: As for :meth:`Connection.send <kvwire.Connection.send>`; blocks
                that have not arrived by then are missing.

        Raises:
            UsageError: The ticket is malformed, the blocks do not fit it, or the cache
                cannot receive.
            ProfileMismatch: The caches do not fit together; the error names the fields.
            RequestCancelled: From the await, after ``cancel()``.

        Cancel safety:
            Cancelling the await does not stop the read. The blocks are in use until
            ``await request.released()`` returns. Once there is an outcome they are
            free, unless the deadline has passed.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check("RemoteWindow.get")
        at = None if deadline is None else absolute(deadline)
        named = read_ticket(ticket)
        if positions is not None:
            named = named.at(positions)
        cache = into if isinstance(into, PagedCache) else self._as_cache(into)
        if blocks is None:
            blocks = np.arange(len(named.entries))
        read = Reading(self._loop, named, cache, cache.block_lists(blocks), at)
        opened = self._opened
        outlived = opened.reader is not None and named.serial == opened.serial
        if opened.gone and not outlived:
            return self._without_connection(read)
        outcome = read.begin(self._opened, self._queue)
        if outcome is None:
            return self._request_for(read)
        # Its memory is free already. Made without an ``__init__``, for speed.
        request: Request[Outcome] = _new(Request)
        request._over = True
        request._value = outcome
        return request

    async def close(self) -> None:
        """Stop reading, and notify the owner.

        Blocks of running reads that have not arrived are missing, as ``gone``.

        Cancel safety: safe, it is closed either way.
        """
        self._thread.check("RemoteWindow.close")
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self._opened.close()

    # --- for its requests, as RequestOwner --------------------------------------------

    def _describe(self, request: Request[Any]) -> str:
        return f"get from window {self.name!r}"

    def _cancel(self, request: Request[Any]) -> None:
        read: Reading = request._what
        read.cancel()

    def _post(self, request: Request[Any]) -> Request[Any]:
        return request

    def _withdraw(self, request: Request[Any]) -> None:
        """Do nothing: only receives can be withdrawn."""

    def _when_released(self, request: Request[Any], call: Callable[[], None]) -> None:
        read: Reading = request._what
        again = partial(self._when_released, request, call)
        lent = read.lent
        if lent:
            buffers = self._opened.windows.driver.services.buffers
            buffers.on_drained(lent[-1], again)
        elif read.under_way is not None and not read.under_way.done():
            read.under_way.add_done_callback(lambda _: again())
        elif not read.over:
            # It has no buffer yet: it was not sent, or its blocks come in a shared
            # frame.
            request._watchers += (call,)
        elif not read.is_stuck:
            call()

    # --- inside -----------------------------------------------------------------------

    def _as_cache(self, memory: Memory) -> PagedCache:
        """Return plain memory as a cache with the owner's blocks."""
        groups = self._opened.geometry.groups
        if len(groups) != 1 or groups[0].spec.kind != "state":
            raise UsageError(
                f"into: window {self.name!r} exposes a cache; pass a PagedCache"
            )
        cache = as_cache("into", memory, groups[0].spec.head_dim)
        if not cache.writable:
            raise UsageError("into: this memory is read-only; pass writable memory")
        return cache

    def _request_for(self, read: Reading) -> Request[Outcome]:
        request: Request[Outcome] = Request(self, _READ, read, None, read.deadline)
        read.finish = request._complete
        return request

    def _without_connection(self, read: Reading) -> Request[Outcome]:
        """Reopen the window for a read, if this window can be reopened."""
        if self._closed or self._reopen is None:
            read.fail_rest(self._opened.gone)
            request = self._request_for(read)
            read.complete(read.outcome())
            return request
        request = self._request_for(read)
        self._waiting.append(read)
        if self._opening is None:
            self._opening = start_task(self._open_again())
        return request

    async def _open_again(self) -> None:
        assert self._reopen is not None
        reason = "gone: this side closed the window"
        try:
            self._opened = await self._reopen()
            self._queue = ReadQueue(self._opened)
            reason = ""
        except KVWireError as exc:
            reason = f"gone: {exc}"
        finally:
            self._opening = None
            waiting = self._waiting
            self._waiting = []
            for read in waiting:
                if reason:
                    read.fail_rest(reason)
                else:
                    self._begin(read)

    def _begin(self, read: Reading) -> None:
        """Begin a read that has waited; the outcome contains the caller's errors."""
        if read.over:
            return  # cancelled, or late: the caller owns the blocks again
        try:
            outcome = read.begin(self._opened, self._queue)
            if outcome is not None:
                read.complete(outcome)
        except KVWireError as exc:
            read.fail_rest(f"gone: {exc}")


def memory_here(window: RemoteWindow) -> npt.NDArray[np.uint8] | None:
    """Return the memory of a window of plain bytes, read-only, if it is mapped here.

    For kvwire's own code that keeps other generations inside the window.
    """
    reader = window._opened.reader
    return None if reader is None else reader.memory_here()
