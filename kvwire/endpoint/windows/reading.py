"""One get from a window: in place if a lane supports it, otherwise by messages.

Either way gives the same result: blocks that still have the generations of the ticket
are copied to blocks of a local cache, and the others are missing. A small read in place
completes within the call. A larger one is divided into turns, so that the loop can run
other tasks in between.

By messages, gets in the same loop turn share a request, which contains the blocks of
one or several reads in the order of groups; its size is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from kvwire.aio import start_task
from kvwire.backend.window import BlockRead, WindowReader
from kvwire.endpoint.windows.fields import unpacked
from kvwire.endpoint.windows.map import move_granules
from kvwire.endpoint.windows.opened import OpenedWindow
from kvwire.endpoint.windows.ticket import Ticket
from kvwire.endpoint.windows.view import BlockResults, WindowView
from kvwire.errors import (
    BackendUnavailable,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    ProtocolError,
    RequestCancelled,
    StaleRegion,
    UsageError,
    error_text,
)
from kvwire.kv.blocks import Bits, BlockLists, Ids
from kvwire.kv.fragments import Fragments, concatenated
from kvwire.kv.outcome import Outcome, nothing_landed
from kvwire.kv.paged import PagedCache
from kvwire.limits import (
    KIB,
    KV_PIECES_MAX,
    WINDOW_DATA_ASKED_MAX,
    WINDOW_GET_BLOCKS_MAX,
    WINDOW_GET_BYTES_MAX,
)
from kvwire.memory.device.device_copies import DeviceFailed
from kvwire.proto.events import RequestDone
from kvwire.proto.records import RequestRecord
from kvwire.types import BufferId
from kvwire.wire.control import WindowGet, WindowGot

logger: logging.Logger = logging.getLogger("kvwire.windows")

_U4: Final = np.dtype("<u4")
# The overhead of a read, as the bytes that could be copied in that time.
_READ_BYTES: Final = 256 * KIB
_WITHDRAWN: Final = "withdrawn: the owner has taken the block back since it was offered"
_DAMAGED: Final = "damaged: its bytes did not match their checksum"
_OTHER: Final = (
    "withdrawn: the ticket belongs to another window, or to an earlier start of the "
    "owner"
)


class Part(NamedTuple):
    """A read's requested blocks in one group, as positions in its ticket.

    Attributes:
        first: The position of the group's first block.
    """

    read: Reading
    group: int
    first: int
    positions: Ids

    def offsets(self, view: WindowView) -> Ids:
        """Return the destination of each granule."""
        read = self.read
        place = view.places[self.group]
        granules = view.per_owner[self.group]
        count = read.named.counts[self.group]
        ids = list(read.lists.values())[self.group]
        offsets = place.offsets(ids)[: count * granules]
        if self.positions.size == count:
            return offsets
        return offsets.reshape(-1, granules)[self.positions - self.first].ravel()


class Reading:
    """One ``get``: its landed, lost and remaining blocks.

    Attributes:
        named: The ticket that the caller passed.
        deadline: An instant of the loop's clock.
        over: Whether it has an outcome.
        single: Whether its ticket covers one group, so that it may share a frame with
            other reads.
        asked: Its open requests to the owner.
        buffers: The buffers that land in its blocks.
        under_way: The part that it is reading in place, if the lane works
            asynchronously.
        view: The map from the window's blocks to the local blocks, once it has begun.
        finish: Called once with the outcome, or with the error of a cancelled read.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        named: Ticket,
        cache: PagedCache,
        lists: BlockLists,
        deadline: float | None,
    ) -> None:
        self._loop = loop
        self.named = named
        self.cache = cache
        self.lists = lists
        self.deadline = deadline
        self.over = False
        self._opened: OpenedWindow
        self._queue: ReadQueue
        self.single = len(named.counts) == 1
        self.asked: list[WindowAsk] = []
        self.view: WindowView | None = None
        self.buffers: list[BufferId] = []
        self.under_way: asyncio.Future[Bits] | None = None
        self._begun_at = self._loop.time()
        self.finish: Callable[[Outcome | None, KVWireError | None], None] | None = None
        self._results: BlockResults | None = None

    def begin(self, opened: OpenedWindow, queue: ReadQueue) -> Outcome | None:
        """Read blocks in place where possible, and request the others.

        Args:
            opened: The window.
            queue: Requests from the owner the blocks that could not be read in place.

        Returns:
            The outcome, if the read is over already; otherwise ``finish`` gets it.

        Raises:
            ProfileMismatch: The caches do not fit together.
            UsageError: The ticket does not fit the window or the blocks.
        """
        self._opened = opened
        self._queue = queue
        named = self.named
        if named.serial != opened.serial:
            self.fail_rest(_OTHER)
            return self.outcome()
        view = self.view = opened.view(self.cache)
        view.check(named, self.lists, opened.first)
        reader = opened.reader
        if reader is not None and reader.memory_kind is view.memory_kind:
            return self._begin_in_place(opened, view, reader)
        queue.add(self)
        return None

    def complete(
        self, outcome: Outcome | None, error: KVWireError | None = None
    ) -> None:
        """Report the end, unless it was reported already."""
        finish = self.finish
        # Break the reference cycle, or only the garbage collector would free both.
        self.finish = None
        if finish is not None:
            finish(outcome, error)

    # --- in place ---------------------------------------------------------------------

    def _begin_in_place(
        self, opened: OpenedWindow, view: WindowView, reader: WindowReader
    ) -> Outcome | None:
        """Read a small group at once, and a large one in batches."""
        nbytes = self.named.counts[0] * view.block_bytes[0]
        if self.single and reader.immediate and nbytes <= reader.turn_bytes:
            if opened.turn.spend(nbytes + _READ_BYTES):
                return self._at_once(opened, view, reader)
            opened.turn.later(nbytes + _READ_BYTES, partial(self._in_turn, reader))
            return None
        start_task(self._in_turns(opened, view, reader))
        return None

    def _at_once(
        self, opened: OpenedWindow, view: WindowView, reader: WindowReader
    ) -> Outcome | None:
        """Read all blocks now; by messages if the lane is lost."""
        try:
            landed = reader.read(self._batch(opened, view, 0, slice(None)))
        except ConnectionLost:
            opened.drop_reader()
            return self.begin(opened, self._queue)
        assert isinstance(landed, np.ndarray)
        if landed.all():
            wire_s = self._loop.time() - self._begun_at
            nbytes = landed.size * view.block_bytes[0]
            outcome = view.whole(self.named, self.lists, nbytes, wire_s)
        else:
            self._known().note(np.arange(landed.size), landed, _WITHDRAWN)
            outcome = self.outcome()
        self.over = True
        return outcome

    def _in_turn(self, reader: WindowReader) -> None:
        """Read in the turn that has room, unless the read has ended meanwhile."""
        opened = self._opened
        if self.over:
            return
        if self.deadline is not None and self._loop.time() >= self.deadline:
            self.fail_rest("the deadline passed")
            return
        try:
            view = self.view
            if reader is opened.reader and view is not None:
                outcome = self._at_once(opened, view, reader)
            else:
                outcome = self.begin(opened, self._queue)
        except KVWireError as exc:
            opened.lost(reader, exc)
            self.fail_rest(f"gone: {exc}")
        except Exception as exc:  # noqa: BLE001 - no caller is left to get it
            self._broken(exc)
        else:
            if outcome is not None:
                self.complete(outcome)

    def _broken(self, error: Exception) -> None:
        """End a read that memory is lacking for, or that a bug has stopped."""
        logger.error("a read from a window failed", exc_info=error)
        self.fail_rest(error_text(error))

    def _batch(
        self, opened: OpenedWindow, view: WindowView, index: int, part: slice
    ) -> BlockRead:
        """Return a batch that reads some of a group's blocks, given by position."""
        assert opened.memory is not None
        _, owner = opened.memory
        theirs, pieces_from, pieces_to, run = view.pieces(owner)[index]
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
            view.device,
        )

    async def _in_turns(
        self, opened: OpenedWindow, view: WindowView, reader: WindowReader
    ) -> None:
        """Read in batches that block the loop only briefly; then complete.

        Cancel safety: it is only cancelled together with its loop.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._take_turns(opened, view, reader)
        except TimeoutError:
            self.fail_rest("the deadline passed")
        except DeviceFailed as exc:
            # The lane may still write to the blocks, so nothing else may land in them.
            opened.lost(reader, exc)
            self.fail_rest(str(exc))
        except KVWireError as exc:
            opened.lost(reader, exc)
            if opened.gone:
                self.fail_rest(f"gone: {exc}")
            elif not self.over:
                self._queue.add(self)
        except Exception as exc:  # noqa: BLE001 - no caller is left to get it
            self._broken(exc)
        else:
            self._end_if_done()

    async def _take_turns(
        self, opened: OpenedWindow, view: WindowView, reader: WindowReader
    ) -> None:
        begin = 0
        for index, count in enumerate(self.named.counts):
            step = min(
                reader.turn_bytes // view.block_bytes[index],
                KV_PIECES_MAX // view.block_pieces[index],
            )
            for first in range(0, count, max(1, step)):
                part = slice(first, min(count, first + max(1, step)))
                if reader.immediate:
                    here = (part.stop - part.start) * view.block_bytes[index]
                    await opened.turn.room(here + _READ_BYTES)
                if self.over:
                    return
                found = reader.read(self._batch(opened, view, index, part))
                at = np.arange(begin + part.start, begin + part.stop)
                if isinstance(found, np.ndarray):
                    self._known().note(at, found, _WITHDRAWN)
                    if not reader.immediate:
                        await asyncio.sleep(0)
                else:
                    self.under_way = found
                    opened.read_begun(found)
                    self._known().note(at, await asyncio.shield(found), _WITHDRAWN)
            begin += count

    # --- by messages ------------------------------------------------------------------

    def landed(self, ask: WindowAsk, part: Part, line: int) -> int:
        """Copy contiguous received blocks to their places; return the number of bytes.

        The owner compared their generations after it had copied them.
        """
        view = self.view
        assert view is not None
        nbytes = part.positions.size * view.block_bytes[part.group]
        self.asked.remove(ask)
        if self.over:
            return nbytes
        place = view.places[part.group]
        move_granules(place, part.offsets(view), line, gather=False)
        if self.single and part.positions.size == self.named.entries.size:
            wire_s = self._loop.time() - self._begun_at
            self._end(view.whole(self.named, self.lists, nbytes, wire_s))
        else:
            self._known().note(
                part.positions, np.ones(part.positions.size, np.bool_), ""
            )
            self._end_if_done()
        return nbytes

    def todo(self) -> Ids:
        """Return the positions of blocks that have neither landed nor failed."""
        if self._results is None:
            return np.arange(self.named.entries.size)
        return self._results.todo()

    def answered(
        self,
        positions: Ids,
        stale: Bits,
        record: RequestRecord,
        error: KVWireError | None,
        answer: object,
    ) -> None:
        """Record a request's result for this read, and continue with the rest."""
        if self.over:
            return
        if error is not None:
            reason = f"gone: {error}"
            if isinstance(error, StaleRegion):
                reason = f"withdrawn: {error}"
            elif not isinstance(error, ConnectionClosed):
                reason = str(error)
            self._known().lose(positions, reason)
        else:
            self._known().lose(positions[stale], _WITHDRAWN)
            # A block that its owner overwrites meanwhile damages the chunks that it
            # shares with others.
            shared = record.damaged and stale.any()
            if not shared and (not isinstance(answer, WindowGot) or answer.sent):
                rest = positions[~stale]
                whole = np.full(rest.size, not record.damaged)
                self._known().note(rest, whole, _DAMAGED)
            elif self.todo().size and not self.asked:
                # The stale blocks are known now; the others are requested again.
                self._queue.add(self)
        self._end_if_done()

    # --- results ----------------------------------------------------------------------

    def _known(self) -> BlockResults:
        """Return each block's result."""
        if self._results is None:
            self._results = BlockResults(self.named.entries.size)
        return self._results

    def fail_rest(self, reason: str) -> None:
        """End the read; the remaining blocks are missing for this reason."""
        if self.over:
            return
        self._known().lose(self.todo(), reason)
        self._end()

    @property
    def is_stuck(self) -> bool:
        """Return whether a failed device may write to the blocks for ever."""
        read = self.under_way
        return (
            read is not None
            and read.done()
            and not read.cancelled()
            and isinstance(read.exception(), DeviceFailed)
        )

    @property
    def lent(self) -> list[BufferId]:
        """Return the buffers that a transport may still write to."""
        if not self.buffers:
            return []
        table = self._opened.windows.driver.services.buffers
        return table.undrained(self.buffers)

    def cancel(self) -> None:
        """End the read with RequestCancelled; its memory may still be in use."""
        self.over = True
        for ask in list(self.asked):
            ask.cancel()
        error = RequestCancelled("the get was cancelled on this side")
        self.complete(None, error)

    def _end_if_done(self) -> None:
        if not self.over and not self.asked and not self.todo().size:
            self._end()

    def _end(self, outcome: Outcome | None = None) -> None:
        self.over = True
        if self.finish is not None:
            self.complete(outcome or self.outcome())

    def outcome(self) -> Outcome:
        """Return the blocks that have landed, and a reason for each other one."""
        results = self._known()
        if self.view is None:
            return nothing_landed(self.cache, self.lists, results.reasons[0])
        wire_s = self._loop.time() - self._begun_at
        return self.view.outcome(self.named, self.lists, results, wire_s)


# --- requests to the owner ------------------------------------------------------------


class ReadQueue:
    """Collects one window's reads by messages.

    Attributes:
        opened: The window, open on one connection.
    """

    def __init__(self, opened: OpenedWindow) -> None:
        self.opened: OpenedWindow = opened
        self._loop = opened.windows.driver.services.loop
        self._reads: list[Reading] = []  # bounded: REQUESTS_MAX, one turn of the loop

    def add(self, read: Reading) -> None:
        """Request a read's blocks, together with the others of this loop turn."""
        if not self._reads:
            self._loop.call_soon(self._send)
        self._reads.append(read)

    def _send(self) -> None:
        reads = [read for read in self._reads if not read.over]
        self._reads = []
        opened = self.opened
        if opened.gone:
            for read in reads:
                read.fail_rest(opened.gone)
            return
        together: dict[object, list[Reading]] = {}
        for read in reads:
            key = (read.view, read.deadline) if read.single else read
            together.setdefault(key, []).append(read)
        for group in together.values():
            _ask(opened, group)
        opened.windows.driver.run()
        if any(read.deadline is not None for read in reads):
            opened.windows.driver.set_timer()


class WindowAsk:
    """A connection's request for blocks of one or several reads.

    Attributes:
        parts: The reads, in the order of the request's blocks.
        together: The number of bytes if they come in one frame; 0 if they come as
            chunks.
    """

    __slots__ = ("opened", "parts", "record", "together")

    def __init__(self, opened: OpenedWindow, parts: list[Part], together: int) -> None:
        self.opened = opened
        self.parts = parts
        self.record: RequestRecord | None = None
        self.together = together

    def done(self, event: RequestDone) -> None:
        """Pass received blocks to their reads; request a refused list again."""
        record = event.request
        record.context = None
        answer = record.answer
        error = event.error
        self.opened.windows.asked_bytes -= self.together
        if isinstance(answer, memoryview) and not record.damaged:
            line: int = np.frombuffer(answer, np.uint8).__array_interface__["data"][0]
            for part in self.parts:
                line += part.read.landed(self, part, line)
            return
        total = sum(part.positions.size for part in self.parts)
        stale = np.zeros(total, np.bool_)
        if isinstance(answer, WindowGot):
            try:
                stale = unpacked(answer.stale, total)
                if not (answer.sent or stale.any()):
                    raise ProtocolError(
                        "KVW-WN-03", "WINDOW_GOT has neither bytes nor a reason"
                    )
            except ProtocolError as exc:
                self.opened.windows.driver.core.fail(exc)
                error = exc
        begin = 0
        for part in self.parts:
            end = begin + part.positions.size
            part.read.asked.remove(self)
            part.read.answered(part.positions, stale[begin:end], record, error, answer)
            begin = end

    def cancel(self) -> None:
        """Cancel it, unless it also fetches blocks for another read."""
        if len(self.parts) == 1 and self.record is not None:
            self.opened.windows.driver.core.cancel(self.record)
            self.opened.windows.driver.run()


def _ask(opened: OpenedWindow, reads: list[Reading]) -> None:
    """Request the blocks of one view's reads, in requests of bounded size."""
    view = reads[0].view
    assert view is not None
    try:
        if view.device is not None:
            opened.windows.driver.staging.open(view.device)
        number = opened.number_of(view)
    except (UsageError, BackendUnavailable) as exc:
        for read in reads:
            read.fail_rest(str(exc))
        return
    wanted: list[Part] = []
    for read in reads:
        todo = read.todo()
        if read.single:
            wanted.append(Part(read, 0, 0, todo))
            continue
        begin = 0
        for index, count in enumerate(read.named.counts):
            of_group = todo[(todo >= begin) & (todo < begin + count)]
            if of_group.size:
                wanted.append(Part(read, index, begin, of_group))
            begin += count
    while wanted:
        _post(opened, view, number, _taken(view, wanted))


def _taken(view: WindowView, wanted: list[Part]) -> list[Part]:
    """Remove one request's blocks from the list, in the order of groups."""
    room_blocks = WINDOW_GET_BLOCKS_MAX
    room_bytes = WINDOW_GET_BYTES_MAX
    room_pieces = KV_PIECES_MAX
    taken: list[Part] = []
    while wanted and (not taken or wanted[0].group >= taken[-1].group):
        one = wanted[0]
        size = view.block_bytes[one.group]
        cut = view.block_pieces[one.group]
        room = min(room_blocks, room_bytes // size, room_pieces // cut)
        count = min(one.positions.size, room)
        if not count and taken:
            break
        count = max(count, 1)
        room_blocks -= count
        room_bytes -= count * size
        room_pieces -= count * cut
        if count < one.positions.size:
            taken.append(one._replace(positions=one.positions[:count]))
            wanted[0] = one._replace(positions=one.positions[count:])
            break
        taken.append(wanted.pop(0))
    return taken


def _landing(view: WindowView, taken: list[Part]) -> Fragments:
    """Return the memory in which blocks land, in the order of their bytes."""
    offsets: dict[int, list[Ids]] = {}
    for part in taken:
        offsets.setdefault(part.group, []).append(part.offsets(view))
    parts = [
        view.places[group].fragments(
            view.places[group].walk.layers,
            of_group[0] if len(of_group) == 1 else np.concatenate(of_group),
        )
        for group, of_group in offsets.items()
    ]
    return parts[0] if len(parts) == 1 else concatenated(parts)


def _post(
    opened: OpenedWindow, view: WindowView, number: int, taken: list[Part]
) -> None:
    """Request blocks from the owner, in one frame."""
    counts = [0] * len(view.places)
    nbytes = 0
    entries = generations = b""
    for one in taken:
        size = one.positions.size
        counts[one.group] += size
        nbytes += size * view.block_bytes[one.group]
        named = one.read.named
        if size == named.entries.size:
            entries += named.entries.astype(_U4).tobytes()
            generations += named.generations.tobytes()
        else:
            entries += named.entries[one.positions].astype(_U4).tobytes()
            generations += named.generations[one.positions].tobytes()
    windows = opened.windows
    driver = windows.driver
    together = (
        nbytes <= opened.together
        and view.device is None
        and windows.asked_bytes + nbytes <= WINDOW_DATA_ASKED_MAX
    )
    body = WindowGet(
        opened.number, number, nbytes, tuple(counts), entries, generations, together
    )
    ask = WindowAsk(opened, taken, nbytes if together else 0)
    buffers = driver.services.buffers
    buffer = None if together else buffers.lend(_landing(view, taken))
    try:
        record = driver.core.read_window(buffer, body, taken[0].read.deadline)
    except KVWireError as exc:
        if buffer is not None:
            buffers.take_back(buffer)
        for one in taken:
            one.read.fail_rest(f"gone: {exc}")
        return
    record.context = ask
    ask.record = record
    windows.asked_bytes += ask.together
    for one in taken:
        one.read.asked.append(ask)
        if buffer is not None:
            one.read.buffers.append(buffer)
