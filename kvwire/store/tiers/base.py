"""The contract of a tier below memory: somewhere that images of blocks are kept.

The store moves every block through slots of its memory, so a tier sees whole images
that lie in one piece each: where a slot of a file, an object or a message begins and
ends. It never sees a cache, a layout or a block id.

What the store promises:

* It calls from one event loop. Calls overlap, for the same keys as well.
* Images do not change, and their memory stays, until the call has returned.
* A key is a namespace's digest and a hash, of 1 to 64 bytes. It names one content for
  ever.

What a tier promises:

* ``find`` answers from memory, without a disk read or a round trip where that can be.
* It returns only when nothing of it touches the images any more, also when the task
  that awaits it is cancelled: then it finishes first, and raises after that.
* ``read`` says LANDED of an image only if these are the bytes that ``write`` was given,
  verified; an image that it says anything else of may hold anything.
* ``write`` says LANDED of a block only when a ``find`` after it has it, and, if the
  tier is ``durable``, also one after this process was killed.
* What fails is an answer for the blocks concerned and never an exception. A tier that
  can take no more says why in ``error``, and goes on answering what it can.
* What it has no room for it forgets, least recently used first, tail before head.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.fragments import Fragments
from kvwire.store.index import Keys, Orders
from kvwire.store.namespace import ABSENT, Namespace


class BlockResult(enum.IntEnum):
    """Names what became of one block."""

    LANDED = 0
    MISSING = 1
    """It is not there, or not any more."""
    DAMAGED = 2
    """What is there are not the bytes that were written."""
    FAILED = 3
    """Reading or writing failed; see ``error``."""
    REFUSED = 4
    """It does not fit, or nothing is taken at the moment; see ``error``."""


BlockResults: TypeAlias = npt.NDArray[np.uint8]


class Batch(NamedTuple):
    """Lists blocks of one size, each key once.

    Attributes:
        keys: Their keys, those of a chain from the head on.
        orders: The order of each image, or ``UNKNOWN`` if it is to be read and nobody
            has asked; see :mod:`kvwire.store.namespace`.
        images: Exactly one fragment for each image, all of one length, in host memory.
            Of a write they may be entries of a codec, which are shorter than images.
        sizes: Of a read, where the bytes of what was stored are told; None if nothing
            but whole images is of use.
    """

    keys: Keys
    orders: Orders
    images: Fragments
    sizes: Ids | None = None

    def selected(self, which: Ids | Bits) -> Batch:
        """Return some of the blocks, by position or by a mask."""
        sizes = None if self.sizes is None else self.sizes[which]
        images = self.images.selected(which)
        return Batch(self.keys[which], self.orders[which], images, sizes)

    def tell(self, which: Ids, part: Batch) -> None:
        """Take the sizes of some of the blocks, which were read as a part."""
        if self.sizes is not None:
            assert part.sizes is not None
            self.sizes[which] = part.sizes

    def stored(self, sizes: Ids) -> tuple[Batch, Bits]:
        """Return the blocks as so many stored bytes each, and which of them fit.

        Those that do not have their whole memory; nothing of use goes there.
        """
        most = self.images.lengths.astype(np.int64)
        fit = (sizes > 0) & (sizes <= most)
        if self.sizes is None:
            fit &= sizes == most
        else:
            self.sizes[:] = np.where(fit, sizes, 0)
        lengths = np.where(fit, sizes, most).astype(np.uint64)
        images = Fragments(
            self.images.addresses,
            lengths,
            owner=self.images.owner,
            writable=self.images.writable,
        )
        return self._replace(images=images), fit


class TierStats(msgspec.Struct, kw_only=True):
    """Counts what is in a tier, and what has happened to it since it was opened.

    Attributes:
        blocks: Blocks that can be found; 0 where nobody counts.
        used_bytes: Bytes they take.
        size_bytes: Bytes that they may take; 0 for no limit of its own.
        read_blocks: Blocks that landed from it.
        written_blocks: Blocks that it took.
        evicted_blocks: Blocks that it forgot for others.
        damaged_blocks: Blocks whose bytes were not those that were written.
        failed_blocks: Blocks that could not be read or written.
    """

    blocks: int = 0
    used_bytes: int = 0
    size_bytes: int = 0
    read_blocks: int = 0
    written_blocks: int = 0
    evicted_blocks: int = 0
    damaged_blocks: int = 0
    failed_blocks: int = 0

    def count(self, results: BlockResults, *, written: bool) -> None:
        """Count what became of the blocks of one call."""
        landed = int(np.count_nonzero(results == BlockResult.LANDED))
        if written:
            self.written_blocks += landed
        else:
            self.read_blocks += landed
        self.damaged_blocks += int(np.count_nonzero(results == BlockResult.DAMAGED))
        self.failed_blocks += int(np.count_nonzero(results == BlockResult.FAILED))


class Tier(ABC):
    """Keeps blocks below memory. Subclasses say how blocks get there and back.

    Attributes:
        name: How the caller named it, for reports and reasons.
        durable: Whether what it has taken is found again after a restart.
        error: Why it takes no blocks, or what failed last; empty if all is well.
        unavailable_reason: Why ``find`` cannot say what is there; empty while it can.
        asks: Whether ``find`` and ``holds`` are a round trip, at the moment.
        lossy: The codec by which it keeps blocks, if that loses bits; or empty.
    """

    name: str
    durable: bool
    error: str = ""
    unavailable_reason: str = ""
    asks: bool = False
    lossy: str = ""

    @property
    def taking(self) -> bool:
        """Tell whether it takes blocks at the moment."""
        return True

    @abstractmethod
    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        Cancel safety: safe, it only looks.
        """

    async def holds(self, keys: Keys) -> Bits:
        """Tell which blocks it has as far as it knows: they need no writing.

        Cancel safety: safe, it only looks.
        """
        held: Bits = await self.find(keys) != ABSENT
        return held

    @abstractmethod
    async def write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Take blocks; those that are there already are touched.

        Cancel safety: the write is finished first.
        """

    @abstractmethod
    async def read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Fill images with blocks, set the order of each, and touch them.

        Cancel safety: the read is finished first.
        """

    @abstractmethod
    def touch(self, keys: Keys) -> None:
        """Note blocks used in another tier: here they are not the next to go."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return what is in it."""

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces of what it had when it was opened."""
        return ()

    @abstractmethod
    async def flush(self) -> None:
        """Return when what was written survives a power cut as well.

        Raises:
            OSError: It does not, as far as anybody knows.

        Cancel safety: safe, it may be called again.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; no other call is under way. Never raises.

        Cancel safety: what is held is let go of in any case.
        """
