"""Blocks of a window: offered blocks land, and all others are missing.

A lane that reads the peer's memory in place does so here. Over links and other lanes,
the owner sends the blocks, and compares their generations before and after; this is
correct only if the owner gets its memory back when nothing reads it any more.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np

from kvwire.backend.window import BlockRead, WindowMemory, WindowReader
from kvwire.errors import BackendUnavailable, ConnectionLost
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.fragments import Array, Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX, KIB
from kvwire.memory.arena import Arena
from kvwire.memory.generations import ENTRY_BYTES, Generations
from kvwire_certify.conformance.check import Group, require
from kvwire_certify.conformance.content import Memory
from kvwire_certify.conformance.rig import AnyRig, LaneRig
from kvwire_certify.conformance.sides import LaneSide

windows: Group = Group("windows")

_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 256 * KIB
_WORDS: Final = _BLOCK_BYTES // 8
# The number of gets while an owner changes blocks: a faulty lane lets a wrong block
# land within a few of them.
_GETS: Final = 60
_NUMBERS: Final = np.arange(_WORDS, dtype=np.uint64)


class _Lent(Memory):
    """Blocks as the memory of a payload."""

    def __init__(self, words: Array, ids: Ids) -> None:
        super().__init__(0)
        self.nbytes = _BLOCK_BYTES * ids.size
        places = _address(words) + ids.astype(np.uint64) * np.uint64(_BLOCK_BYTES)
        self.payload = Fragments.uniform(
            places, _BLOCK_BYTES, owner=words, writable=True
        )


class _Window:
    """Blocks of one side, and the other side's memory for reading them.

    Each word of a block is the generation under which it is offered, plus its number.

    Attributes:
        offered: The generation under which each block can be read now.
        reader: Reads them in place; None if they are sent.
    """

    def __init__(self, rig: AnyRig, left: Any, right: Any) -> None:
        self._rig = rig
        self._left = left
        self._right = right
        self._right.trusting = False
        # A lane of one host maps an arena, and reads other memory by system calls.
        self.arena: Arena | None = None
        self._data: Array = np.zeros((_BLOCKS, _WORDS), np.uint64)
        if sys.platform == "linux":
            self.arena = Arena(self._data.nbytes)
            self._data = self.arena.numpy((_BLOCKS, _WORDS), np.uint64)
        self.mine: Array = np.zeros((_BLOCKS, _WORDS), np.uint64)
        self.generations: Generations = Generations(_BLOCKS)
        self.offered: Array = np.zeros(_BLOCKS, np.uint64)
        self.memory: WindowMemory = WindowMemory(
            spans=((int(_address(self._data)), self._data.nbytes),),
            table=(self.generations.address, ENTRY_BYTES * _BLOCKS),
        )
        self.reader: WindowReader | None = None
        self.offer(np.arange(_BLOCKS))

    async def open(self) -> None:
        """Expose the blocks, if the lane reads windows."""
        if not isinstance(self._left, LaneSide) or not self._left.lane.reads_windows:
            return
        try:
            description = self._left.lane.expose(self.memory)
            size = len(description)
            require(size <= DESCRIPTOR_BYTES_MAX, f"a description of {size} bytes")
            reader = self._right.lane.window(description, self.memory)
            await self._rig.within(reader.ready(), "the window's reader is ready")
        except BackendUnavailable:
            return
        self.reader = reader

    async def close(self) -> None:
        """End the reader, and wait until it is quiet."""
        if self.reader is not None:
            reader = self.reader
            reader.close()
            await self._rig.until(lambda: not reader.busy, "a closed reader is quiet")
            self._left.lane.conceal(self.memory)

    def offer(self, ids: Ids) -> None:
        """Write to withdrawn blocks, and offer them."""
        found = self.generations.current(ids)
        for block, generation in zip(ids.tolist(), found, strict=True):
            np.add(_NUMBERS, generation, out=self._data[block])
        self.offered[ids] = found

    def withdraw(self, ids: Ids) -> None:
        """Withdraw blocks, and overwrite them."""
        self.generations.renew(ids)
        self._data[ids] = 0

    async def get(self, ids: Ids, tickets: Array) -> Bits:
        """Read blocks to the same places here; return which have landed."""
        if self.reader is not None:
            return await self.read(self.batch(ids, tickets))
        landed = self.generations.same(ids, tickets)
        chosen = ids[landed]
        if chosen.size:
            await self._send(chosen)
            landed[landed] = self.generations.same(chosen, tickets[landed])
        return landed

    async def read(self, batch: BlockRead) -> Bits:
        """Read a batch in place."""
        assert self.reader is not None
        found = self.reader.read(batch)
        if isinstance(found, asyncio.Future):
            found = await self._rig.within(found, "a read of blocks ends")
        size = batch.entries.size
        require(found.shape == (size,), f"{found.shape} results for {size} blocks")
        return found

    async def _send(self, ids: Ids) -> None:
        self._right.land = lambda item: _Lent(self.mine, ids)
        count = len(self._right.arrived) + 1
        self._left.queue(_BLOCK_BYTES * ids.size, memory=_Lent(self._data, ids))
        self._left.flush()
        self._right.take()
        await self._rig.moved(self._left, self._right, count)

    def batch(self, ids: Ids, tickets: Array) -> BlockRead:
        """Return blocks as the batch for a reader in place."""
        offsets = ids.astype(np.uint64) * np.uint64(_BLOCK_BYTES)
        return BlockRead(
            pieces_from=np.array([_address(self._data)], np.uint64),
            pieces_to=np.array([_address(self.mine)], np.uint64),
            run=_BLOCK_BYTES,
            offsets_from=offsets,
            offsets_to=offsets.copy(),
            entries=ids.astype(np.uint64),
            generations=np.ascontiguousarray(tickets),
            per_block=1,
            owner=self.mine,
        )

    def require_right(self, ids: Ids, tickets: Array, landed: Bits) -> None:
        """Require that landed blocks have the content of their tickets."""
        for block, ticket in zip(ids[landed].tolist(), tickets[landed], strict=True):
            wrong = int(np.count_nonzero(self.mine[block] != _NUMBERS + ticket))
            require(
                not wrong,
                f"block {block} has landed with {8 * wrong} of {_BLOCK_BYTES} bytes "
                "that were not offered",
            )


@asynccontextmanager
async def _opened(rig: AnyRig, left: Any, right: Any) -> AsyncIterator[_Window]:
    window = _Window(rig, left, right)
    try:
        await window.open()
        yield window
        await window.close()
    finally:
        window.generations.close()
        if window.arena is not None:
            window.arena.release()


@windows.both("offered", "Offered blocks land, and nothing else is written")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    async with _opened(rig, left, right) as window:
        ids = np.array([3, 4, 11, 0], np.int64)
        tickets = window.offered[ids]
        landed = await window.get(ids, tickets)
        require(bool(landed.all()), f"{int((~landed).sum())} blocks are missing")
        window.require_right(ids, tickets, landed)
        beside = np.setdiff1d(np.arange(_BLOCKS), ids)
        require(not window.mine[beside].any(), "memory beside the blocks was written")


@windows.both("withdrawn", "A block that was withdrawn is missing; the others land")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    async with _opened(rig, left, right) as window:
        ids = np.arange(8, dtype=np.int64)
        tickets = window.offered[ids]
        window.withdraw(ids[2:4])
        for _ in range(2):
            landed = await window.get(ids, tickets)
            require(not landed[2:4].any(), "a withdrawn block has landed")
            require(int(landed.sum()) == 6, "an offered block is missing")
            window.require_right(ids, tickets, landed)
            window.offer(ids[2:4])  # with new generations


@windows.both("changing", "While the owner changes blocks, no torn or old block lands")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    async with _opened(rig, left, right) as window:
        over = threading.Event()
        changing = threading.Thread(target=_change, args=(window, over), daemon=True)
        changing.start()
        try:
            for _ in range(_GETS):
                ids = np.arange(_BLOCKS, dtype=np.int64)
                tickets = window.offered.copy()
                landed = await window.get(ids, tickets)
                window.require_right(ids, tickets, landed)
                await asyncio.sleep(0)
        finally:
            over.set()
            changing.join()


def _change(window: _Window, over: threading.Event) -> None:
    chance = np.random.default_rng(1)
    while not over.is_set():
        ids = chance.choice(_BLOCKS, 4, replace=False)
        window.withdraw(ids)
        window.offer(ids)


@windows.both(
    "forged", "Guessed generations, and entries beyond the table, are missing"
)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    async with _opened(rig, left, right) as window:
        ids = np.array([0, 1, 2], np.int64)
        tickets = window.offered[ids] + np.array([0, 1, 0], np.uint64)
        landed = await window.get(ids, tickets)
        require(landed.tolist() == [True, False, True], f"landed: {landed}")
        if window.reader is None:
            return
        before = window.mine.copy()
        for block in (_BLOCKS, 2**40, 2**63):
            batch = window.batch(ids, window.offered[ids])
            batch.entries[1] = block
            landed = await window.read(batch)
            require(not landed[1], f"entry {block} of {_BLOCKS} has landed")
        for offset in (_BLOCKS * _BLOCK_BYTES, 2**62, 2**64 - _BLOCK_BYTES):
            batch = window.batch(ids, window.offered[ids])
            batch.offsets_from[1] = offset
            batch.offsets_to[1] = 3 * _BLOCK_BYTES
            landed = await window.read(batch)
            require(
                not landed[1], f"a block {offset} bytes behind the first one was read"
            )
        same = bool((window.mine[3:] == before[3:]).all())
        require(same, "memory from beyond the window was copied")


@windows.lanes("closed", "A closed reader stops reading, and writes nothing")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    async with _opened(rig, left, right) as window:
        reader = window.reader
        ids = np.arange(_BLOCKS, dtype=np.int64)
        if reader is None:
            return
        found = reader.read(window.batch(ids, window.offered))
        reader.close()
        if isinstance(found, asyncio.Future):
            await rig.within(asyncio.wait({found}), "a read ends after close")
            found.exception()
        await rig.until(lambda: not reader.busy, "a closed reader is quiet")
        window.mine[:] = 0
        try:
            again = reader.read(window.batch(ids, window.offered))
            if isinstance(again, asyncio.Future):
                await rig.within(again, "a read after close fails")
        except ConnectionLost:
            pass
        else:
            require(False, "a closed reader still reads")
        await rig.settle()
        require(not window.mine.any(), "memory was written after the end")


@windows.lanes("ended", "If its lane ends, a read is right or raises ConnectionLost")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    async with _opened(rig, left, right) as window:
        reader = window.reader
        if reader is None:
            return
        ids = np.arange(_BLOCKS, dtype=np.int64)
        tickets = window.offered.copy()
        for ends in (None, left, right):
            if ends is not None:
                ends.abort()
            try:
                landed = await window.read(window.batch(ids, tickets))
            except ConnectionLost:
                continue
            window.require_right(ids, tickets, landed)
            require(bool(landed.all()), "an offered block is missing")
        await rig.closes(left, right)


def _address(array: Array) -> np.uint64:
    return np.uint64(array.__array_interface__["data"][0])
