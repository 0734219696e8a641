"""Windows of a simulated application: exposed, opened, read, renewed and closed.

A window is a row of blocks, each with content of its own and a generation that names
it. Its owner renews a generation and writes to the block at once, whoever reads it. A
reader learns generations beside the protocol, as tickets, and keeps some until they are
old. It is careless: it names views that it never reported and windows that are closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import ProfileMismatch, StaleRegion, UsageError
from kvwire.limits import WINDOW_DATA_BYTES_MAX
from kvwire.proto import events
from kvwire.proto.state import RequestKind
from kvwire.wire.control import WindowGet, WindowOpened, WindowViewBody
from tests.programs.sim.ask import (
    Ask,
    OpenedWindow,
    Serving,
    ShownWindow,
    SimWindow,
    Ticket,
)
from tests.programs.sim.endpoint import Endpoint
from tests.programs.sim.memory import content, demand
from tests.programs.sim.plan import Dice

if TYPE_CHECKING:
    from tests.programs.sim.node import Node
    from tests.programs.sim.world import World

_WINDOWS_MAX: Final = 3
_VIEWS_MAX: Final = 3
_SERIAL: Final = bytes(16)
_UNKNOWN: Final = "nothing of this name"


class WindowApp:
    """What an application does with windows, as their owner and as their reader."""

    def __init__(self, world: World, node: Node) -> None:
        self.windows: dict[str, SimWindow] = {}
        self._world = world
        self._node = node
        self._acts: dict[type, Callable[[Endpoint, Any], None]] = {
            events.WindowAsked: self._asked,
            events.WindowViewed: self._viewed,
            events.WindowRead: self._read,
            events.WindowReadTogether: self._read_together,
            events.WindowSent: self._sent,
            events.WindowClosed: self._closed,
            events.WindowLeft: self._left,
        }

    # --- owner ------------------------------------------------------------------------

    def expose(self, endpoint: Endpoint, dice: Dice) -> None:
        """Let every peer read a cache, which is full of blocks."""
        if len(self.windows) >= _WINDOWS_MAX:
            return
        world, node = self._world, self._node
        count, block_bytes = 1 + dice.below(8), max(1, endpoint.size(dice))
        lease = node.memory(count * block_bytes, readable=True)
        name = f"window {world.next_serial()}"
        waits = dice.one_in(2)
        window = SimWindow(name, lease, block_bytes, waits=waits)
        self.windows[name] = window
        for block in range(count):
            window.generations.append(0)
            self._fill(window, block)
        world.note(node.name, "exposes", count, block_bytes)

    def renew(self, dice: Dice) -> None:
        """Take some blocks back and write to them, whoever reads them now."""
        window = dice.pick(list(self.windows.values()))
        if window is not None:
            for _ in range(1 + dice.below(3)):
                self._fill(window, dice.below(len(window.generations)))
            self._world.note(self._node.name, "renews", window.name)

    def close_one(self, dice: Dice) -> None:
        """Close a window; its memory is free when nobody reads it any more."""
        window = dice.pick(list(self.windows.values()))
        if window is None:
            return
        self._world.note(self._node.name, "closes window", window.name)
        del self.windows[window.name]
        window.closed = True
        for endpoint in self._node.endpoints:
            if endpoint.ended is None:
                self._hide(endpoint, window)
        window.release_if_unused()

    def close_all(self) -> None:
        while self.windows:
            self.close_one(Dice(0))

    # --- reader -----------------------------------------------------------------------

    def open(self, endpoint: Endpoint, dice: Dice) -> None:
        """Open a window of the peer; now and then one that is not there."""
        peer = endpoint.peer
        theirs = [] if peer is None else list(peer.node.app.windows.windows.values())
        window = None if dice.one_in(12) else dice.pick(theirs)
        name = window.name if window else "no window"
        deadline = endpoint.deadline(dice)
        ask = Ask(endpoint, RequestKind.OPEN_WINDOW, 0, deadline=deadline)
        ask.window = window
        core = endpoint.core
        self._node.app.start(ask, lambda _: core.open_window(name, deadline), None)

    def get(self, endpoint: Endpoint, dice: Dice) -> None:
        """Read some blocks, in chunks or together; not always what is still there."""
        every = [*endpoint.opened.values()] * 12 + endpoint.closed_windows
        opened = dice.pick(every)
        if opened is None:
            return
        window = opened.window
        ticket = self._ticket(window, dice)
        view = dice.below(_VIEWS_MAX)
        if view not in opened.views and dice.below(8) and not opened.closed:
            geometry = b"view %d" % self._world.next_serial()
            opened.views[view] = geometry
            body = WindowViewBody(opened.number, view, geometry)
            endpoint.core.windows.report(body)
            endpoint.collect()
        count = len(ticket.generations)
        nbytes, deadline = count * window.block_bytes, endpoint.deadline(dice)
        together = dice.one_in(2) and nbytes <= WINDOW_DATA_BYTES_MAX
        ask = Ask(endpoint, RequestKind.READ, nbytes, deadline=deadline)
        ask.window, ask.ticket, ask.opened = window, ticket, opened
        ask.read = bytearray(nbytes)
        named = WindowGet(
            opened.number,
            view,
            nbytes,
            (count,),
            struct.pack(f"<{count}I", *range(ticket.first, ticket.first + count)),
            struct.pack(f"<{count}Q", *ticket.generations),
            together=together,
        )
        ask.blind = view not in opened.views
        core = endpoint.core
        self._node.app.start(
            ask,
            lambda lent: core.read_window(lent, named, deadline),
            None if together else b"\xee" * nbytes,
        )

    def close(self, endpoint: Endpoint, dice: Dice) -> None:
        """Read a window of the peer no more."""
        opened = dice.pick(list(endpoint.opened.values()))
        if opened is not None:
            self._world.note(endpoint.name, "reads no more", opened.number)
            self._report_closed(endpoint, opened)

    def opened(self, ask: Ask) -> None:
        """An opening has ended well."""
        endpoint, answer = ask.endpoint, ask.core.answer
        assert isinstance(answer, WindowOpened)
        window = ask.window
        demand(window, "window", "a window was opened that is not there")
        assert window is not None
        demand(
            answer.geometry == window.geometry, "window", "another window was opened"
        )
        demand(answer.window not in endpoint.opened, "window", "a number in use")
        opened = OpenedWindow(answer.window, window)
        endpoint.opened[answer.window] = opened

    # --- both -------------------------------------------------------------------------

    def event(self, endpoint: Endpoint, event: events.WindowEvent) -> None:
        """Deal with an event of the core that speaks of a window."""
        self._acts[type(event)](endpoint, event)

    def ended(self, endpoint: Endpoint) -> None:
        """The connection is over, and so are its windows, on either side."""
        shown_windows = list(endpoint.shown.values())
        endpoint.shown.clear()
        for shown in shown_windows:
            shown.window.unused()
        for opened in endpoint.opened.values():
            opened.closed = True
        endpoint.opened.clear()

    # --- inside: owner ----------------------------------------------------------------

    def _fill(self, window: SimWindow, block: int) -> None:
        generation = window.generations[block] = self._world.next_serial()
        data = content(window.block_bytes, generation)
        window.lease.store(block * window.block_bytes, data)

    def _hide(self, endpoint: Endpoint, window: SimWindow) -> None:
        for shown in list(endpoint.shown.values()):
            if shown.window is window:
                endpoint.core.windows.hide(shown.number)
                if not window.waits:
                    del endpoint.shown[shown.number]
                    window.unused()
        endpoint.collect()

    def _asked(self, endpoint: Endpoint, event: events.WindowAsked) -> None:
        endpoint.soon(self._answer, endpoint, event)

    def _answer(self, endpoint: Endpoint, event: events.WindowAsked) -> None:
        if endpoint.ended is not None:
            return
        windows, window = endpoint.core.windows, self.windows.get(event.name)
        answer: WindowOpened | str = _UNKNOWN
        if window is not None:
            try:
                number = windows.number()
            except UsageError as exc:
                small = self._world.plan.setup.small_tables
                demand(small, "limit", f"no room for a window: {exc}")
                answer = str(exc)
            else:
                demand(number not in endpoint.shown, "window", "a number twice")
                endpoint.shown[number] = ShownWindow(number, window)
                window.users += 1
                answer = WindowOpened(number, _SERIAL, window.geometry)
        if isinstance(answer, str):
            endpoint.refused.add(event.wire_id)
        windows.answer(event.wire_id, answer)

    def _viewed(self, endpoint: Endpoint, event: events.WindowViewed) -> None:
        shown = endpoint.shown.get(event.body.window)
        if shown is not None:
            shown.views[event.body.view] = event.body.geometry

    def _find(self, endpoint: Endpoint, body: WindowGet) -> tuple[SimWindow, Ticket]:
        """What a get names.

        Raises:
            StaleRegion: The window was closed.
            ProfileMismatch: Its view was never reported.
        """
        shown = endpoint.shown.get(body.window)
        if shown is None or shown.window.closed:
            raise StaleRegion("the window was closed")
        if body.view not in shown.views:
            raise ProfileMismatch("no such view")
        window = shown.window
        blocks = [entry for (entry,) in struct.iter_unpack("<I", body.entries)]
        generations = [entry for (entry,) in struct.iter_unpack("<Q", body.generations)]
        demand(
            body.nbytes == len(blocks) * window.block_bytes
            and blocks[-1] < len(window.generations),
            "window",
            "a get of blocks that nobody has asked for",
        )
        return window, Ticket(blocks[0], tuple(generations))

    def _read(self, endpoint: Endpoint, event: events.WindowRead) -> None:
        request, windows = event.request, endpoint.core.windows
        try:
            window, ticket = self._find(endpoint, event.body)
        except (StaleRegion, ProfileMismatch) as exc:
            endpoint.refused.add(request.wire_id)
            endpoint.core.refuse(request, exc, exc.code)
            return
        stale = window.stale(ticket)
        if any(stale):
            self._world.note(endpoint.name, "window", "withheld")
            endpoint.core.finish_read(request, _packed(stale), sent=False)
            return
        begin = ticket.first * window.block_bytes
        window.users += 1
        buffer = self._node.share(window.lease, begin, event.body.nbytes, window.unused)
        endpoint.serving[request] = Serving(window, ticket, buffer)
        windows.serve(request, buffer)

    def _sent(self, endpoint: Endpoint, event: events.WindowSent) -> None:
        serving = endpoint.serving.get(event.request)
        demand(serving, "completion", "the bytes of a get have left twice")
        assert serving is not None
        stale = serving.window.stale(serving.ticket)
        if any(stale):
            self._world.note(endpoint.name, "window", "withdrawn in the middle")
        bits = _packed(stale) if any(stale) else b""
        endpoint.core.finish_read(event.request, bits, sent=True)

    def _read_together(
        self, endpoint: Endpoint, event: events.WindowReadTogether
    ) -> None:
        windows, wire_id = endpoint.core.windows, event.wire_id
        try:
            window, ticket = self._find(endpoint, event.body)
        except (StaleRegion, ProfileMismatch) as exc:
            endpoint.refused.add(wire_id)
            windows.refuse(wire_id, exc)
            return
        stale = window.stale(ticket)
        if any(stale):
            self._world.note(endpoint.name, "window", "withheld together")
            windows.withhold(wire_id, _packed(stale))
            return
        begin = ticket.first * window.block_bytes
        data = window.lease.load(begin, event.body.nbytes)
        endpoint.send_together(wire_id, data)

    # --- inside: reader ---------------------------------------------------------------

    def _ticket(self, window: SimWindow, dice: Dice) -> Ticket:
        """Blocks in a row, with their generations of now or of some time ago."""
        if window.tickets and dice.one_in(4):
            return window.tickets[dice.below(len(window.tickets))]
        first = dice.below(len(window.generations))
        count = 1 + dice.below(len(window.generations) - first)
        ticket = Ticket(first, tuple(window.generations[first : first + count]))
        window.tickets.append(ticket)
        return ticket

    def _left(self, endpoint: Endpoint, event: events.WindowLeft) -> None:
        shown = endpoint.shown.pop(event.window, None)
        if shown is not None:
            shown.window.unused()

    def _closed(self, endpoint: Endpoint, event: events.WindowClosed) -> None:
        opened = endpoint.opened.get(event.window)
        demand(opened, "window", "the end of a window that is not open")
        assert opened is not None
        demand(opened.window.closed, "untrue", "a window is over that is not")
        opened.ending = True
        endpoint.soon(self._answer_end, endpoint, opened)

    def _answer_end(self, endpoint: Endpoint, opened: OpenedWindow) -> None:
        """Answer the owner's WINDOW_CLOSE, after a last look at its memory."""
        peer = endpoint.peer
        if endpoint.ended is not None or opened.closed:
            return
        window = opened.window
        if window.waits and peer is not None and peer.ended is None:
            window.lease.read(0, window.lease.nbytes)
        self._report_closed(endpoint, opened)

    def _report_closed(self, endpoint: Endpoint, opened: OpenedWindow) -> None:
        opened.closed = True
        del endpoint.opened[opened.number]
        endpoint.closed_windows.append(opened)
        endpoint.core.windows.close(opened.number)
        endpoint.collect()


def unpacked(stale: bytes, count: int) -> list[bool]:
    """Which blocks of a get are stale, from the bits of WINDOW_GOT."""
    if not stale:
        return [False] * count
    bits = int.from_bytes(stale, "little")
    return [bool(bits >> block & 1) for block in range(count)]


def _packed(stale: list[bool]) -> bytes:
    bits = sum(is_stale << block for block, is_stale in enumerate(stale))
    return bits.to_bytes(-(-len(stale) // 8), "little")
