"""Bugs of windows, planted in lanes of `inproc` that read them."""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable
from typing import Any

import numpy as np

from kvwire.backend import BlockRead, WindowMemory, WindowReader
from kvwire.backend.lane import Lane, LaneContext
from kvwire.errors import ConnectionLost
from kvwire.kv.blocks import Bits
from kvwire.memory.generations import require_order
from kvwire_certify.conformance import Report, check_lanes
from kvwire_certify.conformance.runner import LANE_CHECKS
from kvwire_inproc import InprocBackend
from kvwire_inproc.lane import InprocLane
from tests.backends.planted import expect_found_in

_ENTRY_BYTES = 8


class InprocWindow(WindowReader):
    """Reads a window of this process, a block at a time: as short as it can be."""

    way = "inproc"
    immediate = True

    def __init__(self, memory: WindowMemory) -> None:
        require_order()
        ((self._start, self._nbytes),) = memory.spans
        self._table, nbytes = memory.table
        self._entries = nbytes // _ENTRY_BYTES
        self._closed = False

    def read(self, batch: BlockRead) -> Bits:
        self.check()
        landed = np.zeros(batch.entries.size, np.bool_)
        for block in range(landed.size):
            origin = (
                int(batch.pieces_from[0]) + int(batch.offsets_from[block])
            ) % 2**64
            target = int(batch.pieces_to[0]) + int(batch.offsets_to[block])
            entry = int(batch.entries[block])
            if not self.inside(origin, batch.run, entry):
                continue
            ticket = int(batch.generations[block])
            if self.looks_before(entry, ticket):
                for part in range(0, batch.run, 4096):
                    ctypes.memmove(target + part, origin + part, 4096)
                landed[block] = self.looks_after(entry, ticket)
        return landed

    def check(self) -> None:
        if self._closed:
            raise ConnectionLost("the reader is closed")

    def inside(self, origin: int, run: int, entry: int) -> bool:
        first = origin - self._start
        return 0 <= first <= self._nbytes - run and entry < self._entries

    def looks_before(self, entry: int, ticket: int) -> bool:
        address = self._table + _ENTRY_BYTES * entry
        return ctypes.c_uint64.from_address(address).value == ticket

    def looks_after(self, entry: int, ticket: int) -> bool:
        return self.looks_before(entry, ticket)

    def close(self) -> None:
        self._closed = True


class WindowLane(InprocLane):
    """A lane of `inproc` that reads windows, as it should."""

    reads_windows = True

    def expose(self, memory: WindowMemory) -> bytes:
        return b"window"

    def conceal(self, memory: WindowMemory) -> None:
        pass

    def window(self, description: bytes, memory: WindowMemory) -> WindowReader:
        return InprocWindow(memory)


class WindowBackend(InprocBackend):
    def open_lane(self, context: LaneContext) -> Lane:
        return WindowLane()


def check_windows(_: str, **named: Any) -> Awaitable[Report]:
    """The kit, with lanes that read windows."""
    return check_lanes(WindowBackend, **named)


@expect_found_in(InprocWindow.looks_after, check_windows, "windows.changing")
def test_does_not_look_again(*_: Any) -> bool:
    return True


@expect_found_in(
    InprocWindow.looks_before,
    check_windows,
    *("windows.withdrawn", "windows.forged", "windows.changing"),
)
def test_does_not_look_at_all(*_: Any) -> bool:
    return True


@expect_found_in(InprocWindow.check, check_windows, "windows.closed")
def test_reads_after_close(*_: Any) -> None:
    pass


@expect_found_in(InprocWindow.read, check_windows, "windows.offered")
def test_copies_nothing(read: Any, self: InprocWindow, batch: BlockRead) -> Bits:
    return np.ones(batch.entries.size, np.bool_)


@expect_found_in(InprocWindow.read, check_windows, "windows.ended")
def test_raises_anything(*_: Any) -> Bits:
    raise KeyError("no lane")


@expect_found_in(InprocWindow.inside, check_windows, "windows.forged")
def test_believes_entries_beyond_the_table(
    inside: Any, self: InprocWindow, origin: int, run: int, entry: int
) -> bool:
    """And what it finds there."""
    if entry >= self._entries:
        self.looks_before = lambda *_: True  # type: ignore[method-assign]
    return bool(inside(self, origin, run, 0))


async def test_a_lane_that_reads_windows_passes() -> None:
    """The reader in which the bugs are planted has none by itself."""
    checks = [c.id for c in LANE_CHECKS if c.id.startswith("windows.")]
    report = await check_lanes(WindowBackend, only=checks)
    assert len(report.passed) == len(checks) == 6
