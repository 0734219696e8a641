"""The owner's side of the windows that one peer has open: it answers the peer's gets.

It compares the blocks' generations, sends the blocks straight from the cache, and
compares the generations again once the link no longer reads the blocks.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import numpy as np

from kvwire.backend.window import WindowMemory
from kvwire.driver.connection_driver import ConnectionDriver, EventActs
from kvwire.driver.lanes.state import LaneEndpoint, LaneState
from kvwire.endpoint.windows.fields import (
    encode_geometry,
    encode_memory,
    packed,
    read_geometry,
)
from kvwire.endpoint.windows.map import (
    BlockPlaces,
    gathered,
    pieces_max,
    placed,
    spans_of,
    view_walks,
)
from kvwire.endpoint.windows.window import Window, WindowTable
from kvwire.errors import (
    BackendUnavailable,
    ConnectionLost,
    ProfileMismatch,
    ProtocolError,
    StaleRegion,
    UsageError,
    nearest,
)
from kvwire.kv.blocks import Ids, all_of
from kvwire.kv.fragments import Array, concatenated
from kvwire.limits import (
    WINDOW_DATA_BYTES_MAX,
    WINDOW_GEOMETRY_BYTES_MAX,
)
from kvwire.proto.events import (
    WindowAsked,
    WindowLeft,
    WindowRead,
    WindowReadTogether,
    WindowSent,
    WindowViewed,
)
from kvwire.proto.records import RequestRecord
from kvwire.wire.control import (
    WindowGet,
    WindowMemoryBody,
    WindowOpened,
)

logger: logging.Logger = logging.getLogger("kvwire.windows")

_GET_RULE: Final = "KVW-WN-05"
_NOT_THERE: Final = "WINDOW_GET names blocks that do not exist"
_U4: Final = np.dtype("<u4")
_U8: Final = np.dtype("<u8")


class ShownView(NamedTuple):
    """A peer's geometry, with the map from this side's blocks.

    Attributes:
        places: The places of blocks in memory, by group.
        pieces: The number of memory pieces of one block, by group.
    """

    places: tuple[BlockPlaces, ...]
    pieces: tuple[int, ...]


class ShownWindow:
    """A window of this side, opened by the peer."""

    def __init__(self, number: int, window: Window) -> None:
        self.number = number
        self.window = window
        # By the reader's number: the places of blocks, or why they cannot be sent.
        self.views: dict[int, ShownView | str] = {}  # bounded: WINDOW_VIEWS_MAX
        # Lanes on which the peer may read it in place.
        self.lanes: list[tuple[LaneEndpoint, WindowMemory]] = []

    def view(self, geometry: bytes) -> ShownView | str:
        """Return the map of this side's blocks for a reader with this geometry."""
        cache = self.window._cache
        try:
            walks = view_walks(self.window._geometry, read_geometry(geometry))
        except (ProfileMismatch, UsageError) as exc:
            return str(exc)
        return ShownView(
            tuple(BlockPlaces(walk, cache.groups[walk.group]) for walk, _ in walks),
            tuple(count for _, count in walks),
        )


class _Named(NamedTuple):
    """The contents of a get request.

    Attributes:
        shown: The requested window.
        entries: The places of its blocks in the window's table.
        generations: The blocks' generations, as the reader knows them.
        granules: The places of the blocks' granules, by group.
    """

    shown: ShownWindow
    entries: Ids
    generations: Array
    granules: list[tuple[BlockPlaces, Ids]]


class OwnWindows:
    """This side's windows that one connection's peer has open.

    Attributes:
        by_number: The windows by their numbers.
        served: The peer's gets whose blocks are being sent.
    """

    def __init__(self, driver: ConnectionDriver, table: WindowTable) -> None:
        self._driver = driver
        self._table = table
        self.by_number: dict[int, ShownWindow] = {}  # bounded: WINDOWS_OPEN_MAX
        # bounded: REQUESTS_MAX
        self.served: dict[RequestRecord, tuple[ShownWindow, Ids, Array]] = {}

    def acts(self) -> EventActs:
        """Return the handler of each window event."""
        return {
            WindowAsked: self._asked,
            WindowViewed: self._viewed,
            WindowRead: self._read,
            WindowReadTogether: self._read_together,
            WindowSent: self._sent,
            WindowLeft: self._left,
        }

    def _asked(self, event: WindowAsked) -> None:
        windows = self._driver.core.windows
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
        shown = self.by_number[number] = ShownWindow(number, window)
        window._used()
        found = None
        for endpoint in self._driver.lanes.open:
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
        """Let the peer read open windows over a new lane."""
        knows = self._driver.lanes.knows
        for shown in self.by_number.values():
            shown.lanes = [lane for lane in shown.lanes if knows(lane[0].lane)]
            if shown.window.closed or any(
                lane.state is LaneState.OPEN for lane, _ in shown.lanes
            ):
                continue
            if found := self._expose(shown, endpoint):
                body = WindowMemoryBody(shown.number, *found)
                self._driver.core.windows.report(body)

    def _expose(
        self, shown: ShownWindow, endpoint: LaneEndpoint
    ) -> tuple[int, bytes, bytes] | None:
        """Let the peer read a window in place, over a lane.

        Returns:
            The lane's number, the addresses, and the lane's own description; None if
            the lane cannot read in place.
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
        shown = self.by_number.get(body.window)
        if shown is not None:
            shown.views[body.view] = shown.view(body.geometry)

    def _read(self, event: WindowRead) -> None:
        # Before: the request is open, and its lists have matching lengths. After:
        # either blocks with valid generations are being sent, or the request's last
        # frame is.
        request = event.request
        try:
            found = self._named(event.body)
        except (ProfileMismatch, StaleRegion) as exc:
            self._driver.core.refuse(request, exc, exc.code)
            return
        except ProtocolError as exc:
            self._driver.core.fail(exc)
            return
        shown, entries, generations, granules = found
        window = shown.window
        parts = [
            place.fragments(place.walk.layers, offsets) for place, offsets in granules
        ]
        fragments = parts[0] if len(parts) == 1 else concatenated(parts)
        same = window._generations.same(entries, generations)
        if not same.all():
            self._driver.core.finish_read(request, packed(~same), sent=False)
            return
        if fragments.device is not None:
            try:
                self._driver.staging.open(fragments.device)
            except BackendUnavailable as exc:
                self._driver.core.refuse(request, exc, exc.code)
                return
        buffers = self._driver.services.buffers
        buffer = buffers.lend(fragments)
        window._used()
        buffers.on_drained(buffer, window._released)
        self.served[request] = (shown, entries, generations)  # bounded: REQUESTS_MAX
        self._driver.core.windows.serve(request, buffer)

    def _read_together(self, event: WindowReadTogether) -> None:
        """Answer a small get at once: copy blocks, then compare generations."""
        windows = self._driver.core.windows
        try:
            found = self._named(event.body)
        except (ProfileMismatch, StaleRegion) as exc:
            windows.refuse(event.wire_id, exc)
            return
        except ProtocolError as exc:
            self._driver.core.fail(exc)
            return
        shown, entries, generations, granules = found
        data = gathered(granules, event.body.nbytes)
        # The blocks were copied before this comparison, so bytes that the owner wrote
        # after renewing a generation are not sent: kvwire.memory.generations.
        same = shown.window._generations.same(entries, generations)
        if all_of(same):
            self._driver.answer_get(event.wire_id, data)
        else:
            windows.withhold(event.wire_id, packed(~same))

    def _named(self, body: WindowGet) -> _Named:
        """Return the contents of a WINDOW_GET.

        It never computes a larger table than a legitimate get needs.

        Raises:
            StaleRegion: The window was closed.
            ProfileMismatch: The reader's cache is unknown, or does not fit.
            ProtocolError: The window does not have these blocks, or the byte count is
                wrong.
        """
        shown = self.by_number.get(body.window)
        if shown is None:
            raise StaleRegion("the window was closed")
        if body.together and shown.window._cache.device is not None:
            raise ProtocolError(
                _GET_RULE, "blocks in device memory must arrive in one message"
            )
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
            # A negative number is huge when read as unsigned.
            if int(np.maximum.reduce(ids.view(np.uint64))) >= pool.blocks:
                raise ProtocolError(_GET_RULE, _NOT_THERE)
            granules.append((place, place.offsets(ids)))
        return _Named(shown, entries, np.frombuffer(body.generations, _U8), granules)

    def _sent(self, event: WindowSent) -> None:
        request = event.request
        shown, entries, generations = self.served.pop(request)
        same = shown.window._generations.same(entries, generations)
        stale = b"" if same.all() else packed(~same)
        self._driver.core.finish_read(request, stale, sent=True)

    def _hide(self, window: Window) -> None:
        """End a window at the peer, which answers once its lanes have stopped reading.

        If no lane of the peer has the window, the peer cannot read it by itself, and
        nothing has to be awaited. A peer that does not answer in time is cut off.
        """
        services = self._driver.services
        for shown in list(self.by_number.values()):
            if shown.window is window:
                self._driver.core.windows.hide(shown.number)
                if not shown.lanes:
                    del self.by_number[shown.number]
                    self._forget(shown)
                else:
                    timeout_s = services.config.close_timeout_s
                    services.loop.call_later(timeout_s, self._cut_off, shown.number)
        self._driver.run()

    def _cut_off(self, number: int) -> None:
        """End the connection of a peer that holds on to a closed window."""
        shown = self.by_number.get(number)
        if shown is not None:
            name = shown.window.name
            timeout_s = self._driver.services.config.close_timeout_s
            why = f"the peer still reads window {name!r}, closed {timeout_s:g} s ago"
            self._driver.core.fail(ConnectionLost(why))
            self._driver.run()

    def _forget(self, shown: ShownWindow) -> None:
        window = shown.window
        others = [one for one in self.by_number.values() if one.window is window]
        if not others:
            for endpoint, memory in shown.lanes:
                if self._driver.lanes.knows(endpoint.lane):
                    endpoint.lane.conceal(memory)
        elif shown.lanes:
            others[0].lanes += shown.lanes
        window._released()
        if not self.by_number:
            self._table.closing.pop(self._hide, None)

    def _left(self, event: WindowLeft) -> None:
        shown = self.by_number.pop(event.window, None)
        if shown is not None:
            self._forget(shown)

    def end(self) -> None:
        """End all windows, because the connection ends."""
        windows = list(self.by_number.values())
        self.by_number.clear()
        for shown in windows:
            self._forget(shown)
