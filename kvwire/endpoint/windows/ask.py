"""Gets from a window by messages; gets in the same loop turn share a request.

A request contains the blocks of one or several reads, in the order of groups; its size
is bounded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvwire.endpoint.windows.fields import unpacked
from kvwire.endpoint.windows.opened import OpenedWindow
from kvwire.endpoint.windows.reading import Part, Reading
from kvwire.endpoint.windows.view import WindowView
from kvwire.errors import (
    BackendUnavailable,
    KVWireError,
    ProtocolError,
    UsageError,
)
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments, concatenated
from kvwire.limits import (
    KV_PIECES_MAX,
    WINDOW_DATA_ASKED_MAX,
    WINDOW_GET_BLOCKS_MAX,
    WINDOW_GET_BYTES_MAX,
)
from kvwire.proto.events import RequestDone
from kvwire.proto.records import RequestRecord
from kvwire.wire.control import WindowGet, WindowGot

_U4: Final = np.dtype("<u4")


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
