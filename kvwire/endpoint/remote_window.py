"""Reads of a peer's window: of memory in place where a lane can, else by messages.

Whatever the way, a read is the same: blocks with the generations of a ticket go to
blocks of a cache of this side, and those whose generation has changed are missing.
Small reads in place are over when ``get`` returns. Larger ones are cut into turns, so
that the loop runs other tasks in between. Reads by messages that begin in one turn of
the loop go in one frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvwire.aio import LoopThread, absolute, start_task
from kvwire.backend.window import BlockRead, WindowReader
from kvwire.endpoint.request import Request
from kvwire.endpoint.window import as_cache
from kvwire.endpoint.window_link import OpenedWindow, ReaderView, unpacked
from kvwire.errors import (
    BackendUnavailable,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    ProtocolError,
    RequestCancelled,
    StaleRegion,
    UsageError,
)
from kvwire.kv.blocks import (
    Bits,
    BlockLists,
    Blocks,
    BlockSet,
    Ids,
    MissingOfGroup,
    missing_blocks,
)
from kvwire.kv.fragments import concatenated
from kvwire.kv.outcome import Outcome, Timings, nothing_landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.ticket import Ticket, read_ticket
from kvwire.limits import WINDOW_GET_BLOCKS_MAX, WINDOW_GET_BYTES_MAX
from kvwire.memory.buffers import Memory
from kvwire.proto.events import RequestDone
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestKind
from kvwire.types import BufferId, Deadline
from kvwire.wire.control import WindowGet, WindowGot

_READ: Final = RequestKind.READ
_new: Final = object.__new__
_WITHDRAWN: Final = "withdrawn: the owner reuses the block since it was offered"
_DAMAGED: Final = "damaged: bytes of it did not match their checksum"
_OTHER: Final = "withdrawn: the ticket is of another window, or of the owner before it"


class RemoteWindow:
    """A peer's window, open for reading; made by ``await connection.window(name)``.

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
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        # Reads of this turn of the loop, which go in one frame.
        self._queue: list[_Read] = []  # bounded: REQUESTS_MAX

    def __repr__(self) -> str:
        return f"<RemoteWindow {self.name!r}, {self.way}>"

    @property
    def way(self) -> str:
        """Return how blocks are read: "mapped", "process_vm_readv", "messages", ..."""
        opened = self._opened
        if opened.gone:
            return "closed" if self._closed else "not connected"
        return "messages" if opened.reader is None else opened.reader.way

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner's process or connection has ended."""
        return bool(self._opened.gone)

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
        reasons: withdrawn, damaged, or gone. A block that is missing may have been
        written to.

        Args:
            ticket: From the owner's ``offer``.
            into: A writable cache; or writable memory, for a window of plain bytes.
            blocks: As many block ids of ``into`` as the ticket's tokens need, in the
                ticket's order, or ``{group: ids}``; for plain bytes, None is block 0
                and those that follow.
            positions: The blocks to read, by their positions in the ticket; None for
                all. For tickets of one group.
            deadline: As for :meth:`Connection.send <kvwire.Connection.send>`; blocks
                that have not come by then are missing.

        Raises:
            UsageError: The ticket is malformed, the blocks do not fit it, or the cache
                cannot receive.
            ProfileMismatch: The caches do not fit together; it names the fields.
            RequestCancelled: From the await, after ``cancel()``.

        Cancel safety:
            Cancelling the await does not stop the read. The blocks are busy until
            ``await request.released()`` returns; once there is an outcome, they are
            free unless the deadline has passed.
        """
        if get_ident() != self._thread.ident:
            self._thread.check("RemoteWindow.get")
        at = None if deadline is None else absolute(deadline)
        named = read_ticket(ticket)
        if positions is not None:
            named = named.at(positions)
        cache = into if isinstance(into, PagedCache) else self._as_cache(into)
        if blocks is None:
            blocks = np.arange(len(named.entries))
        read = _Read(self, named, cache, cache.block_lists(blocks), at)
        opened = self._opened
        if opened.gone:
            return self._without_connection(read)
        return read.begin(opened)

    async def close(self) -> None:
        """End reading; the owner learns it. Reads under way end as ``gone``.

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
        read: _Read = request._what
        read.cancel()

    def _post(self, request: Request[Any]) -> Request[Any]:
        return request

    def _withdraw(self, request: Request[Any]) -> None:
        """Do nothing: only receives are withdrawn."""

    def _when_released(self, request: Request[Any], call: Callable[[], None]) -> None:
        read: _Read = request._what
        read.when_released(call)

    # --- inside -----------------------------------------------------------------------

    def _as_cache(self, memory: Memory) -> PagedCache:
        """Return plain memory as a cache with the owner's blocks."""
        groups = self._opened.geometry.groups
        if len(groups) != 1 or groups[0].spec.kind != "state":
            raise UsageError(
                f"into: window {self.name!r} has blocks of a cache; pass a PagedCache"
            )
        cache = as_cache("into", memory, groups[0].spec.head_dim)
        if not cache.writable:
            raise UsageError("into: read-only memory; nothing can land in it")
        return cache

    def _without_connection(self, read: _Read) -> Request[Outcome]:
        """Reopen the window for a read, if this window can be reopened."""
        if self._closed or self._reopen is None:
            read.fail_rest(self._opened.gone)
            return read.request()
        request = read.request()
        read.waits = True
        self._queue.append(read)
        if self._opening is None:
            self._opening = start_task(self._open_again())
        return request

    async def _open_again(self) -> None:
        assert self._reopen is not None
        reason = ""
        try:
            self._opened = await self._reopen()
        except KVWireError as exc:
            reason = f"gone: {exc}"
        except asyncio.CancelledError:
            reason = "gone: this side closed the window"
            raise
        finally:
            self._opening = None
            waiting = [read for read in self._queue if read.waits]
            self._queue = [read for read in self._queue if not read.waits]
            for read in waiting:
                read.waits = False
                if reason:
                    read.fail_rest(reason)
                    continue
                try:
                    read.begin(self._opened)
                except KVWireError as exc:
                    read.fail_rest(f"gone: {exc}")

    def _send_soon(self, read: _Read) -> None:
        """Ask for a read's blocks, with all others of this turn of the loop."""
        if not self._queue:
            self._loop.call_soon(self._send)
        self._queue.append(read)

    def _send(self) -> None:
        reads = [read for read in self._queue if not read.waits and not read.over]
        self._queue = [read for read in self._queue if read.waits]
        opened = self._opened
        if opened.gone:
            for read in reads:
                read.fail_rest(opened.gone)
            return
        together: dict[object, list[_Read]] = {}
        for read in reads:
            key = (read.view, read.deadline) if read.single else read
            together.setdefault(key, []).append(read)
        for group in together.values():
            _ask(opened, group)
        opened.link.driver.run()
        if any(read.deadline is not None for read in reads):
            opened.link.driver.set_timer()


class _Part(NamedTuple):
    """The blocks of one read among those of a request: their positions in the read."""

    read: _Read
    positions: Ids


class WindowAsk:
    """One request of a connection, for blocks of one read or of several.

    Attributes:
        parts: The reads, in the order of the request's blocks.
    """

    __slots__ = ("buffer", "opened", "parts", "record")

    def __init__(self, opened: OpenedWindow, parts: list[_Part]) -> None:
        self.opened = opened
        self.parts = parts
        self.record: RequestRecord | None = None
        self.buffer: BufferId | None = None

    def done(self, event: RequestDone) -> None:
        """Hand each read its blocks; ask again for those of a refused list."""
        record = event.request
        record.context = None
        answer = record.answer
        error = event.error
        total = sum(part.positions.size for part in self.parts)
        stale = np.zeros(total, np.bool_)
        if isinstance(answer, WindowGot):
            try:
                stale = unpacked(answer.stale, total)
            except ProtocolError as exc:
                self.opened.link.driver.core.fail(exc)
                error = exc
        begin = 0
        for part in self.parts:
            end = begin + part.positions.size
            part.read.asked.remove(self)
            part.read.answered(
                part.positions, stale[begin:end], record, error, answer
            )
            begin = end


class _Read:
    """One ``get``: what has landed, what was lost and why, and what is still to do.

    Attributes:
        waits: For a connection.
        over: It has an outcome.
    """

    def __init__(
        self,
        window: RemoteWindow,
        named: Ticket,
        cache: PagedCache,
        lists: BlockLists,
        deadline: float | None,
    ) -> None:
        self.window = window
        self.named = named
        self.cache = cache
        self.lists = lists
        self.deadline = deadline
        self.waits = False
        self.over = False
        self.single = len(named.counts) == 1
        self.asked: list[WindowAsk] = []
        self.view: ReaderView | None = None
        self._buffers: list[BufferId] = []
        self._begun_at = window._loop.time()
        self._request: Request[Outcome] | None = None
        # Of the ticket's blocks: landed; and the reason of others, 0 for none yet.
        self._landed: Bits | None = None
        self._codes: npt.NDArray[np.uint16] | None = None
        self._reasons: list[str] = []
        self._offsets: list[tuple[Ids, Ids]] = []

    def begin(self, opened: OpenedWindow) -> Request[Outcome]:
        """Read now what can be read in place; return the request."""
        named = self.named
        if named.serial != opened.serial:
            self.fail_rest(_OTHER)
            return self.request()
        view = self.view = opened.view(self.cache)
        self._check(opened, view)
        reader = opened.reader
        if reader is not None and view.host:
            return self._begin_in_place(opened, view, reader)
        request = self.request()
        self.window._send_soon(self)
        return request

    def _check(self, opened: OpenedWindow, view: ReaderView) -> None:
        """Refuse a ticket whose blocks are not the window's, or do not fit the list.

        Raises:
            UsageError: They do not.
        """
        named = self.named
        if len(named.counts) != len(view.places):
            raise UsageError(
                f"ticket: of {len(named.counts)} groups; the window has "
                f"{len(view.places)}"
            )
        begin = 0
        for index, (count, place, ids) in enumerate(
            zip(named.counts, view.places, self.lists.values(), strict=True)
        ):
            entries = named.entries[begin : begin + count]
            begin += count
            granules = count * view.per_owner[index]
            if ids.size != -(-granules // place.per_block):
                raise UsageError(
                    f"blocks: {ids.size} for a ticket of {count} blocks in group "
                    f"{place.walk.group!r}, which fill "
                    f"{-(-granules // place.per_block)} here"
                )
            if not count:
                continue
            first = opened.first[index]
            if (
                int(np.minimum.reduce(entries)) < first
                or int(np.maximum.reduce(entries)) >= opened.first[index + 1]
            ):
                raise UsageError(
                    f"ticket: names a block beyond the "
                    f"{opened.first[index + 1] - first} of group {place.walk.group!r}"
                )

    def request(self) -> Request[Outcome]:
        """Return the request that users hold."""
        if self._request is None:
            self._request = Request(self.window, _READ, self, None, self.deadline)  # type: ignore[arg-type]
            if self.over:
                self._request._complete(self._outcome(), None)
        return self._request

    # --- in place ---------------------------------------------------------------------

    def _begin_in_place(
        self, opened: OpenedWindow, view: ReaderView, reader: WindowReader
    ) -> Request[Outcome]:
        """Read one group at once if it is small; else in turns."""
        named = self.named
        nbytes = sum(
            count * size
            for count, size in zip(named.counts, view.block_bytes, strict=True)
        )
        if self.single and reader.immediate and nbytes <= reader.turn_bytes:
            batch = self._batch(opened, view, 0, slice(None))
            try:
                landed = reader.read(batch)
            except ConnectionLost:
                opened.drop_reader()
                return self.begin(opened)
            assert isinstance(landed, np.ndarray)
            request: Request[Outcome] = _new(Request)
            request._over = True
            if landed.all():
                request._value = self._whole(view, nbytes)
            else:
                self._note(np.arange(landed.size), landed, _WITHDRAWN)
                request._value = self._outcome()
            self.over = True
            return request
        request = self.request()
        start_task(self._in_turns(opened, view, reader))
        return request

    def _batch(
        self, opened: OpenedWindow, view: ReaderView, index: int, part: slice
    ) -> BlockRead:
        """Return the read of some of a group's blocks, by their positions in it."""
        theirs, pieces_from, pieces_to, run = view.pieces(opened)[index]
        named = self.named
        place = view.places[index]
        begin = sum(named.counts[:index])
        entries = named.entries[begin : begin + named.counts[index]]
        generations = named.generations[begin : begin + named.counts[index]]
        ids = list(self.lists.values())[index]
        granules = view.per_owner[index]
        first, last, _ = part.indices(entries.size)
        offsets_from = theirs.offsets(entries[part] - opened.first[index])
        offsets_to = place.offsets(ids)
        if first or last < entries.size or offsets_to.size != offsets_from.size:
            offsets_to = offsets_to[first * granules : last * granules]
        return BlockRead(
            pieces_from,
            pieces_to,
            run,
            offsets_from.view(np.uint64),
            offsets_to.view(np.uint64),
            entries[part].view(np.uint64),
            generations[part],
            granules,
            view.owners,
        )

    async def _in_turns(
        self, opened: OpenedWindow, view: ReaderView, reader: WindowReader
    ) -> None:
        """Read in batches that keep the loop for a short time; then complete.

        Cancel safety: it is cancelled with its loop only.
        """
        begin = 0
        try:
            await reader.ready()
            for index, count in enumerate(self.named.counts):
                step = max(1, reader.turn_bytes // view.block_bytes[index])
                for first in range(0, count, step):
                    if self.over or self._is_late():
                        return
                    part = slice(first, min(count, first + step))
                    found = reader.read(self._batch(opened, view, index, part))
                    if isinstance(found, np.ndarray):
                        await asyncio.sleep(0)
                    else:
                        found = await asyncio.shield(found)
                    at = np.arange(begin + part.start, begin + part.stop)
                    self._note(at, found, _WITHDRAWN)
                begin += count
        except (ConnectionLost, BackendUnavailable) as exc:
            if opened.reader is reader:
                opened.drop_reader()
            if opened.gone:
                self.fail_rest(f"gone: {exc}")
            elif not self.over:
                self.window._send_soon(self)
            return
        self._end_if_done()

    def _is_late(self) -> bool:
        """End the read if its deadline has passed."""
        late = self.deadline is not None and self.window._loop.time() > self.deadline
        if late:
            self.fail_rest("the deadline passed")
        return late

    # --- by messages ------------------------------------------------------------------

    def todo(self) -> Ids:
        """Return the positions of the blocks that have neither landed nor failed."""
        if self._landed is None or self._codes is None:
            return np.arange(self.named.entries.size)
        return np.flatnonzero(~self._landed & (self._codes == 0))

    def offsets(self, view: ReaderView, index: int) -> Ids:
        """Return where each granule of a group's ticket blocks lands."""
        place = view.places[index]
        granules = self.named.counts[index] * view.per_owner[index]
        return place.offsets(list(self.lists.values())[index])[:granules]

    def answered(
        self,
        positions: Ids,
        stale: Bits,
        record: RequestRecord,
        error: KVWireError | None,
        answer: object,
    ) -> None:
        """Note what a request has brought of this read, and go on with the rest."""
        if self.over:
            return
        if error is not None:
            reason = f"gone: {error}"
            if isinstance(error, StaleRegion):
                reason = f"withdrawn: {error}"
            elif not isinstance(error, ConnectionClosed):
                reason = str(error)
            self._note(positions, np.zeros(positions.size, np.bool_), reason)
        elif isinstance(answer, WindowGot) and not answer.sent:
            # The stale ones are known now; the others are asked for again.
            self._note(positions[stale], np.zeros(int(stale.sum()), np.bool_), _WITHDRAWN)
            if not stale.any():
                self._note(positions, stale, "gone: the owner sent nothing")
            elif self.todo().size and not self.asked:
                self.window._send_soon(self)
        else:
            self._note(positions[stale], np.zeros(int(stale.sum()), np.bool_), _WITHDRAWN)
            rest = positions[~stale]
            whole = np.full(rest.size, not record.damaged)
            self._note(rest, whole, _DAMAGED)
        self._end_if_done()

    def lend(self, buffer: BufferId) -> None:
        """Count a buffer that lands in this read's blocks."""
        self._buffers.append(buffer)

    # --- results ----------------------------------------------------------------------

    def _note(self, positions: Ids, landed: Bits, otherwise: str) -> None:
        """Record which blocks have landed, and why the others have not."""
        if self._landed is None or self._codes is None:
            self._landed = np.zeros(self.named.entries.size, np.bool_)
            self._codes = np.zeros(self.named.entries.size, np.uint16)
        self._landed[positions] = landed
        if not landed.all():
            if otherwise not in self._reasons:
                self._reasons.append(otherwise)
            lost = positions[~landed]
            self._codes[lost] = 1 + self._reasons.index(otherwise)

    def fail_rest(self, reason: str) -> None:
        """End the read: what has not landed is missing for this reason."""
        if self.over:
            return
        rest = self.todo()
        self._note(rest, np.zeros(rest.size, np.bool_), reason)
        self._end()

    def cancel(self) -> None:
        """End the read with RequestCancelled; its memory may be busy for a while."""
        self.over = True
        for ask in list(self.asked):
            if len(ask.parts) == 1 and ask.record is not None:
                ask.opened.link.driver.core.cancel(ask.record)
                ask.opened.link.driver.run()
        if self._request is not None and not self._request._over:
            self._request._complete(
                None, RequestCancelled("the get was cancelled on this side")
            )

    def when_released(self, call: Callable[[], None]) -> None:
        """Call once nothing touches the blocks any more."""
        opened = self.window._opened
        if not self._buffers:
            call()
            return
        buffers = opened.link.driver.services.buffers
        left = buffers.undrained(self._buffers)
        if not left:
            call()
            return
        buffers.on_drained(left[-1], partial(self.when_released, call))

    def _end_if_done(self) -> None:
        if not self.over and not self.asked and not self.todo().size:
            self._end()

    def _end(self) -> None:
        self.over = True
        if self._request is not None:
            self._request._complete(self._outcome(), None)

    def _whole(self, view: ReaderView, nbytes: int) -> Outcome:
        """Return the outcome of a read of one group that has landed completely."""
        lists = self.lists
        place = view.places[0]
        (ids,) = lists.values()
        tokens = self.named.counts[0] * view.per_owner[0] * place.walk.granule_tokens
        return Outcome(
            complete=True,
            landed=BlockSet(lists),
            missing=view.nothing_missing,
            usable_prefix=ids.size,
            usable_tokens=tokens,
            lists=lists,
            tokens={place.walk.group: tokens},
            timings=Timings(wire_s=self.window._loop.time() - self._begun_at),
            nbytes=nbytes,
        )

    def _outcome(self) -> Outcome:
        view = self.view
        landed = self._landed
        codes = self._codes
        assert landed is not None
        assert codes is not None
        if view is None:
            return self._outcome_without_view()
        here: dict[str, Ids] = {}
        missing: dict[str, MissingOfGroup] = {}
        tokens: dict[str, int] = {}
        usable: list[tuple[int, int, int]] = []
        nbytes = 0
        begin = 0
        for index, (count, place) in enumerate(
            zip(self.named.counts, view.places, strict=True)
        ):
            part = slice(begin, begin + count)
            begin += count
            name = place.walk.group
            ids = self.lists[name]
            granules = view.per_owner[index]
            lost = np.repeat(codes[part], granules)
            starts = np.arange(0, lost.size, place.per_block)
            of_block = (
                np.maximum.reduceat(lost, starts) if lost.size else np.zeros(0, np.uint16)
            )
            good = of_block == 0
            here[name] = ids[good]
            bad = ~good
            layers = place.walk.layers
            missing[name] = MissingOfGroup(
                ids[bad],
                of_block[bad] - np.uint16(1),
                layers,
                np.ones((len(layers), int(bad.sum())), np.bool_),
            )
            tokens[name] = count * granules * place.walk.granule_tokens
            prefix = int(good.size if good.all() else good.argmin())
            per_block = place.per_block * place.walk.granule_tokens
            usable.append((min(prefix * per_block, tokens[name]), prefix, tokens[name]))
            nbytes += int(landed[part].sum()) * view.block_bytes[index]
        # Of the group that lists the most tokens, what every group can use.
        least = min(usable)
        longest = max(usable, key=lambda one: one[2])
        complete = bool(landed.all())
        place = view.places[usable.index(longest)]
        per_block = place.per_block * place.walk.granule_tokens
        return Outcome(
            complete=complete,
            landed=BlockSet(here),
            missing=missing_blocks(missing, self._reasons),
            usable_prefix=longest[1] if complete else least[0] // per_block,
            usable_tokens=longest[2] if complete else least[0],
            lists=self.lists,
            tokens=tokens,
            timings=Timings(wire_s=self.window._loop.time() - self._begun_at),
            nbytes=nbytes,
        )

    def _outcome_without_view(self) -> Outcome:
        return nothing_landed(self.cache, self.lists, self._reasons[0])


def _ask(opened: OpenedWindow, reads: list[_Read]) -> None:
    """Ask for the blocks of reads that land in one view, in requests of bounded size."""
    view = reads[0].view
    assert view is not None
    try:
        number = opened.number_of(view)
    except UsageError as exc:
        for read in reads:
            read.fail_rest(str(exc))
        return
    blocks: list[tuple[_Read, int, Ids]] = []
    for read in reads:
        todo = read.todo()
        begin = 0
        for index, count in enumerate(read.named.counts):
            of_group = todo[(todo >= begin) & (todo < begin + count)]
            begin += count
            if of_group.size:
                blocks.append((read, index, of_group))
    _ask_of(opened, view, number, blocks)


def _ask_of(
    opened: OpenedWindow,
    view: ReaderView,
    number: int,
    blocks: list[tuple[_Read, int, Ids]],
) -> None:
    """Send one request after the other, each for as many blocks as it may have."""
    groups = len(view.places)
    while blocks:
        room_blocks = WINDOW_GET_BLOCKS_MAX
        room_bytes = WINDOW_GET_BYTES_MAX
        parts: list[_Part] = []
        chosen: list[tuple[_Read, int, Ids]] = []
        # One request is in the order of groups; so it takes runs of rising groups.
        while blocks and (not chosen or blocks[0][1] >= chosen[-1][1]):
            read, index, positions = blocks[0]
            size = view.block_bytes[index]
            take = min(positions.size, room_blocks, room_bytes // size)
            if not take and not chosen:
                take = 1
            if not take:
                break
            chosen.append((read, index, positions[:take]))
            parts.append(_Part(read, positions[:take]))
            room_blocks -= take
            room_bytes -= take * size
            if take < positions.size:
                blocks[0] = (read, index, positions[take:])
                break
            blocks.pop(0)
        counts = [0] * groups
        fragments = []
        for index in range(groups):
            here = [(read, at) for read, of, at in chosen if of == index]
            if not here:
                continue
            granules = view.per_owner[index]
            landing = []
            for read, at in here:
                begin = sum(read.named.counts[:index])
                offsets = read.offsets(view, index)
                if granules == 1:
                    landing.append(offsets[at - begin])
                else:
                    rows = offsets.reshape(-1, granules)
                    landing.append(rows[at - begin].ravel())
                counts[index] += at.size
            together = landing[0] if len(landing) == 1 else np.concatenate(landing)
            fragments.append(view.places[index].fragments(together))
        entries = np.concatenate([r.named.entries[at] for r, _, at in chosen])
        generations = np.concatenate([r.named.generations[at] for r, _, at in chosen])
        memory = fragments[0] if len(fragments) == 1 else concatenated(fragments)
        body = WindowGet(
            opened.number,
            number,
            memory.nbytes,
            tuple(counts),
            entries.astype("<u4").tobytes(),
            generations.tobytes(),
        )
        driver = opened.link.driver
        ask = WindowAsk(opened, parts)
        buffers = driver.services.buffers
        buffer = buffers.lend(memory)
        try:
            record = driver.core.read_window(buffer, body, parts[0].read.deadline)
        except KVWireError as exc:
            buffers.take_back(buffer)
            for part in parts:
                part.read.fail_rest(f"gone: {exc}")
            return
        record.context = ask
        ask.record = record
        for part in parts:
            part.read.asked.append(ask)
            part.read.lend(buffer)
