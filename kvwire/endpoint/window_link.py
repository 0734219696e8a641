"""The windows of one connection: those that it shows to its peer, and the peer's.

The owner's part answers gets: it compares generations, sends the blocks straight from
the cache, and compares again once its link no longer reads them. The reader's part
keeps what is agreed once for each window of the peer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from kvwire.aio import start_task
from kvwire.backend.window import WindowMemory, WindowReader
from kvwire.driver.connection_driver import ConnectionDriver, EventActs
from kvwire.driver.lanes.state import LaneEndpoint, LaneState
from kvwire.endpoint.window import Window, WindowTable
from kvwire.endpoint.window_data import gathered
from kvwire.endpoint.window_memory import decode_memory, encode_memory
from kvwire.errors import (
    BackendUnavailable,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    ProfileMismatch,
    ProtocolError,
    StaleRegion,
    UsageError,
    nearest,
)
from kvwire.kv.blocks import Bits, Ids, MissingBlocks, all_of, nothing_missing
from kvwire.kv.fragments import Array, concatenated
from kvwire.kv.geometry import Geometry, geometry_of
from kvwire.kv.paged import PagedCache
from kvwire.kv.window_map import (
    BlockPlaces,
    PeerGroup,
    common_pieces,
    geometry_of_pools,
    pieces_max,
    placed,
    spans_of,
    view_walks,
)
from kvwire.limits import (
    WINDOW_DATA_BYTES_MAX,
    WINDOW_GEOMETRY_BYTES_MAX,
    WINDOW_VIEWS_MAX,
)
from kvwire.proto.events import (
    RequestDone,
    WindowAsked,
    WindowClosed,
    WindowMemoryOffered,
    WindowRead,
    WindowReadTogether,
    WindowSent,
    WindowViewed,
)
from kvwire.proto.records import RequestRecord
from kvwire.transfers.offer import GeometryFields
from kvwire.types import Device, MemoryKind
from kvwire.wire.control import (
    DECODE_ERRORS,
    WindowGet,
    WindowMemoryBody,
    WindowOpened,
    WindowViewBody,
)

logger: logging.Logger = logging.getLogger("kvwire.windows")

# A window, the places of blocks in its table, their generations, and where they lie.
_Named = tuple["ShownWindow", Ids, Array, list[tuple[BlockPlaces, Ids]]]
_GET_RULE: Final = "KVW-WN-05"
_NOT_THERE: Final = "a WINDOW_GET whose blocks are not there"
_GEOMETRY: Final = msgspec.msgpack.Decoder(GeometryFields)
_U4: Final = np.dtype("<u4")
_U8: Final = np.dtype("<u8")


class ShownView(NamedTuple):
    """The geometry of a peer's cache, as this side's blocks are read for it.

    Attributes:
        places: Where blocks lie, by group.
        pieces: The pieces of one block, by group.
    """

    places: tuple[BlockPlaces, ...]
    pieces: tuple[int, ...]


class ShownWindow:
    """A window of this side that the peer has open."""

    def __init__(self, number: int, window: Window) -> None:
        self.number = number
        self.window = window
        # By the reader's number: where blocks lie, or why they cannot be sent.
        self.views: dict[int, ShownView | str] = {}  # bounded: WINDOW_VIEWS_MAX
        # Lanes on which the peer may read it in place.
        self.lanes: list[tuple[LaneEndpoint, WindowMemory]] = []

    def view(self, geometry: bytes) -> ShownView | str:
        """Return where the blocks lie that a reader of this geometry gets."""
        cache = self.window._cache
        try:
            walks = view_walks(self.window._geometry, read_geometry(geometry))
        except (ProfileMismatch, UsageError) as exc:
            return str(exc)
        return ShownView(
            tuple(BlockPlaces(walk, cache.groups[walk.group]) for walk, _ in walks),
            tuple(count for _, count in walks),
        )


class OpenedWindow:
    """A window of the peer, open on one connection.

    Attributes:
        number: Its number there.
        serial: The serial number in its tickets.
        together: The most bytes that the owner sends in one frame.
        geometry: Its cache.
        first: The first entry of each group, and behind the last one of all.
        reader: Reads it in place, without asking; None while it is read by messages.
        prepared: Done once ``reader`` is ready, or cannot be; None for no lane.
        gone: Why it can be read no more, or "".
        held_bytes: The bytes that were read in place since a read last let the loop
            run, and some for each read.
    """

    def __init__(self, link: WindowLink, answer: WindowOpened) -> None:
        self.link = link
        self.number: int = answer.window
        self.serial: bytes = answer.serial
        self.together: int = answer.together
        self.geometry: Geometry = read_geometry(answer.geometry)
        first = 0
        self.first: list[int] = [0]
        for group in self.geometry.groups:
            first += group.blocks
            self.first.append(first)
        self.reader: WindowReader | None = None
        self.prepared: asyncio.Future[None] | None = None
        # One that is not ready yet; and the lane of this one, or of ``reader``.
        self._coming: WindowReader | None = None
        self._lane: LaneEndpoint | None = None
        self._under_way: set[asyncio.Future[Any]] = set()
        self.memory: tuple[WindowMemory, tuple[PeerGroup, ...]] | None = None
        self.gone: str = ""
        self.held_bytes: int = 0
        self._views: WeakKeyDictionary[PagedCache, ReaderView] = WeakKeyDictionary()
        self._numbers: dict[bytes, int] = {}  # bounded: WINDOW_VIEWS_MAX

    def view(self, cache: PagedCache) -> ReaderView:
        """Return the map from its blocks to those of a cache of this side.

        Raises:
            ProfileMismatch: They do not fit together.
        """
        view = self._views.get(cache)
        if view is None:
            view = self._views[cache] = ReaderView(self, cache)
        return view

    def number_of(self, view: ReaderView) -> int:
        """Return the view's number on this connection, once the owner knows it.

        Raises:
            UsageError: There are too many views of other geometry.
        """
        number = self._numbers.get(view.geometry)
        if number is None:
            number = len(self._numbers)
            if number >= WINDOW_VIEWS_MAX:
                raise UsageError(
                    f"{WINDOW_VIEWS_MAX} caches of different shape read this window"
                )
            self._numbers[view.geometry] = number
            core = self.link.driver.core
            core.windows.report(WindowViewBody(self.number, number, view.geometry))
        return number

    def adopt(self, lane: int, memory: bytes, access: bytes) -> None:
        """Read the window in place from now on, over a lane of this number.

        Raises:
            ProtocolError: No owner would describe its memory so.
        """
        endpoint = self.link.driver.lanes.find(lane)
        if endpoint is None:
            return
        if self._lane is not None:
            if self._lane.state is LaneState.OPEN:
                return
            self.drop_reader()
        try:
            read = decode_memory(memory, self.geometry)
            coming = endpoint.lane.window(access, read[0])
        except (BackendUnavailable, ConnectionLost) as exc:
            logger.info("a window is read by messages: %s", exc)
            return
        self.memory = read
        self._lane = endpoint
        self._coming = coming
        self.prepared = start_task(self._prepare(coming))

    async def _prepare(self, coming: WindowReader) -> None:
        """Read in place once a reader is ready.

        Cancel safety: it is cancelled with its loop only.
        """
        try:
            await coming.ready()
        except KVWireError as exc:
            self.lost(coming, exc)
        else:
            if self._coming is coming:
                self.reader = coming
                self._coming = None

    def lost(self, reader: WindowReader, error: KVWireError) -> None:
        """Read by messages from now on, because a reader cannot."""
        if reader in (self.reader, self._coming):
            logger.info("a window is read by messages: %s", error)
            self.drop_reader()
        if isinstance(error, ProtocolError):
            self.link.driver.core.fail(error)
            self.link.driver.run()

    def drop_reader(self) -> None:
        """Read by messages from now on."""
        for reader in (self.reader, self._coming):
            if reader is not None:
                reader.close()
                if reader.quiet is not None:
                    self.note(reader.quiet)
        self.reader = None
        self._coming = None
        self._lane = None

    def note(self, read: asyncio.Future[Any]) -> None:
        """Let the owner wait for a read in place that has begun, or for its memory."""
        self._under_way.add(read)  # bounded: one for each get
        read.add_done_callback(self._over)

    def close(self) -> None:
        """End it; report that to the owner once nothing here reads its memory."""
        self.gone = self.gone or "this side closed the window"
        self.drop_reader()
        if not self._under_way:
            self._report()

    def _over(self, read: asyncio.Future[Any]) -> None:
        self._under_way.discard(read)
        if self.gone and not self._under_way:
            self._report()

    def _report(self) -> None:
        link = self.link
        if link.opened.pop(self.number, None) is not None and not link.ended:
            link.driver.core.windows.close(self.number)
            link.driver.run()


class ReaderView:
    """The map from the blocks of a peer's window to those of a cache of this side.

    Attributes:
        geometry: This cache's, encoded.
        places: Where blocks land, by group.
        per_owner: The granules of one block of the owner, by group.
        block_bytes: The bytes that one block of the owner has for this side, by group.
        block_pieces: The pieces of memory in which they lie at most, by group.
        device: The cache's device; None for host memory.
        memory_kind: The kind of memory that blocks land in.
    """

    def __init__(self, opened: OpenedWindow, cache: PagedCache) -> None:
        mine = geometry_of_pools(cache)
        walks = view_walks(opened.geometry, mine)
        if not cache.writable:
            raise UsageError(
                "this cache has a tensor that is not writable: nothing can land in it"
            )
        self.geometry: bytes = encode_geometry(mine)
        if len(self.geometry) > WINDOW_GEOMETRY_BYTES_MAX:
            raise UsageError("this cache has too many groups to describe")
        self.places: tuple[BlockPlaces, ...] = tuple(
            BlockPlaces(walk, cache.groups[walk.group]) for walk, _ in walks
        )
        self.block_pieces: tuple[int, ...] = tuple(count for _, count in walks)
        tokens = [group.spec.block_tokens for group in opened.geometry.groups]
        self.per_owner: tuple[int, ...] = tuple(
            count // walk.granule_tokens
            for count, (walk, _) in zip(tokens, walks, strict=True)
        )
        self.block_bytes: tuple[int, ...] = tuple(
            len(walk.layers) * walk.granule_bytes * granules
            for (walk, _), granules in zip(walks, self.per_owner, strict=True)
        )
        self.device: Device | None = cache.device
        self.memory_kind: MemoryKind = (
            MemoryKind.HOST if cache.device is None else cache.device.kind
        )
        self.nothing_missing: MissingBlocks = nothing_missing(
            {walk.group: walk.layers for walk, _ in walks}
        )
        self.owners: object = [group.owners for group in cache.groups.values()]
        self._pieces: list[tuple[BlockPlaces, Array, Array, int]] | None = None

    def pieces(
        self, opened: OpenedWindow
    ) -> list[tuple[BlockPlaces, Array, Array, int]]:
        """Return by group: the owner's places, and the pieces of a granule.

        They are for a reader that needs no answers, which the window has.
        """
        if self._pieces is None:
            assert opened.memory is not None
            self._pieces = []
            for place, group in zip(self.places, opened.memory[1], strict=True):
                theirs = BlockPlaces(place.walk, group)
                self._pieces.append((theirs, *common_pieces(theirs, place)))
        return self._pieces


class WindowOpening:
    """A window of the peer that has been asked for.

    Attributes:
        found: Its result.
    """

    def __init__(self, link: WindowLink, found: asyncio.Future[OpenedWindow]) -> None:
        self._link = link
        self.found: asyncio.Future[OpenedWindow] = found

    def done(self, event: RequestDone) -> None:
        """Take the answer."""
        answer = event.request.answer
        event.request.context = None
        link = self._link
        if event.error is not None:
            if not self.found.done():
                self.found.set_exception(event.error)
            return
        assert isinstance(answer, WindowOpened)
        try:
            opened = OpenedWindow(link, answer)
            link.opened[opened.number] = opened  # bounded: WINDOWS_OPEN_MAX
            if answer.lane:
                opened.adopt(answer.lane, answer.memory, answer.access)
        except KVWireError as exc:
            link.driver.core.fail(exc)
            if not self.found.done():
                self.found.set_exception(exc)
            return
        if self.found.done():
            opened.close()
        else:
            self.found.set_result(opened)


class WindowLink:
    """The windows of one connection.

    Attributes:
        driver: Runs the connection.
        opened: The peer's windows that are open here, by number.
        served: The gets of the peer that are being sent.
        ended: The connection has ended.
    """

    def __init__(self, driver: ConnectionDriver, table: WindowTable) -> None:
        self.driver = driver
        self.opened: dict[int, OpenedWindow] = {}  # bounded: WINDOWS_OPEN_MAX
        self.ended: bool = False
        # Bytes of small gets that were asked for and have not come.
        self.asked_bytes: int = 0
        self._table = table
        self._shown: dict[int, ShownWindow] = {}  # bounded: WINDOWS_OPEN_MAX
        self.served: dict[RequestRecord, tuple[ShownWindow, Ids, Array]] = {}

    def acts(self) -> EventActs:
        """Return the handler of each event about windows."""
        return {
            WindowAsked: self._asked,
            WindowMemoryOffered: self._memory_offered,
            WindowViewed: self._viewed,
            WindowRead: self._read,
            WindowReadTogether: self._read_together,
            WindowSent: self._sent,
            WindowClosed: self._closed,
        }

    # --- owner ------------------------------------------------------------------------

    def _asked(self, event: WindowAsked) -> None:
        windows = self.driver.core.windows
        window = self._table.open.get(event.name)
        if window is None:
            reason = f"no window {event.name!r} is exposed here"
            if self._table.open:
                reason += f"; {nearest(event.name, self._table.open)}"
            windows.answer(event.wire_id, reason)
            return
        geometry = encode_geometry(window._geometry)
        if len(geometry) > WINDOW_GEOMETRY_BYTES_MAX:
            windows.answer(event.wire_id, "the window has too many groups to describe")
            return
        try:
            number = windows.number()
        except UsageError as exc:
            windows.answer(event.wire_id, str(exc))
            return
        self._table.closing[self._hide] = None
        shown = self._shown[number] = ShownWindow(number, window)
        window._used()
        found = None
        for endpoint in self.driver.lanes.open:
            if found is None:
                found = self._expose(shown, endpoint)
        lane, memory, access = found or (0, b"", b"")
        together = WINDOW_DATA_BYTES_MAX if window._cache.device is None else 0
        windows.answer(
            event.wire_id,
            WindowOpened(
                number, window.serial, geometry, lane, memory, access, together
            ),
        )

    def lane_opened(self, endpoint: LaneEndpoint) -> None:
        """Let the peer read open windows over a lane that has come up."""
        knows = self.driver.lanes.knows
        for shown in self._shown.values():
            shown.lanes = [lane for lane in shown.lanes if knows(lane[0].lane)]
            if shown.window.closed or any(
                lane.state is LaneState.OPEN for lane, _ in shown.lanes
            ):
                continue
            if found := self._expose(shown, endpoint):
                body = WindowMemoryBody(shown.number, *found)
                self.driver.core.windows.report(body)

    def _expose(
        self, shown: ShownWindow, endpoint: LaneEndpoint
    ) -> tuple[int, bytes, bytes] | None:
        """Let the peer read a window in place, over a lane.

        Returns:
            The lane's number, the addresses, and the lane's own description; None if
            the lane cannot.
        """
        window = shown.window
        cache = window._cache
        reads = endpoint.lane.reads_windows
        if cache.device is not None:
            reads = endpoint.lane.reads_device_windows
        if not reads:
            return None
        where = placed(cache)
        table = window._generations
        data = encode_memory(table.address, where)
        if data is None:
            return None
        memory = WindowMemory(
            spans=spans_of(window._geometry, where),
            table=(table.address, table.values.nbytes),
            device=cache.device,
        )
        try:
            access = endpoint.lane.expose(memory)
        except BackendUnavailable as exc:
            logger.info("window %r is read by messages: %s", window.name, exc)
            return None
        shown.lanes.append((endpoint, memory))
        return endpoint.number, data, access

    def _viewed(self, event: WindowViewed) -> None:
        body = event.body
        shown = self._shown.get(body.window)
        if shown is not None:
            shown.views[body.view] = shown.view(body.geometry)

    def _read(self, event: WindowRead) -> None:
        # Before: the request is open, and its lists are of one length each. After: it
        # moves blocks whose generations were right, or has its last frame.
        request = event.request
        try:
            found = self._named(event.body)
        except (ProfileMismatch, StaleRegion) as exc:
            self.driver.core.refuse(request, exc, exc.code)
            return
        except ProtocolError as exc:
            self.driver.core.fail(exc)
            return
        shown, entries, generations, granules = found
        window = shown.window
        parts = [
            place.fragments(place.walk.layers, offsets) for place, offsets in granules
        ]
        fragments = parts[0] if len(parts) == 1 else concatenated(parts)
        same = window._generations.same(entries, generations)
        if not same.all():
            self.driver.core.finish_read(request, packed(~same), sent=False)
            return
        if fragments.device is not None:
            try:
                self.driver.staging.open(fragments.device)
            except BackendUnavailable as exc:
                self.driver.core.refuse(request, exc, exc.code)
                return
        buffers = self.driver.services.buffers
        buffer = buffers.lend(fragments)
        window._used()
        buffers.on_drained(buffer, window._released)
        self.served[request] = (shown, entries, generations)  # bounded: REQUESTS_MAX
        self.driver.core.windows.serve(request, buffer)

    def _read_together(self, event: WindowReadTogether) -> None:
        """Answer a small get at once: copy the blocks, and compare afterwards."""
        windows = self.driver.core.windows
        try:
            found = self._named(event.body)
        except (ProfileMismatch, StaleRegion) as exc:
            windows.refuse(event.wire_id, exc)
            return
        except ProtocolError as exc:
            self.driver.core.fail(exc)
            return
        shown, entries, generations, granules = found
        data = gathered(granules, event.body.nbytes)
        # The blocks were copied before this look, so bytes that the owner wrote after
        # it has renewed a generation are not sent: kvwire.memory.generations.
        same = shown.window._generations.same(entries, generations)
        if all_of(same):
            self.driver.answer_get(event.wire_id, data)
        else:
            windows.withhold(event.wire_id, packed(~same))

    def _named(self, body: WindowGet) -> _Named:
        """Return what a WINDOW_GET names.

        It computes no table that is larger than what a well-meant get needs.

        Raises:
            StaleRegion: The window was closed.
            ProfileMismatch: The reader's cache is unknown, or does not fit.
            ProtocolError: It names other blocks, or other bytes.
        """
        shown = self._shown.get(body.window)
        if shown is None:
            raise StaleRegion("the window was closed")
        if body.together and shown.window._cache.device is not None:
            raise ProtocolError(_GET_RULE, "blocks of a device do not come together")
        view = shown.views.get(body.view, "the window has no such view")
        if isinstance(view, str):
            raise ProfileMismatch(view)
        places, pieces = view
        counts = body.counts
        entries = np.frombuffer(body.entries, _U4).astype(np.int64)
        granules: list[tuple[BlockPlaces, Ids]] = []
        begin = nbytes = cut = 0
        if len(counts) != len(places):
            raise ProtocolError(_GET_RULE, _NOT_THERE)
        for count, place, of_block in zip(counts, places, pieces, strict=True):
            nbytes += count * place.block_bytes
            cut += count * of_block
        if nbytes != body.nbytes or (sum(counts) > 1 and cut > pieces_max(nbytes)):
            raise ProtocolError(_GET_RULE, _NOT_THERE)
        pools = shown.window._geometry.groups
        firsts = shown.window._first.values()
        for place, count, first, pool in zip(
            places, counts, firsts, pools, strict=True
        ):
            if not count:
                continue
            ids = entries[begin : begin + count] - first
            begin += count
            # A negative one is huge as an unsigned number.
            if int(np.maximum.reduce(ids.view(np.uint64))) >= pool.blocks:
                raise ProtocolError(_GET_RULE, _NOT_THERE)
            granules.append((place, place.offsets(ids)))
        return shown, entries, np.frombuffer(body.generations, _U8), granules

    def _sent(self, event: WindowSent) -> None:
        request = event.request
        shown, entries, generations = self.served.pop(request)
        same = shown.window._generations.same(entries, generations)
        stale = b"" if same.all() else packed(~same)
        self.driver.core.finish_read(request, stale, sent=True)

    def _hide(self, window: Window) -> None:
        """End a window at the peer; it answers when its lanes read it no more.

        A peer that has it on no lane reads nothing by itself: it is not waited for.
        """
        for shown in list(self._shown.values()):
            if shown.window is window:
                self.driver.core.windows.hide(shown.number)
                if not shown.lanes:
                    del self._shown[shown.number]
                    self._forget(shown)
        self.driver.run()

    def _forget(self, shown: ShownWindow) -> None:
        window = shown.window
        others = [one for one in self._shown.values() if one.window is window]
        if not others:
            for endpoint, memory in shown.lanes:
                if self.driver.lanes.knows(endpoint.lane):
                    endpoint.lane.conceal(memory)
        elif shown.lanes:
            others[0].lanes += shown.lanes
        window._released()
        if not self._shown:
            self._table.closing.pop(self._hide, None)

    # --- reader -----------------------------------------------------------------------

    async def open(self, name: str, deadline: float | None) -> OpenedWindow:
        """Open a window of the peer.

        Raises:
            KVWireError: The peer has no such window, or the connection ended.

        Cancel safety: safe, a window that opens too late is closed again.
        """
        driver = self.driver
        waiting = WindowOpening(self, driver.services.loop.create_future())
        record = driver.core.open_window(name, deadline)
        record.context = waiting
        driver.run()
        if deadline is not None:
            driver.set_timer()
        try:
            opened = await waiting.found
            if opened.prepared is not None:
                # A peer can delay its lane's part for ever. Then the window is read by
                # messages, until the lane is ready.
                patience_s = driver.services.config.handshake_timeout_s
                if deadline is not None:
                    left_s = deadline - driver.services.loop.time()
                    patience_s = max(0.0, min(patience_s, left_s))
                await asyncio.wait((opened.prepared,), timeout=patience_s)
        except asyncio.CancelledError:
            driver.core.cancel(record)
            driver.run()
            found = waiting.found
            if not found.cancelled() and found.done() and not found.exception():
                found.result().close()
            raise
        return opened

    def _memory_offered(self, event: WindowMemoryOffered) -> None:
        body = event.body
        opened = self.opened.get(body.window)
        if opened is None:
            return
        try:
            opened.adopt(body.lane, body.memory, body.access)
        except ProtocolError as exc:
            self.driver.core.fail(exc)

    # --- both -------------------------------------------------------------------------

    def _closed(self, event: WindowClosed) -> None:
        if event.mine:
            shown = self._shown.pop(event.window, None)
            if shown is not None:
                self._forget(shown)
            return
        opened = self.opened.get(event.window)
        if opened is not None:
            opened.gone = "withdrawn: the window was closed"
            opened.close()

    def end(self, error: ConnectionClosed) -> None:
        """End all windows, with the connection."""
        self.ended = True
        shown_windows = list(self._shown.values())
        self._shown.clear()
        for shown in shown_windows:
            self._forget(shown)
        for opened in self.opened.values():
            opened.gone = f"gone: {error}"
            # Pages that are mapped outlive the connection, and what is read there is
            # what was offered: whoever writes to a block renews its generation.
            if opened.reader is not None and not opened.reader.outlives_lane:
                opened.drop_reader()
        self.opened.clear()


def encode_geometry(geometry: Geometry) -> bytes:
    """Return a geometry as the frames about windows have it."""
    return msgspec.msgpack.encode(geometry.encoded)


def read_geometry(data: bytes) -> Geometry:
    """Read a peer's geometry.

    Raises:
        ProfileMismatch: It is malformed.
    """
    try:
        fields: tuple[Any, ...] = _GEOMETRY.decode(data)
        return geometry_of(fields)
    except (*DECODE_ERRORS, UsageError) as exc:
        raise ProfileMismatch(f"the peer's window: {exc}") from None


def packed(bits: Bits) -> bytes:
    """Return bits as WINDOW_GOT has them."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpacked(data: bytes, count: int) -> Bits:
    """Return the bits of WINDOW_GOT; all False without any."""
    if not data:
        return np.zeros(count, np.bool_)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits.size < count:
        raise ProtocolError("KVW-WN-03", "WINDOW_GOT for fewer blocks than a get has")
    return bits[:count].astype(np.bool_)
