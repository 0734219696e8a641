"""A soak of windows: gets beside an owner that takes back, overwrites and offers.

An owner takes blocks back, overwrites them and offers them again, all the time and from
a thread of its own; now and then it closes the window, writes to all of its memory and
exposes it again. Readers in other processes get blocks by the tickets that stand on a
*board*, a file that both have mapped. Each word is of :mod:`kvwire_certify.oracle`: its
life is the generation under which its block is offered, which no other life of a block
has. So every byte of a block that has landed names its owner, life and place. What has
not landed may hold anything, but only until it is released: then it is filled with
poison, which has to be there still when the block is used again.

With ``--plant`` the second look is left out, and the soak has to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

import kvwire
import kvwire_ucx.windows
from kvwire.endpoint.windows.ticket import SERIAL_BYTES, read_ticket, write_ticket
from kvwire.kv.blocks import Bits, Ids
from kvwire.memory.generations import Generations
from kvwire_certify.oracle import Words
from kvwire_local import blocks
from tests.programs.soak.processes import say
from tests.support.caches import StampedCache
from tests.support.compiled import blind

LISTENING: Final = ("owner", "both")
# Blocks that were got, or were missing.
REACHED: Final = ("landed", "missing")
BLOCKS: Final = 64
# Large enough that a copy is often overtaken, small enough for many of them.
SPEC: Final = kvwire.KVSpec(
    layers=2, kv_heads=2, head_dim=128, block_tokens=16, dtype="float16", components=1
)
GETS_AT_ONCE: Final = 4
# What goes by messages is overtaken while it waits to be sent: there is much of it.
BLOCKS_EACH_MAX: Final = BLOCKS // GETS_AT_ONCE
CHANGED_AT_ONCE: Final = 3
# Gets between two lines that a reader prints.
_REPORT: Final = 50
# What a thread that holds the interpreter leaves to the one that serves gets.
_SWITCH_S: Final = 2e-4
_LIFE_S: Final = 1.0
_TRIES_S: Final = 0.05
_BOARD: Final = "board"


class Way(NamedTuple):
    """How windows are read.

    Attributes:
        prefer: The transport that is tried first.
        arena: The owner's cache lies in an arena.
        taken: What a reader reports as its way.
        block_tokens: The size of blocks. By messages some gets come in one frame then,
            and larger ones in chunks.
        pause_s: How long the owner's thread sleeps between two changes: it would
            otherwise keep the interpreter from the loop that serves gets.
    """

    prefer: str
    arena: bool
    taken: str
    pause_s: float = 0.0
    block_tokens: int = 16
    backends: Mapping[str, Mapping[str, str]] = MappingProxyType({})


WAYS: Final = MappingProxyType(
    {
        "mapped": Way("local", True, "mapped"),
        "process_vm_readv": Way("local", False, "process_vm_readv"),
        "tcp": Way("tcp", False, "messages", 2e-5, 32),
        "inproc": Way("inproc", False, "messages", 2e-5, 32),
        "ucx": Way(
            "ucx", False, "ucx", 2e-5, 16, {"ucx": {"TLS": "posix,sysv,cma,self,tcp"}}
        ),
    }
)


def roles(way: str) -> tuple[str, ...]:
    """The processes, in the order in which they are started."""
    return ("both",) if way == "inproc" else ("owner", "reader")


def prepare(folder: Path) -> None:
    """Make the board."""
    (folder / _BOARD).write_bytes(bytes(Board.NBYTES))


def options(way: str) -> dict[str, Any]:
    """The configuration of each process."""
    return {
        "prefer": (WAYS[way].prefer,),
        "one_sided_windows": "peers",
        "backends": WAYS[way].backends,
    }


async def live(
    role: str,
    comm: kvwire.Communicator,
    address: str,
    way: str,
    seed: int,
    stop: asyncio.Event,
    folder: Path,
) -> None:
    """Play a role until ``stop`` is set.

    Cancel safety: not safe; set `stop`.
    """
    board = Board(folder / _BOARD)
    sys.setswitchinterval(_SWITCH_S)
    async with contextlib.AsyncExitStack() as opened, asyncio.TaskGroup() as group:
        if role != "reader":
            group.create_task(Owner(board, WAYS[way], seed).run(comm, stop))
        if role == "both":
            # A reader in the owner's process.
            comm = await opened.enter_async_context(kvwire.open(name="soak-near"))
        if role != "owner":
            group.create_task(Reader(board, WAYS[way], seed).run(comm, address, stop))


def blocks_of(way: Way, *, arena: bool = False) -> StampedCache:
    """A cache for one of both sides."""
    spec = replace(SPEC, block_tokens=way.block_tokens)
    return StampedCache(spec, BLOCKS, arena=arena)


class Board:
    """The generations under which blocks are offered now, and the window's serial."""

    NBYTES: Final = SERIAL_BYTES + 8 * BLOCKS

    def __init__(self, path: Path) -> None:
        whole = np.memmap(path, np.uint8, "r+", shape=(self.NBYTES,))
        self.serial = whole[:SERIAL_BYTES]
        self.generations: Words = whole[SERIAL_BYTES:].view(np.uint64)

    def ticket(self, blocks: list[int]) -> tuple[bytes, Words]:
        """The ticket of some blocks, and its generations."""
        ids = np.array(blocks)
        generations = self.generations[ids].copy()
        serial = self.serial.tobytes()
        return write_ticket(serial, [ids.size], ids, generations), generations


# --- the owner ------------------------------------------------------------------------


class Owner:
    """Exposes a window for a while, and changes what is in it."""

    def __init__(self, board: Board, way: Way, seed: int) -> None:
        self._board = board
        self._pause_s = way.pause_s
        self._random = random.Random(seed)
        self._blocks = blocks_of(way, arena=way.arena)
        self._changes = 0

    async def run(self, comm: kvwire.Communicator, stop: asyncio.Event) -> None:
        """Expose windows one after the other.

        Cancel safety: not safe; set `stop`.
        """
        while not stop.is_set():
            window = comm.expose("kv", self._blocks.cache)
            over = threading.Event()
            first = window.offer([0])
            self._board.serial[:] = np.frombuffer(read_ticket(first).serial, np.uint8)
            changing = threading.Thread(target=self._change, args=(window, over))
            changing.start()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._random.expovariate(1 / _LIFE_S)):
                    await stop.wait()
            over.set()
            await asyncio.to_thread(changing.join)
            await window.close()
            # From here nobody reads it: what this writes is in no block that landed.
            self._blocks.poison(list(range(BLOCKS)))
            say({"changes": self._changes, "windows": 1})
            self._changes = 0

    def _change(self, window: kvwire.Window, over: threading.Event) -> None:
        everything = list(range(BLOCKS))
        self._offer(window, everything)
        while not over.is_set():
            ids = self._random.sample(everything, CHANGED_AT_ONCE)
            window.withdraw(ids)
            self._blocks.poison(ids[:1])
            self._offer(window, ids)
            self._changes += 1
            if self._pause_s:
                time.sleep(self._pause_s)

    def _offer(self, window: kvwire.Window, ids: list[int]) -> None:
        # Nobody has this ticket yet, so the blocks may still be written to.
        generations = read_ticket(window.offer(ids)).generations
        for block, generation in zip(ids, generations, strict=True):
            self._blocks.write(block, generation)
        self._board.generations[ids] = generations


# --- readers --------------------------------------------------------------------------


class Reader:
    """Gets blocks, and looks at every byte."""

    def __init__(self, board: Board, way: Way, seed: int) -> None:
        self._board = board
        self._random = random.Random(seed)
        self._blocks = blocks_of(way)
        self._counts = Counter[str]()

    async def run(
        self, comm: kvwire.Communicator, address: str, stop: asyncio.Event
    ) -> None:
        """Get blocks until told to stop.

        Cancel safety: not safe; set `stop`.
        """
        peer = comm.peer(address)
        remote = None
        while remote is None and not stop.is_set():
            try:
                remote = await peer.window("kv")
            except (kvwire.KVWireError, OSError):
                await asyncio.sleep(_TRIES_S)
        if remote is not None:
            async with asyncio.TaskGroup() as group:
                for part in np.array_split(np.arange(BLOCKS), GETS_AT_ONCE):
                    group.create_task(self._gets(remote, part.tolist(), stop))
        self._report()

    async def _gets(
        self, remote: kvwire.RemoteWindow, mine: list[int], stop: asyncio.Event
    ) -> None:
        """Get blocks into some of this cache, one get at a time."""
        counts = self._counts
        while not stop.is_set():
            count = self._random.randint(1, BLOCKS_EACH_MAX)
            into = self._random.sample(mine, count)
            counts["late"] += self._blocks.late(into)
            ticket, generations = self._board.ticket(
                self._random.sample(range(BLOCKS), count)
            )
            deadline = 0.002 if self._random.random() < 0.01 else None
            get = remote.get(ticket, self._blocks.cache, into, deadline=deadline)
            if self._random.random() < 0.01:
                await asyncio.sleep(0)
                get.cancel()
            try:
                outcome = await get
            except kvwire.RequestCancelled:
                pass
            else:
                landed = set(outcome.landed.ids().tolist())
                for block, generation in zip(into, generations, strict=True):
                    if block in landed:
                        counts["wrong"] += self._blocks.wrong(block, generation)
                counts["landed"] += len(landed)
                counts["missing"] += count - len(landed)
                counts["bytes"] += len(landed) * self._blocks.words[:, 0].nbytes
                if not landed and remote.owner_gone:
                    await asyncio.sleep(_TRIES_S)
            await get.released()
            self._blocks.poison(into)
            counts["gets"] += 1
            counts[f"gets, {remote.way}"] += 1
            if counts["gets"] >= _REPORT or counts["wrong"] or counts["late"]:
                self._report()
            await asyncio.sleep(0)

    def _report(self) -> None:
        say(self._counts)
        self._counts.clear()


# --- without the look after the bytes -------------------------------------------------


def _believe(self: Generations, ids: Ids, generations: Words) -> Bits:
    return np.ones(ids.size, np.bool_)


def _end_blindly(
    self: kvwire_ucx.windows._Read,
    status: int,
    end: Any = kvwire_ucx.windows._Read._end,
) -> None:
    seen = self._looks.memory
    seen[self._looks.places] = self._batch.generations[self._good]
    end(self, status)


def plant(way: str, folder: Path) -> None:
    """Leave out the look after the bytes, in compiled loops too if one can compile."""
    if WAYS[way].prefer == "local":
        for name in ("mapped_compiled", "process_compiled"):
            setattr(blocks, name, blind(getattr(blocks, name), folder))
        for kind in (blocks.MappedBlocks, blocks.ProcessBlocks):
            kind._look_again = lambda *_: None  # type: ignore[method-assign]
    elif WAYS[way].prefer == "ucx":
        kvwire_ucx.windows._Read._end = _end_blindly  # type: ignore[method-assign]
    else:
        Generations.same = _believe  # type: ignore[method-assign]
