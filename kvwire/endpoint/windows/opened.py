"""A peer's windows that this side has opened, on one connection.

For each window the reader keeps its geometry, the local caches that it is read into,
and the object that reads it in place.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakKeyDictionary

from kvwire.aio import TurnBudget, start_task
from kvwire.backend.window import WindowMemory, WindowReader
from kvwire.driver.connection_driver import ConnectionDriver, EventActs
from kvwire.driver.lanes.state import LaneEndpoint, LaneState
from kvwire.endpoint.windows.fields import decode_memory, encode_geometry, read_geometry
from kvwire.endpoint.windows.map import PeerGroup
from kvwire.endpoint.windows.view import WindowView
from kvwire.errors import (
    BackendUnavailable,
    ConnectionClosed,
    ConnectionLost,
    KVWireError,
    ProfileMismatch,
    ProtocolError,
    UsageError,
    check_name,
)
from kvwire.kv.geometry import Geometry
from kvwire.kv.paged import PagedCache
from kvwire.limits import WINDOW_GEOMETRY_BYTES_MAX, WINDOW_VIEWS_MAX
from kvwire.proto.events import RequestDone, WindowClosed, WindowMemoryOffered
from kvwire.wire.control import WindowOpened, WindowViewBody

logger: logging.Logger = logging.getLogger("kvwire.windows")


class OpenedWindow:
    """A window of the peer, open on one connection.

    Attributes:
        number: Its number on that connection.
        serial: The serial number in its tickets.
        together: The most bytes that the owner sends in one frame.
        geometry: The geometry of the owner's cache.
        first: The first table entry of each group, followed by the total number of
            entries.
        reader: Reads the window in place, without asking; None while it is read by
            messages.
        prepared: Done once ``reader`` is ready or has failed; None if there is no lane.
        gone: The reason why it can no longer be read, or "".
        turn: Bounds the bytes that are read in place in one turn of the loop, with a
            fixed amount per read.
    """

    def __init__(self, windows: PeerWindows, answer: WindowOpened) -> None:
        self.windows = windows
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
        # A reader that is not ready yet; and the lane of that reader, or of ``reader``.
        self._coming: WindowReader | None = None
        self._lane: LaneEndpoint | None = None
        self._under_way: set[asyncio.Future[Any]] = set()
        self.memory: tuple[WindowMemory, tuple[PeerGroup, ...]] | None = None
        self.gone: str = ""
        self.turn: TurnBudget = TurnBudget(WindowReader.turn_bytes)
        self._views: WeakKeyDictionary[PagedCache, WindowView] = WeakKeyDictionary()
        self._numbers: dict[bytes, int] = {}  # bounded: WINDOW_VIEWS_MAX

    def view(self, cache: PagedCache) -> WindowView:
        """Return the map from its blocks to the blocks of a local cache.

        Raises:
            ProfileMismatch: The two caches do not fit together.
        """
        view = self._views.get(cache)
        if view is None:
            view = self._views[cache] = WindowView(self.geometry, cache)
        return view

    def number_of(self, view: WindowView) -> int:
        """Return the view's number on this connection, once the owner knows it.

        Raises:
            UsageError: There are too many views with different geometries, or too many
                groups.
        """
        if view.number is not None:
            return view.number
        geometry = encode_geometry(view.geometry)
        if len(geometry) > WINDOW_GEOMETRY_BYTES_MAX:
            raise UsageError("this cache has too many groups to describe")
        number = self._numbers.get(geometry)
        if number is None:
            number = len(self._numbers)
            if number >= WINDOW_VIEWS_MAX:
                raise UsageError(
                    f"{WINDOW_VIEWS_MAX} caches of different shapes already read this "
                    "window, which is the limit"
                )
            self._numbers[geometry] = number
            core = self.windows.driver.core
            core.windows.report(WindowViewBody(self.number, number, geometry))
        view.number = number
        return number

    def adopt(self, lane: int, memory: bytes, access: bytes) -> None:
        """From now on, read the window in place, over the lane with this number.

        Raises:
            ProtocolError: The owner's description of its memory is invalid.
        """
        endpoint = self.windows.driver.lanes.find(lane)
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

        Cancel safety: it is only cancelled together with its loop.
        """
        try:
            await coming.ready()
        except KVWireError as exc:
            self.lost(coming, exc)
        else:
            if self._coming is coming:
                self.reader = coming
                self.turn = TurnBudget(coming.turn_bytes)
                self._coming = None

    def lost(self, reader: WindowReader, error: KVWireError) -> None:
        """From now on read by messages, because the reader has failed."""
        if reader in (self.reader, self._coming):
            logger.info("a window is read by messages: %s", error)
            self.drop_reader()
        if isinstance(error, ProtocolError):
            self.windows.driver.core.fail(error)
            self.windows.driver.run()

    def drop_reader(self) -> None:
        """From now on read by messages only."""
        for reader in (self.reader, self._coming):
            if reader is not None:
                reader.close()
                if reader.quiet is not None:
                    self.note(reader.quiet)
        self.reader = None
        self._coming = None
        self._lane = None

    def note(self, read: asyncio.Future[Any]) -> None:
        """Record a read in place, or its memory, so that the owner waits for it."""
        self._under_way.add(read)  # bounded: one for each get
        read.add_done_callback(self._over)

    def read_begun(self, read: asyncio.Future[Any]) -> None:
        """Record a read in place, which fails its lane if it does not end."""
        self.note(read)
        if self._lane is not None:
            lanes = self.windows.driver.core.lanes
            number = self._lane.number
            lanes.read_begun(number)
            read.add_done_callback(lambda _: lanes.read_over(number))

    def close(self) -> None:
        """Close it, and notify the owner once nothing here reads its memory."""
        self.gone = self.gone or "gone: this side closed the window"
        self.drop_reader()
        if not self._under_way:
            self.windows.closed(self)

    def _over(self, read: asyncio.Future[Any]) -> None:
        self._under_way.discard(read)
        if self.gone and not self._under_way:
            self.windows.closed(self)


class WindowOpening:
    """A requested window of the peer, before the answer.

    Attributes:
        found: A future for the opened window.
    """

    def __init__(
        self, windows: PeerWindows, found: asyncio.Future[OpenedWindow]
    ) -> None:
        self._windows = windows
        self.found: asyncio.Future[OpenedWindow] = found

    def done(self, event: RequestDone) -> None:
        """Handle the answer."""
        answer = event.request.answer
        event.request.context = None
        windows = self._windows
        if event.error is not None:
            if not self.found.done():
                self.found.set_exception(event.error)
            return
        assert isinstance(answer, WindowOpened)
        try:
            opened = OpenedWindow(windows, answer)
        except ProfileMismatch as exc:
            # What this side cannot read concerns this window alone.
            windows.refuse(answer.window)
            if not self.found.done():
                self.found.set_exception(exc)
            return
        try:
            windows.by_number[opened.number] = opened  # bounded: WINDOWS_OPEN_MAX
            if answer.lane:
                opened.adopt(answer.lane, answer.memory, answer.access)
        except KVWireError as exc:
            windows.driver.core.fail(exc)
            if not self.found.done():
                self.found.set_exception(exc)
            return
        if self.found.done():
            opened.close()
        else:
            self.found.set_result(opened)


class PeerWindows:
    """The peer's windows that this side has opened on one connection.

    Attributes:
        driver: Runs the connection.
        by_number: The windows by their numbers.
        asked_bytes: The bytes of small gets that were requested and have not arrived.
    """

    def __init__(self, driver: ConnectionDriver) -> None:
        self.driver = driver
        self.by_number: dict[int, OpenedWindow] = {}  # bounded: WINDOWS_OPEN_MAX
        self.asked_bytes: int = 0
        self._ended = False

    def acts(self) -> EventActs:
        """Return the handler of each window event."""
        return {
            WindowMemoryOffered: self._memory_offered,
            WindowClosed: self._closed,
        }

    async def open(self, name: str, deadline: float | None) -> OpenedWindow:
        """Open a window of the peer.

        Raises:
            UsageError: No window can have this name.
            KVWireError: The peer has no such window, or the connection ended.

        Cancel safety: safe, a window that opens too late is closed again.
        """
        check_name("window: name", name)
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
                # A peer can delay its part of the lane for ever. Until the lane is
                # ready, the window is read by messages.
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
        finally:
            del waiting  # its error refers to this frame
        return opened

    def _memory_offered(self, event: WindowMemoryOffered) -> None:
        body = event.body
        opened = self.by_number.get(body.window)
        if opened is None:
            return
        try:
            opened.adopt(body.lane, body.memory, body.access)
        except ProtocolError as exc:
            self.driver.core.fail(exc)

    def _closed(self, event: WindowClosed) -> None:
        opened = self.by_number.get(event.window)
        if opened is not None:
            opened.gone = "withdrawn: the window was closed"
            opened.close()

    def closed(self, opened: OpenedWindow) -> None:
        """Notify the owner that this side has stopped reading a window."""
        if self.by_number.pop(opened.number, None) is not None and not self._ended:
            self.refuse(opened.number)

    def refuse(self, number: int) -> None:
        """Notify the owner that this side does not read a window."""
        self.driver.core.windows.close(number)
        self.driver.run()

    def end(self, error: ConnectionClosed) -> None:
        """End all windows, because the connection ends."""
        self._ended = True
        for opened in self.by_number.values():
            opened.gone = f"gone: {error}"
            # Mapped pages outlive the connection, and reads from them are still
            # correct, because a writer renews a block's generation before it writes.
            if opened.reader is not None and not opened.reader.outlives_lane:
                opened.drop_reader()
        self.by_number.clear()
