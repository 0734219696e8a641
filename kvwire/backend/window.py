"""The contract of one-sided reads, by which a lane reads memory that its peer exposes.

A *window* is a paged cache, or plain bytes, with a table of *generations* beside it: a
64-bit number for each block (:mod:`kvwire.memory.generations`). A reader copies blocks
and checks their generations *after* the bytes. If a generation still equals the
ticket's, every byte of the block is what the owner had offered::

    owner's lane                              reader's lane
      description = expose(memory)    ->        reader = window(description, memory)
                                                await reader.ready()
                                                landed = reader.read(batch)
      conceal(memory)                 <-        reader.close()

The owner takes no part in a read, and does not notice it. If a lane's transport cannot
read in this way, ``reads_windows`` stays False, and the window is read by messages.

A reader makes these promises:

1. A block that it reports as landed had the ticket's generation after its last byte was
   read. It may also compare generations before, but only to save work. If an
   implementation relies on the order of memory accesses, its file explains why the
   order is guaranteed.
2. It reads nothing but the memory that the peer has exposed, and writes nothing but the
   batch's destinations, whatever the peer has sent. If an entry is beyond the table, or
   a piece is outside its tensor, the block has not landed.
3. A block that has not landed may have been partly overwritten. Its destination belongs
   to the caller again once the read has ended, as for a landed block.
4. After ``close``, and once ``busy`` is False, it touches no memory.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Array
from kvwire.limits import MIB
from kvwire.types import Device, MemoryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMemory:
    """The memory of a window; all addresses are the owner's.

    Attributes:
        spans: The address and bytes of each tensor.
        table: The address and bytes of the table of generations, 8 bytes per block. The
            table is always in host memory.
        device: The device that holds the tensors; None for host memory, and on the
            reader's side, which learns the kind of memory from the owner's lane.
    """

    spans: tuple[tuple[int, int], ...]
    table: tuple[int, int]
    device: Device | None = None


class BlockRead(NamedTuple):
    """A batch of blocks to read; the arrays are contiguous, of uint64.

    A *granule* is the part of a block that is moved as one: the block itself, unless
    the two sides' blocks differ in size. The pieces are a template, made once per
    window and the same objects in each batch; each granule only shifts their addresses.
    Sums of addresses are taken modulo 2**64.

    Attributes:
        pieces_from: The owner's address of each piece of the granule at offset 0.
        pieces_to: The address of the same piece in this process.
        run: The bytes of each piece.
        offsets_from: For each granule, the number to add to ``pieces_from``.
        offsets_to: For each granule, the number to add to ``pieces_to``.
        entries: For each of the owner's blocks, its index in the table of generations.
        generations: For each of these blocks, the generation in its ticket.
        per_block: The granules per block: granule ``g`` belongs to block ``g //
            per_block``. The last block may have fewer granules.
        owner: An object that keeps the destinations alive.
        device: The device that holds the destinations; None for host memory.
    """

    pieces_from: Array
    pieces_to: Array
    run: int
    offsets_from: Array
    offsets_to: Array
    entries: Array
    generations: Array
    per_block: int
    owner: object
    device: Device | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all granules."""
        return self.run * self.pieces_from.size * self.offsets_from.size


class WindowReader(ABC):
    """Reads one window of a lane's peer. Used on the lane's loop.

    An immediate reader's ``read`` may also run on another thread, one call at a time.
    """

    way: str
    """How it reads, for reports: "mapped", "process_vm_readv", "ucx"."""
    immediate: bool
    """Whether ``read`` is over when it returns; otherwise it returns a future.

    False as long as ``ready`` has to be awaited.
    """
    outlives_lane: bool = False
    """Whether ``read`` works after the lane has ended, until ``close``."""
    memory_kind: MemoryKind = MemoryKind.HOST
    """The kind of memory of the window, and of the destinations of each batch.

    For destinations of another kind the window is read by messages.
    """
    quiet: asyncio.Future[None] | None = None
    """After ``close``: done once this process has nothing mapped of the owner.

    None if there is nothing to wait for. The owner keeps its memory until then.
    """
    turn_bytes: int = 1 * MIB
    """The most bytes that a batch copies in about 0.2 ms, which blocks the loop."""

    async def ready(self) -> None:  # noqa: B027 - most readers are ready at once
        """Wait until ``read`` is allowed: the lane may have to get descriptors first.

        Raises:
            BackendUnavailable: The window cannot be read in this way; the text has the
                reason.
            ConnectionLost: The lane has ended.

        Cancel safety: safe.
        """

    @abstractmethod
    def read(self, batch: BlockRead) -> Bits | asyncio.Future[Bits]:
        """Read blocks; return for each whether it has landed, at once or as a future.

        The arrays and the destinations are lent until the result is known. Cancelling
        the future does not end the read: wait until ``busy`` is False.

        Raises:
            ConnectionLost: The window is gone, and so is every reader of it.
            BackendUnavailable: The memory cannot be read in this way; only raised by a
                future. If it is a DeviceFailed, the destinations stay in use for ever.
        """

    def memory_here(self) -> npt.NDArray[np.uint8] | None:
        """Return the memory of a window of one tensor, read-only, if it is mapped here.

        The memory stays mapped as long as the array, or any object made from it, is
        referenced.
        """
        return None

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner's process, or its end of the lane, is gone.

        Mapped memory outlives its owner, and blocks that landed are still correct.
        """
        return False

    @property
    def busy(self) -> bool:
        """Return whether a running read may still touch memory after ``close``."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the reader; ``read`` then raises ConnectionLost. Never raises itself."""
