"""One get from a window: in place where a lane can, else by messages.

Whatever the way, a read is the same: blocks with the generations of a ticket go to
blocks of a cache of this side, and those whose generation has changed are missing.
Small reads in place are over when they have begun. Larger ones are cut into turns, so
that the loop runs other tasks in between. Reads by messages that begin in one turn of
the loop go in one frame.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvwire.aio import start_task
from kvwire.backend.window import BlockRead, WindowReader
from kvwire.endpoint.request import Request, RequestOwner
from kvwire.endpoint.window_data import move_granules
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
    BlockSet,
    Ids,
    MissingOfGroup,
    missing_blocks,
)
from kvwire.kv.fragments import Fragments, concatenated
from kvwire.kv.outcome import Outcome, Timings, nothing_landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.ticket import Ticket
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
from kvwire.proto.state import RequestKind
from kvwire.types import BufferId
from kvwire.wire.control import WindowGet, WindowGot

_READ: Final = RequestKind.READ
_U4: Final = np.dtype("<u4")
_new: Final = object.__new__
# So many bytes are copied in the time that a read takes beside its bytes.
_READ_BYTES: Final = 256 * KIB
_WITHDRAWN: Final = "withdrawn: the owner has taken the block back since it was offered"
_DAMAGED: Final = "damaged: bytes of it did not match their checksum"
_OTHER: Final = "withdrawn: the ticket is of another window, or of the owner before it"


class ReadQueue:
    """The reads by messages of one window, which go together.

    Attributes:
        opened: The window, open on one connection.
    """

    def __init__(self, opened: OpenedWindow) -> None:
        self.opened: OpenedWindow = opened
        self._loop = opened.link.driver.services.loop
        self._reads: list[Reading] = []  # bounded: REQUESTS_MAX, one turn of the loop

    def add(self, read: Reading) -> None:
        """Ask for a read's blocks, with all others of this turn of the loop."""
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
        opened.link.driver.run()
        if any(read.deadline is not None for read in reads):
            opened.link.driver.set_timer()


class _Part(NamedTuple):
    """Blocks of one group of a read: their positions in its ticket.

    Attributes:
        first: The position of the group's first block.
    """

    read: Reading
    group: int
    first: int
    positions: Ids


class WindowAsk:
    """One request of a connection, for blocks of one read or of several.

    Attributes:
        parts: The reads, in the order of the request's blocks.
        together: The bytes that come in one frame; 0 if they come as chunks.
    """

    __slots__ = ("opened", "parts", "record", "together")

    def __init__(self, opened: OpenedWindow, parts: list[_Part], together: int) -> None:
        self.opened = opened
        self.parts = parts
        self.record: RequestRecord | None = None
        self.together = together

    def done(self, event: RequestDone) -> None:
        """Hand each read its blocks; ask again for those of a refused list."""
        record = event.request
        record.context = None
        answer = record.answer
        error = event.error
        self.opened.link.asked_bytes -= self.together
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
                        "KVW-WN-03", "WINDOW_GOT without bytes and without a reason"
                    )
            except ProtocolError as exc:
                self.opened.link.driver.core.fail(exc)
                error = exc
        begin = 0
        for part in self.parts:
            end = begin + part.positions.size
            part.read.asked.remove(self)
            part.read.answered(part.positions, stale[begin:end], record, error, answer)
            begin = end


class Reading:
    """One ``get``: what has landed, what was lost and why, and what is still to do.

    Attributes:
        named: The ticket.
        deadline: An instant of the loop's clock.
        over: It has an outcome.
        single: Its ticket is of one group, so it may share a frame with others.
        asked: Its requests that are not over.
        buffers: The buffers that land in its blocks.
        under_way: What it reads in place, for a lane that takes its time.
        view: The map from the window's blocks to its own, once it has begun.
    """

    def __init__(
        self,
        owner: RequestOwner,
        named: Ticket,
        cache: PagedCache,
        lists: BlockLists,
        deadline: float | None,
    ) -> None:
        self._owner = owner
        self._loop = owner._thread.loop
        self.named = named
        self.cache = cache
        self.lists = lists
        self.deadline = deadline
        self.over = False
        self._queue: ReadQueue
        self.single = len(named.counts) == 1
        self.asked: list[WindowAsk] = []
        self.view: ReaderView | None = None
        self.buffers: list[BufferId] = []
        self.under_way: asyncio.Future[Bits] | None = None
        self._begun_at = self._loop.time()
        self._request: Request[Outcome] | None = None
        # Of the ticket's blocks: landed; and the reason of others, 0 for none yet.
        self._landed: Bits | None = None
        self._codes: npt.NDArray[np.uint16] | None = None
        self._reasons: list[str] = []

    def begin(self, queue: ReadQueue) -> Request[Outcome]:
        """Read now what can be read in place; return the request."""
        self._queue = queue
        opened = queue.opened
        named = self.named
        if named.serial != opened.serial:
            self.fail_rest(_OTHER)
            return self.request()
        view = self.view = opened.view(self.cache)
        self._check(opened, view)
        reader = opened.reader
        if reader is not None and reader.memory_kind is view.memory_kind:
            return self._begin_in_place(opened, view, reader)
        request = self.request()
        self._queue.add(self)
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
            if ids.size != -(-granules // place.granules_per_block):
                raise UsageError(
                    f"blocks: {ids.size} for a ticket of {count} blocks in group "
                    f"{place.walk.group!r}, which fill "
                    f"{-(-granules // place.granules_per_block)} here"
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
        request = self._request
        if request is None:
            request = self._request = Request(
                self._owner, _READ, self, None, self.deadline
            )
            if self.over:
                self._complete(self._outcome())
        return request

    def _complete(
        self, outcome: Outcome | None, error: KVWireError | None = None
    ) -> None:
        """Complete the request, unless it was cancelled."""
        request = self._request
        # Each names the other; without this only the garbage collector would end both.
        self._request = None
        if request is not None:
            request._complete(outcome, error)

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
                return self.begin(self._queue)
            assert isinstance(landed, np.ndarray)
            self.over = True
            if landed.all():
                outcome = self._whole(view, nbytes)
            else:
                self._note(np.arange(landed.size), landed, _WITHDRAWN)
                outcome = self._outcome()
            opened.held_bytes += nbytes + _READ_BYTES
            if opened.held_bytes > reader.turn_bytes:
                # To await a request that is over does not let the loop run. This one
                # ends in its next turn, so reads in a row do not hold it for long.
                opened.held_bytes = 0
                request = self._request = self._request or Request(
                    self._owner, _READ, self, None, self.deadline
                )
                self._loop.call_soon(self._complete, outcome)
                return request
            if self._request is not None:  # it has waited for a connection
                request = self._request
                self._complete(outcome)
                return request
            # Made without an ``__init__``, for speed: it is over.
            request = _new(Request)
            request._over = True
            request._value = outcome
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
            view.device,
        )

    async def _in_turns(
        self, opened: OpenedWindow, view: ReaderView, reader: WindowReader
    ) -> None:
        """Read in batches that keep the loop for a short time; then complete.

        Cancel safety: it is cancelled with its loop only.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._take_turns(opened, view, reader)
        except TimeoutError:
            self.fail_rest("the deadline passed")
        except DeviceFailed as exc:
            # It may still write to the blocks: nothing else may land in them.
            opened.lost(reader, exc)
            self.fail_rest(str(exc))
        except KVWireError as exc:
            opened.lost(reader, exc)
            if opened.gone:
                self.fail_rest(f"gone: {exc}")
            elif not self.over:
                self._queue.add(self)
        else:
            self._end_if_done()

    async def _take_turns(
        self, opened: OpenedWindow, view: ReaderView, reader: WindowReader
    ) -> None:
        begin = 0
        for index, count in enumerate(self.named.counts):
            step = min(
                reader.turn_bytes // view.block_bytes[index],
                KV_PIECES_MAX // view.block_pieces[index],
            )
            for first in range(0, count, max(1, step)):
                if self.over:
                    return
                part = slice(first, min(count, first + max(1, step)))
                found = reader.read(self._batch(opened, view, index, part))
                at = np.arange(begin + part.start, begin + part.stop)
                if isinstance(found, np.ndarray):
                    self._note(at, found, _WITHDRAWN)
                    await asyncio.sleep(0)
                else:
                    self.under_way = found
                    opened.note(found)
                    self._note(at, await asyncio.shield(found), _WITHDRAWN)
            begin += count

    # --- by messages ------------------------------------------------------------------

    def landed(self, ask: WindowAsk, part: _Part, line: int) -> int:
        """Copy blocks that have come side by side, from an address; return their bytes.

        Their generations were compared behind the owner's copy.
        """
        view = self.view
        assert view is not None
        nbytes = part.positions.size * view.block_bytes[part.group]
        self.asked.remove(ask)
        if self.over:
            return nbytes
        place = view.places[part.group]
        move_granules(place, self.where(view, part), line, gather=False)
        if self.single and part.positions.size == self.named.entries.size:
            self._end(self._whole(view, nbytes))
        else:
            self._note(part.positions, np.ones(part.positions.size, np.bool_), "")
            self._end_if_done()
        return nbytes

    def where(self, view: ReaderView, part: _Part) -> Ids:
        """Return where each granule of some blocks lands."""
        _, group, first, positions = part
        granules = view.per_owner[group]
        offsets = self.offsets(view, group)
        if positions.size * granules == offsets.size:
            return offsets
        return offsets.reshape(-1, granules)[positions - first].ravel()

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
            self._note(
                positions[stale], np.zeros(int(stale.sum()), np.bool_), _WITHDRAWN
            )
            if self.todo().size and not self.asked:
                self._queue.add(self)
        else:
            self._note(
                positions[stale], np.zeros(int(stale.sum()), np.bool_), _WITHDRAWN
            )
            rest = positions[~stale]
            whole = np.full(rest.size, not record.damaged)
            self._note(rest, whole, _DAMAGED)
        self._end_if_done()

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

    @property
    def is_stuck(self) -> bool:
        """Return whether a device has failed that may write to the blocks for ever."""
        read = self.under_way
        return (
            read is not None
            and read.done()
            and not read.cancelled()
            and isinstance(read.exception(), DeviceFailed)
        )

    @property
    def lent(self) -> list[BufferId]:
        """Return the buffers that may still be written to."""
        if not self.buffers:
            return []
        table = self._queue.opened.link.driver.services.buffers
        return table.undrained(self.buffers)

    def cancel(self) -> None:
        """End the read with RequestCancelled; its memory may be busy for a while."""
        self.over = True
        for ask in list(self.asked):
            if len(ask.parts) == 1 and ask.record is not None:
                ask.opened.link.driver.core.cancel(ask.record)
                ask.opened.link.driver.run()
        error = RequestCancelled("the get was cancelled on this side")
        self._complete(None, error)

    def _end_if_done(self) -> None:
        if not self.over and not self.asked and not self.todo().size:
            self._end()

    def _end(self, outcome: Outcome | None = None) -> None:
        self.over = True
        if self._request is not None:
            self._complete(outcome or self._outcome())

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
            timings=Timings(wire_s=self._loop.time() - self._begun_at),
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
            starts = np.arange(0, lost.size, place.granules_per_block)
            of_block = (
                np.maximum.reduceat(lost, starts)
                if lost.size
                else np.zeros(0, np.uint16)
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
            per_block = place.granules_per_block * place.walk.granule_tokens
            usable.append((min(prefix * per_block, tokens[name]), prefix, tokens[name]))
            nbytes += int(landed[part].sum()) * view.block_bytes[index]
        # Of the group that lists the most tokens, what every group can use.
        least = min(usable)
        longest = max(usable, key=lambda one: one[2])
        complete = bool(landed.all())
        place = view.places[usable.index(longest)]
        per_block = place.granules_per_block * place.walk.granule_tokens
        return Outcome(
            complete=complete,
            landed=BlockSet(here),
            missing=missing_blocks(missing, self._reasons),
            usable_prefix=longest[1] if complete else least[0] // per_block,
            usable_tokens=longest[2] if complete else least[0],
            lists=self.lists,
            tokens=tokens,
            timings=Timings(wire_s=self._loop.time() - self._begun_at),
            nbytes=nbytes,
        )

    def _outcome_without_view(self) -> Outcome:
        return nothing_landed(self.cache, self.lists, self._reasons[0])


def _ask(opened: OpenedWindow, reads: list[Reading]) -> None:
    """Ask for the blocks of reads of one view, in requests of bounded size."""
    view = reads[0].view
    assert view is not None
    try:
        if view.device is not None:
            opened.link.driver.staging.open(view.device)
        number = opened.number_of(view)
    except (UsageError, BackendUnavailable) as exc:
        for read in reads:
            read.fail_rest(str(exc))
        return
    wanted: list[_Part] = []
    for read in reads:
        todo = read.todo()
        if read.single:
            wanted.append(_Part(read, 0, 0, todo))
            continue
        begin = 0
        for index, count in enumerate(read.named.counts):
            of_group = todo[(todo >= begin) & (todo < begin + count)]
            if of_group.size:
                wanted.append(_Part(read, index, begin, of_group))
            begin += count
    while wanted:
        _post(opened, view, number, _taken(view, wanted))


def _taken(view: ReaderView, wanted: list[_Part]) -> list[_Part]:
    """Remove from the list what goes into one request, in the order of groups."""
    room_blocks = WINDOW_GET_BLOCKS_MAX
    room_bytes = WINDOW_GET_BYTES_MAX
    room_pieces = KV_PIECES_MAX
    taken: list[_Part] = []
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


def _landing(view: ReaderView, taken: list[_Part]) -> Fragments:
    """Return the memory in which blocks land, in the order of their bytes."""
    offsets: dict[int, list[Ids]] = {}
    for part in taken:
        offsets.setdefault(part.group, []).append(part.read.where(view, part))
    parts = [
        view.places[group].fragments(
            view.places[group].walk.layers,
            of_group[0] if len(of_group) == 1 else np.concatenate(of_group),
        )
        for group, of_group in offsets.items()
    ]
    return parts[0] if len(parts) == 1 else concatenated(parts)


def _post(
    opened: OpenedWindow, view: ReaderView, number: int, taken: list[_Part]
) -> None:
    """Ask the owner for blocks, in one frame."""
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
    link = opened.link
    driver = link.driver
    together = (
        nbytes <= opened.together
        and view.device is None
        and link.asked_bytes + nbytes <= WINDOW_DATA_ASKED_MAX
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
    link.asked_bytes += ask.together
    for one in taken:
        one.read.asked.append(ask)
        if buffer is not None:
            one.read.buffers.append(buffer)
