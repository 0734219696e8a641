"""A window: blocks of a cache that peers read without asking, until they are withdrawn.

The owner offers blocks that will not change, and withdraws them before it writes to
them again. Each offer gives a block a *generation*, a random 64-bit number in a table
beside the cache; withdrawing replaces the number. A reader copies a block and reads its
generation afterwards. If the generation still equals the one in the reader's ticket,
the copy is exactly what the owner had offered; otherwise the block is reported as
missing. So the owner never waits for a reader, a dead reader holds nothing, and a
ticket for a block that was reused since never yields wrong bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.aio import Closing, LoopThread
from kvwire.endpoint.windows.map import geometry_of_pools
from kvwire.endpoint.windows.ticket import SERIAL_BYTES, write_ticket
from kvwire.errors import UsageError, check_name, wrong_type
from kvwire.kv.blocks import Blocks, Ids
from kvwire.kv.geometry import Geometry
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from kvwire.memory.buffers import Memory, as_payload
from kvwire.memory.generations import Generations

# The most windows that one communicator exposes.
WINDOWS_MAX: Final = 1024

BYTES_GROUP = "bytes"


class Window(Closing):
    """Blocks of this process that peers may read; created by ``expose``.

    The cache's memory has to stay where it is until :meth:`close` has returned.
    :meth:`offer` and :meth:`withdraw` may be called from any thread.

    Attributes:
        name: The name by which peers open it.
        serial: Random bytes that identify this window in all of its tickets; readers
            get them when they open it.
    """

    def __init__(
        self, table: WindowTable, name: str, cache: PagedCache, thread: LoopThread
    ) -> None:
        self._table = table
        self._thread = thread
        self.name: str = name
        self._cache = cache
        self.serial: bytes = secrets.token_bytes(SERIAL_BYTES)
        self._geometry: Geometry = geometry_of_pools(cache)
        self._first: dict[str, int] = {}
        entries = 0
        for group in cache.groups.values():
            self._first[group.name] = entries
            entries += group.num_blocks
        self._generations = Generations(entries)
        self._closed = False
        # The users of its memory: answers being sent, and readers on lanes.
        self._uses = 0
        self._unused = asyncio.Event()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Window {self.name!r}: {self._cache!r}, {state}>"

    @property
    def closed(self) -> bool:
        """Return whether it was closed."""
        return self._closed

    def offer(
        self, blocks: Blocks, generations: npt.NDArray[np.uint64] | None = None
    ) -> bytes:
        """Allow blocks to be read by peers that get the returned ticket.

        The blocks must not change until :meth:`withdraw`. On a device, the kernels that
        write to them must have finished, not only be queued. Offering an offered block
        again returns the same generation; one withdrawal ends it, however often it was
        offered.

        Args:
            blocks: Block ids, or ``{group: ids}``; for plain bytes, block numbers.
            generations: The generation of each block, in the same order; by default the
                window draws them. Pass them if the owner consists of several processes
                and one of them writes the tickets for all. They have to be random
                numbers, drawn anew after the blocks were last withdrawn.

        Returns:
            The ticket: the blocks and their generations, 12 bytes per block and about
            32 more. Send it to the reader by any channel.

        Raises:
            UsageError: A block is out of range, the window is closed, or there is not
                one generation for each block.
        """
        if self._closed:
            raise UsageError(f"window {self.name!r} is closed")
        lists = self._cache.block_lists(blocks)
        entries = self._entries(lists)
        if generations is not None:
            fresh = np.ascontiguousarray(generations, np.uint64)
            if fresh.shape != entries.shape:
                raise UsageError(
                    f"offer: generations has shape {fresh.shape} for {entries.size} "
                    "blocks; pass one for each block"
                )
            self._generations.renew(entries, fresh)
        counts = [ids.size for ids in lists.values()]
        return write_ticket(
            self.serial, counts, entries, self._generations.current(entries)
        )

    def withdraw(self, blocks: Blocks | None = None) -> None:
        """Forbid reading blocks; afterwards you may write to them.

        Returns at once, even if readers are active: a reader in the middle of a block
        reports the block as missing.

        Args:
            blocks: As for :meth:`offer`; None for all.

        Raises:
            UsageError: A block is out of range.
        """
        if self._closed:
            return
        if blocks is None:
            self._generations.renew(np.arange(self._generations.values.size))
        else:
            self._generations.renew(
                self._entries(self._cache.block_lists(blocks, least=0))
            )

    async def close(self) -> None:
        """Withdraw all blocks, and wait until no transport touches the memory.

        Readers are asked to stop. If one does not answer within ``close_timeout_s``,
        its connection is ended.

        Cancel safety: safe. The window is closed either way; call it again to continue
        waiting for its memory.
        """
        self._thread.check("Window.close")
        if not self._closed:
            self.withdraw()
            self._closed = True
            self._table.remove(self)
        while self._uses:
            self._unused.clear()
            await self._unused.wait()
        self._generations.close()

    # --- for the connections that show it ---------------------------------------------

    def _entries(self, lists: dict[str, Ids]) -> Ids:
        """Return the places of blocks in the table of generations."""
        if len(lists) == 1:
            return next(iter(lists.values()))
        return np.concatenate([ids + self._first[name] for name, ids in lists.items()])

    def _used(self) -> None:
        self._uses += 1

    def _released(self) -> None:
        self._uses -= 1
        if not self._uses:
            self._unused.set()


class WindowTable:
    """The windows that a communicator exposes.

    Attributes:
        open: The open windows, by name.
        closing: Callbacks from connections; each is called with every window that
            closes.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self.open: dict[str, Window] = {}
        self.closing: dict[Callable[[Window], None], None] = {}

    def expose(
        self, name: str, memory: PagedCache | Memory, block_bytes: int | None
    ) -> Window:
        """Make a window; see Communicator.expose."""
        check_name("expose: name", name)
        if name in self.open:
            raise UsageError(f"expose: a window named {name!r} is open; close it first")
        if len(self.open) >= WINDOWS_MAX:
            raise UsageError(
                f"expose: {WINDOWS_MAX} windows are open, which is the limit; close "
                "some"
            )
        cache = as_cache("expose", memory, block_bytes)
        window = Window(self, name, cache, self._thread)
        self.open[name] = window  # bounded: WINDOWS_MAX
        return window

    def remove(self, window: Window) -> None:
        """End a window on every connection that shows it."""
        self.open.pop(window.name, None)
        for call in list(self.closing):
            call(window)


def as_cache(
    verb: str, memory: PagedCache | Any, block_bytes: int | None
) -> PagedCache:
    """Return memory as a cache: plain bytes become a group with one layer.

    Raises:
        UsageError: The memory cannot be used, or its size is not a multiple of
            ``block_bytes``.
    """
    if isinstance(memory, PagedCache):
        if block_bytes is not None:
            raise UsageError(f"{verb}: block_bytes is for plain bytes, not for a cache")
        return memory
    if block_bytes is None:
        raise wrong_type(
            verb, memory, "a kvwire.PagedCache, or bytes and their block_bytes"
        )
    payload = as_payload(memory, writable=False)
    if not isinstance(payload, memoryview):
        raise wrong_type(verb, memory, "contiguous host memory")
    if type(block_bytes) is not int or block_bytes < 1 or payload.nbytes % block_bytes:
        raise UsageError(
            f"{verb}: block_bytes={block_bytes!r} does not fit memory of "
            f"{payload.nbytes} bytes"
        )
    if not payload.nbytes:
        raise UsageError(f"{verb}: the memory has 0 bytes")
    spec = KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=block_bytes,
        block_tokens=1,
        dtype="uint8",
        components=1,
        kind="state",
    )
    array = np.frombuffer(payload, np.uint8).reshape(-1, 1, 1, block_bytes)
    return PagedCache.grouped({BYTES_GROUP: (spec, [array])})
