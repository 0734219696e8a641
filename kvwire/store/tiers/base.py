"""The contract of a tier below memory, which keeps images of blocks.

The store moves every block through slots of its memory, so a tier sees whole images
that lie in one piece each: where a slot of a file, an object or a message begins and
ends. It never sees a cache, a layout or a block id.

The store promises:

* It calls from one event loop. Calls overlap, for the same keys as well.
* Images do not change, and their memory stays, until the call has returned.
* A key is a namespace's digest and a hash, of 1 to 64 bytes. It names one content for
  ever.

A tier promises, and :func:`kvwire.testing.check_tier` checks:

1. **Found**: ``find`` has each block that ``write`` has landed, with its order or
   ``UNKNOWN``, until the block is deleted, evicted or damaged. It answers from memory,
   without a disk read or a round trip where that can be.
2. **Exact**: ``read`` gives LANDED only for bytes that are those of ``write``,
   verified, and sets the block's order. The image of any other result may hold
   anything.
3. **Each for itself**: a call has one result for each block. A block that is missing or
   damaged costs no other.
4. **Done**: when a call has returned, nothing of it touches the images any more.
5. **Cancelled**: a call whose task is cancelled finishes first, and raises after that.
   Only what is copied in one turn (``at_once_bytes``) need not be finished.
6. **Side by side**: calls overlap, for the same blocks as well.
7. **Deleted**: after ``delete`` or ``delete_namespace`` no ``find`` has these blocks,
   all others are still there, and a block may be written again.
8. **Kept**: what a ``durable`` tier has landed is found again after this process was
   killed, and once it was flushed, after a power cut.
9. **No exception**: a failure is an answer for the blocks concerned. A tier that is
   away gives it at once, with the cause in ``reason`` and ``error``, and comes back by
   itself.
10. **Room**: for a block that never fits, ``too_large`` has the reason. A tier that is
    full forgets the least recently used blocks, tail before head, or takes no more.
"""

from __future__ import annotations

import enum
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from time import monotonic
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvwire.aio import run_to_completion
from kvwire.errors import sayable
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.fragments import Fragments
from kvwire.store.address import TierAddress
from kvwire.store.counters import StoreCounters
from kvwire.store.index import Index, Key, Keys, Orders, Times, as_keys
from kvwire.store.limits import (
    STORE_LOG_AGAIN_S,
    STORE_TIER_BYTES_MAX,
    STORE_TOUCHES_MAX,
)
from kvwire.store.namespace import ABSENT, Namespace

logger: logging.Logger = logging.getLogger("kvwire.store")


class BlockResult(enum.IntEnum):
    """The result of a read or write, for one block."""

    LANDED = 0
    MISSING = 1
    """It is not there, or not any more."""
    DAMAGED = 2
    """What is there are not the bytes that were written."""
    FAILED = 3
    """Reading or writing failed; see ``error``."""
    REFUSED = 4
    """It does not fit, or nothing is taken at the moment; see ``error``."""


# As arrays have them: what a member of an enum is, NumPy asks in four calls of Python.
LANDED: Final = np.uint8(BlockResult.LANDED)
MISSING: Final = np.uint8(BlockResult.MISSING)
DAMAGED: Final = np.uint8(BlockResult.DAMAGED)
FAILED: Final = np.uint8(BlockResult.FAILED)
REFUSED: Final = np.uint8(BlockResult.REFUSED)

BlockResults: TypeAlias = npt.NDArray[np.uint8]


class Batch(NamedTuple):
    """Some blocks of one size, each key once.

    Attributes:
        keys: Their keys, those of a chain from the head on.
        orders: The order of each image, or ``UNKNOWN`` if it is to be read and nobody
            has asked; see :mod:`kvwire.store.namespace`.
        images: Exactly one fragment for each image, all of one length, in host memory.
            Of a write they may be entries of a codec, which are shorter than images.
        sizes: Of a read, where the bytes of what was stored are told; None if nothing
            but whole images is of use.
        born: When each was put, in seconds since 1970; a read sets it where it knows.
            None for now, or where nobody asks.
    """

    keys: Keys
    orders: Orders
    images: Fragments
    sizes: Ids | None = None
    born: Times | None = None

    def selected(self, which: Ids | Bits) -> Batch:
        """Return some of the blocks, by position or by a mask."""
        sizes = None if self.sizes is None else self.sizes[which]
        born = None if self.born is None else self.born[which]
        images = self.images.selected(which)
        return Batch(self.keys[which], self.orders[which], images, sizes, born)

    def tell(self, which: Ids, part: Batch) -> None:
        """Copy the sizes from a part that was read as a batch of its own."""
        if self.sizes is not None:
            assert part.sizes is not None
            self.sizes[which] = part.sizes

    def stored(self, sizes: Ids) -> tuple[Batch, Bits]:
        """Return the batch with these lengths, and which blocks have room for theirs.

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
    """A tier's contents, and counts since it was opened.

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
        """Count the results of one call."""
        told = results.tobytes()
        landed = told.count(LANDED)
        if written:
            self.written_blocks += landed
        else:
            self.read_blocks += landed
        self.damaged_blocks += told.count(DAMAGED)
        self.failed_blocks += told.count(FAILED)


class TenantUse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The blocks of one tenant in one tier.

    Attributes:
        used_bytes: Bytes of its blocks.
        quota_bytes: The most that they may be; 0 for no bound of its own.
        pinned_bytes: Of its blocks, the bytes that are pinned.
        evicted_blocks: Blocks of it that were forgotten for others, or its own.
    """

    used_bytes: Annotated[int, Meta(ge=0)] = 0
    quota_bytes: Annotated[int, Meta(ge=0)] = 0
    pinned_bytes: Annotated[int, Meta(ge=0)] = 0
    evicted_blocks: Annotated[int, Meta(ge=0)] = 0


class TenantStats(msgspec.Struct, kw_only=True):
    """The blocks and the calls of one tenant in a store.

    Attributes:
        counters: What has happened to its blocks.
        tiers: What it has in each tier that bounds it, by the tier's name.
    """

    counters: StoreCounters
    tiers: dict[str, TenantUse]


def uses_of(index: Index) -> tuple[TenantUse, ...]:
    """Return what each tenant has in the tier of an index, by its number."""
    quotas = index.shares.quota_bytes
    bounded = np.where(quotas == STORE_TIER_BYTES_MAX, 0, quotas)
    columns = (index.used_bytes, bounded, index.kept_bytes, index.evicted_blocks)
    return tuple(map(TenantUse, *(column.tolist() for column in columns)))


class Touches:
    """Uses of blocks that a remote tier has not been told of yet.

    What was moved was touched for that there, and so is not told of once more.
    """

    def __init__(self) -> None:
        # Not told of yet; the one used last at the end.
        self.used: dict[Key, None] = {}
        # Moved, and not yet touched for that here.
        self._moved: set[Key] = set()

    def moved(self, keys: Keys) -> None:
        """Note blocks that were read or written there."""
        if len(self._moved) < STORE_TOUCHES_MAX:
            self._moved.update(keys.tolist())

    def add(self, keys: Keys) -> None:
        """Note the use of a chain's blocks; its head goes last."""
        for key in keys[::-1].tolist():
            self.used.pop(key, None)
            if key in self._moved:
                self._moved.remove(key)
            else:
                self.used[key] = None
        while len(self.used) > STORE_TOUCHES_MAX:
            del self.used[next(iter(self.used))]

    def take(self) -> Keys:
        """Return the blocks whose use is not reported yet, and forget them."""
        used = as_keys(self.used)
        self.used = {}
        return used


class Tier(ABC):
    """Keep blocks below memory. A subclass moves them there and back.

    A write or read is run to its end and counted here. What a subclass says nothing of
    is as where others keep the blocks: nobody is told of uses, nothing is pinned, and
    how safe a block is that was written is decided there.

    Attributes:
        name: How the caller named it, for reports and reasons.
        durable: Whether what it has taken is found again after a restart.
        error: Why it takes no blocks, or what failed last; empty if all is well. Its
            beginning and its end are lines of the log.
        reason: Why ``find`` cannot say what is there; empty while it can.
        asks: Whether ``find`` and ``holds`` are a round trip, at the moment.
        at_once_bytes: Up to so many bytes of images it copies in one turn of the loop,
            and touches them in no other.
        lossy: The codec by which it keeps blocks, if that loses bits; or empty.
    """

    durable: bool = False
    reason: str = ""
    asks: bool = False
    at_once_bytes: int = 0
    lossy: str = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self._counts = TierStats()
        self._error = ""
        # Whether the trouble's beginning was logged, and when its end was.
        self._logged = False
        self._ended_at = -math.inf

    @classmethod
    async def open(cls, address: TierAddress) -> Tier:
        """Open a tier that another distribution has, by its address.

        Raises:
            UsageError: The address cannot be used.

        Cancel safety: nothing stays open.
        """
        raise NotImplementedError

    @property
    def error(self) -> str:
        return self._error

    @error.setter
    def error(self, text: str) -> None:
        self._error = text
        if not text and self._logged:
            self._logged = False
            self._ended_at = monotonic()
            logger.warning("tier %s: all is well again", sayable(self.name))
        elif text and not self._logged and self._is_news():
            self._logged = True
            logger.warning("tier %s: %s", sayable(self.name), sayable(text))

    def _is_news(self) -> bool:
        """Return whether the last failure is so long ago that a new one is logged."""
        return monotonic() - self._ended_at > STORE_LOG_AGAIN_S

    @property
    def taking(self) -> bool:
        """Whether it takes blocks at the moment."""
        return True

    def too_large(self, namespace: Namespace) -> str:
        """Return why no block of a namespace has room here; "" where one may have."""
        return ""

    @abstractmethod
    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        Cancel safety: safe, it only looks.
        """

    async def holds(self, keys: Keys) -> Bits:
        """Tell which blocks need no writing, as far as this side knows.

        Cancel safety: safe, it only looks.
        """
        held: Bits = await self.find(keys) != ABSENT
        return held

    async def write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Take blocks; those that are there already are touched.

        Cancel safety: the write is finished first, unless its images were copied.
        """
        moving = self._write(namespace, batch)
        if batch.images.nbytes > self.at_once_bytes:
            moving = run_to_completion(moving)
        results = await moving
        self._counts.count(results, written=True)
        return results

    async def read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Fill images with blocks, set the order of each, and touch them.

        Cancel safety: the read is finished first, unless it writes them at its end.
        """
        moving = self._read(namespace, batch)
        if batch.images.nbytes > self.at_once_bytes:
            moving = run_to_completion(moving)
        results = await moving
        self._counts.count(results, written=False)
        return results

    @abstractmethod
    def _write(
        self, namespace: Namespace, batch: Batch
    ) -> Coroutine[Any, Any, BlockResults]:
        """Write blocks, whether the caller is cancelled meanwhile or not."""

    @abstractmethod
    def _read(
        self, namespace: Namespace, batch: Batch
    ) -> Coroutine[Any, Any, BlockResults]:
        """Read blocks, whether the caller is cancelled meanwhile or not."""

    def touch(self, keys: Keys) -> None:  # noqa: B027 - not everybody is told
        """Note that blocks were used in another tier: they are evicted later here."""

    @abstractmethod
    async def delete(self, keys: Keys) -> None:
        """Forget blocks: no ``find`` after this has them, and none after a restart.

        Raises:
            OSError: Some are there still, or may be, and why.

        Cancel safety: safe, it may be called again.
        """

    def known(self, digest: bytes) -> Keys:
        """Return the blocks of a namespace that a local index lists."""
        return as_keys(())

    @abstractmethod
    async def delete_namespace(self, digest: bytes) -> None:
        """Forget every block of a namespace, as ``delete`` does.

        Raises:
            OSError: Some are there still, or may be, and why.

        Cancel safety: safe, it may be called again.
        """

    async def pin(self, keys: Keys, *, pinned: bool) -> Bits:
        """Keep blocks from being evicted, or no more, each of them once.

        Returns:
            Which are pinned now: those that are here, as far as their tenant may.

        Cancel safety: safe, it may be called again.
        """
        return np.zeros(keys.size, np.bool_)

    def tenant_uses(self) -> tuple[TenantUse, ...]:
        """Return each tenant's use by number; empty if tenants have no bounds."""
        return ()

    def stats(self) -> TierStats:
        """Return counts of moved blocks, and of the contents where known."""
        return self._counts

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces of the blocks that were there when it was opened."""
        return ()

    async def flush(self) -> None:  # noqa: B027 - see the class
        """Return once all written blocks survive a power cut as well.

        Raises:
            OSError: It does not, as far as anybody knows.

        Cancel safety: safe, it may be called again.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything. No other call is running. Never raises.

        Cancel safety: what is held is let go of in any case.
        """
