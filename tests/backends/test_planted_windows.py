"""Bugs of windows, planted in lanes of `inproc` that read them, and in the others."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvwire.backend import BlockRead, WindowMemory, WindowReader
from kvwire.errors import ConnectionLost
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Fragments
from kvwire.memory.generations import require_order
from kvwire_certify.conformance import check_lanes
from kvwire_certify.conformance.runner import LANE_CHECKS
from kvwire_inproc.lane import InprocLane
from tests.backends.planted import Plant, expect_found, expect_found_in

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


def reads_windows(patch: pytest.MonkeyPatch) -> None:
    """Let lanes of `inproc` read windows, as they should."""
    patch.setattr(InprocLane, "reads_windows", True)
    patch.setattr(InprocLane, "expose", lambda self, memory: b"window")
    patch.setattr(InprocLane, "conceal", lambda self, memory: None)
    patch.setattr(
        InprocLane, "window", lambda self, description, memory: InprocWindow(memory)
    )


def reader_with(method: str, bug: Any) -> Plant:
    """A bug of the reader above."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        reads_windows(patch)
        patch.setattr(InprocWindow, method, bug)

    return plant


def _says_that_all_is_well(self: InprocWindow, batch: BlockRead) -> Bits:
    return np.ones(batch.entries.size, np.bool_)


def _fails_with_another_error(self: InprocWindow, batch: BlockRead) -> Bits:
    raise KeyError("no lane")


BUGS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "does not look again": (
        "looks_after",
        lambda self, entry, ticket: True,
        ("windows.changing",),
    ),
    "does not look at all": (
        "looks_before",
        lambda self, entry, ticket: True,
        ("windows.withdrawn", "windows.forged", "windows.changing"),
    ),
    "reads after close": ("check", lambda self: None, ("windows.closed",)),
    "copies nothing": ("read", _says_that_all_is_well, ("windows.offered",)),
    "raises anything": ("read", _fails_with_another_error, ("windows.ended",)),
}


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("name", BUGS)
async def test_a_reader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, bug, checks = BUGS[name]
    await expect_found(check_lanes, *checks)(reader_with(method, bug))(monkeypatch)


_right_look = InprocWindow.looks_before


@expect_found(check_lanes, "windows.forged")
def test_believes_entries_beyond_the_table(patch: pytest.MonkeyPatch) -> None:
    reads_windows(patch)

    def inside(self: InprocWindow, origin: int, run: int, entry: int) -> bool:
        return 0 <= origin - self._start <= self._nbytes - run

    def looks(self: InprocWindow, entry: int, ticket: int) -> bool:
        return entry >= self._entries or _right_look(self, entry, ticket)

    patch.setattr(InprocWindow, "inside", inside)
    patch.setattr(InprocWindow, "looks_before", looks)


async def test_a_lane_that_reads_windows_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader in which the bugs are planted has none by itself."""
    reads_windows(monkeypatch)
    checks = [c.id for c in LANE_CHECKS if c.id.startswith("windows.")]
    report = await check_lanes("inproc", only=checks)
    assert len(report.passed) == len(checks) == 6


@expect_found_in(InprocLane.send, check_lanes, "windows.changing")
def test_sends_what_the_memory_held_before(
    send: Any, self: InprocLane, payload: Any, token: object
) -> bytes:
    """What a window that is read by messages does not survive."""
    assert isinstance(payload, Fragments)
    places = zip(payload.addresses.tolist(), payload.lengths.tolist(), strict=True)
    now = b"".join(ctypes.string_at(*place) for place in places)
    kept = self.__dict__.setdefault("kept", {}).setdefault(len(now), now)
    return bytes(send(self, memoryview(bytearray(kept)), token))
