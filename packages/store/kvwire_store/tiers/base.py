"""The contract of a tier below memory, which keeps images of blocks.

The store moves blocks through slots of its memory, but for small gets from a server. So
a tier gets whole images, each in one piece, and can keep each as a slot of a file, an
object or a message. It never deals with caches, layouts or block ids.

The store promises:

* It makes all calls on one event loop. Calls overlap, even for the same keys.
* Images do not change and their memory remains valid until the call has returned.
* A key is a namespace's digest and a hash of 1 to 64 bytes. A key names the same
  content for ever.

A tier promises, and :func:`kvwire_certify.tiers.check_tier` checks:

1. **Found**: ``find`` returns each block that ``write`` has landed, with its order or
   ``UNKNOWN``, until the block is deleted, evicted or damaged. If possible it answers
   from memory, without a disk read or a round trip.
2. **Exact**: ``read`` returns LANDED only for bytes that were verified to be those of
   ``write``, and sets the block's order. With any other result the image's content is
   undefined.
3. **Independent**: a call has one result per block. A missing or damaged block does not
   affect the others.
4. **Done**: after a call has returned, it no longer touches the images.
5. **Cancelled**: if a call's task is cancelled, the call finishes first and then
   raises. Only images that are copied in one turn (``at_once_bytes``) need not be
   finished.
6. **Side by side**: calls overlap, even for the same blocks.
7. **Deleted**: after ``delete`` or ``delete_namespace`` no ``find`` returns these
   blocks. All others are still there, and a deleted block may be written again.
8. **Kept**: a block that landed in a ``durable`` tier is found again after this process
   was killed, and after a power cut if it was flushed. ``holds`` returns no block that
   a complete write would bring to a safer place than it is in; nor does ``read`` leave
   such a block as ``kept``, so the store writes it when memory evicts it.
9. **No exception**: a failure is a result of the affected blocks. A tier that cannot be
   reached returns this result at once, with the cause in ``reason`` and ``error``, and
   reconnects by itself.
10. **Room**: for a block that can never fit, ``too_large`` returns the reason. A full
    tier evicts the least recently used blocks, tail before head, or accepts no more.
"""

from __future__ import annotations

import enum
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from itertools import repeat
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
from kvwire_store.address import TierAddress
from kvwire_store.counters import StoreCounters
from kvwire_store.eviction import each
from kvwire_store.host_blocks import HostBlocks
from kvwire_store.index import Index
from kvwire_store.keys import Key, Keys, Orders, Times, as_keys
from kvwire_store.limits import (
    STORE_LOG_AGAIN_S,
    STORE_TIER_BYTES_MAX,
    STORE_TOUCHES_MAX,
)
from kvwire_store.namespace import ABSENT, Namespace
from kvwire_store.placement import BlockState, Placement, Placing, Verb, VerbKind

logger: logging.Logger = logging.getLogger("kvwire.store")


class BlockResult(enum.IntEnum):
    """The result of a read or write, for one block."""

    LANDED = 0
    MISSING = 1
    """It was never there, or is not there any more."""
    DAMAGED = 2
    """The stored bytes are not the bytes that were written."""
    FAILED = 3
    """Reading or writing failed; see ``error``."""
    REFUSED = 4
    """It does not fit, or the tier accepts nothing at the moment; see ``error``."""


# As values for arrays: for an enum member, NumPy needs four Python calls.
LANDED: Final = np.uint8(BlockResult.LANDED)
MISSING: Final = np.uint8(BlockResult.MISSING)
DAMAGED: Final = np.uint8(BlockResult.DAMAGED)
FAILED: Final = np.uint8(BlockResult.FAILED)
REFUSED: Final = np.uint8(BlockResult.REFUSED)

BlockResults: TypeAlias = npt.NDArray[np.uint8]


def all_landed(results: BlockResults) -> bool:
    """Return whether every block has landed; faster than by arrays."""
    return results.tobytes().count(LANDED) == results.size


class Batch(NamedTuple):
    """Some blocks of one size, each key once.

    Attributes:
        keys: The blocks' keys; a chain's from the head on.
        orders: The order of each image. In a read it may be ``UNKNOWN``, if the order
            was not looked up; see :mod:`kvwire_store.namespace`.
        images: Exactly one fragment per image, all of one length, in host memory. In a
            write they may be a codec's entries, which are shorter than images.
        sizes: In a read, an array that receives the stored bytes of each block; None if
            only whole images can be used.
        born: When each block was put, in seconds since 1970; a read sets it if known.
            None in a write means now; None in a read means that the times are not
            needed.
        kept: In a read, an array that is true: the read sets it to false for each block
            that the tier has, but that ``holds`` would not return. None if the caller
            does not need it.
    """

    keys: Keys
    orders: Orders
    images: Fragments
    sizes: Ids | None = None
    born: Times | None = None
    kept: Bits | None = None

    def selected(self, which: Ids | Bits) -> Batch:
        """Return some of the blocks, by position or by a mask."""
        sizes = None if self.sizes is None else self.sizes[which]
        born = None if self.born is None else self.born[which]
        kept = None if self.kept is None else self.kept[which]
        images = self.images.selected(which)
        return Batch(self.keys[which], self.orders[which], images, sizes, born, kept)

    def tell(self, which: Ids | slice, part: Batch) -> None:
        """Take the sizes and the kept values of a part that was read by itself."""
        if self.kept is not None:
            assert part.kept is not None
            self.kept[which] = part.kept
        if self.sizes is not None:
            assert part.sizes is not None
            self.sizes[which] = part.sizes

    def stored(self, sizes: Ids) -> tuple[Batch, Bits]:
        """Return the batch with these lengths, and which blocks fit.

        A block that does not fit keeps its whole memory, whose content is undefined
        after the read.
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


class TierAnswer(NamedTuple):
    """The answer to :meth:`Tier.ask`.

    Attributes:
        results: Each block's result, a byte.
        landed: The blocks that have landed; None for all.
        orders: Each image's order, a byte.
        images: The images of the landed blocks, one after the other. They do not
            change.
        kept: As in a :class:`Batch`, a byte for each block; empty if all are true.
    """

    results: bytes
    landed: Bits | None
    orders: bytes
    images: memoryview
    kept: bytes


AskedAct: TypeAlias = Callable[[TierAnswer | None], None]
"""Gets the answer to :meth:`Tier.ask`; None if there is none."""


class TierStats(msgspec.Struct, kw_only=True):
    """A tier's contents, and counts since it was opened.

    Attributes:
        blocks: Blocks that can be found; None if they are not counted.
        used_bytes: Bytes that these blocks use; None if they are not counted.
        size_bytes: Bytes that blocks may use; 0 if the tier itself has no limit.
        read_blocks: Blocks that were read from it.
        written_blocks: Blocks that it stored.
        evicted_blocks: Blocks that it evicted to make room for others.
        damaged_blocks: Blocks whose bytes differed from the written ones.
        failed_blocks: Blocks that could not be read or written.
    """

    blocks: int | None = None
    used_bytes: int | None = None
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
        quota_bytes: The limit of ``used_bytes``; 0 if the tenant has no limit.
        pinned_bytes: Bytes of its blocks that are pinned.
        evicted_blocks: Its blocks that were evicted, for its own or others' blocks.
    """

    used_bytes: Annotated[int, Meta(ge=0)] = 0
    quota_bytes: Annotated[int, Meta(ge=0)] = 0
    pinned_bytes: Annotated[int, Meta(ge=0)] = 0
    evicted_blocks: Annotated[int, Meta(ge=0)] = 0


class TenantStats(msgspec.Struct, kw_only=True):
    """One tenant's blocks and calls in a store.

    Attributes:
        counters: Counts of its blocks and calls.
        tiers: Its use of each tier that limits tenants, by the tier's name.
    """

    counters: StoreCounters
    tiers: dict[str, TenantUse]


def uses_of(index: Index) -> tuple[TenantUse, ...]:
    """Return each tenant's use of an index's tier, by the tenant's number."""
    index.end_late()
    quotas = index.shares.quota_bytes
    bounded = np.where(quotas == STORE_TIER_BYTES_MAX, 0, quotas)
    columns = (index.used_bytes, bounded, index.kept_bytes, index.evicted_blocks)
    return tuple(map(TenantUse, *(column.tolist() for column in columns)))


class Touches:
    """Uses of blocks that have not been reported to a remote tier yet.

    A read or write in that tier counts as a use already, so it is not reported.
    """

    def __init__(self) -> None:
        # Not reported yet; the last used one at the end.
        self.used: dict[Key, None] = {}
        # Read or written there, and not used here since.
        self._moved: set[Key] = set()

    def moved(self, keys: Keys) -> None:
        """Record that blocks were read or written there."""
        if len(self._moved) < STORE_TOUCHES_MAX:
            self._moved.update(keys.tolist())

    def add(self, keys: Keys) -> None:
        """Record the use of a chain's blocks; its head is added last."""
        names = keys[::-1].tolist()
        if self.used:
            each(map(self.used.pop, names, repeat(None)))
        moved = self._moved.intersection(names)
        if moved:
            self._moved -= moved
            if len(moved) == len(names):
                return
            names = [name for name in names if name not in moved]
        self.used.update(dict.fromkeys(names))
        while len(self.used) > STORE_TOUCHES_MAX:
            del self.used[next(iter(self.used))]

    def take(self) -> Keys:
        """Return the unreported uses, and clear them."""
        used = as_keys(self.used)
        self.used = {}
        return used


class Tier(ABC):
    """Keeps blocks below memory. Subclasses move the bytes.

    This class finishes each write or read and counts its results. The defaults suit a
    tier whose blocks are kept by another program: uses are not reported, verbs are
    refused, and durability after a write is up to that program.

    Attributes:
        name: The tier's address as the caller gave it, for reports and reasons.
        durable: Whether stored blocks are found again after a restart.
        error: Why it accepts no blocks, or the last failure; empty if all is well. The
            begin and end of an error are logged.
        reason: Why ``find`` cannot look blocks up; empty while it can.
        asks: Whether ``find`` and ``holds`` need a round trip at the moment.
        at_once_bytes: Images of up to this many bytes are copied in one turn of the
            loop, and not touched at any other time.
        asks_bytes: The most bytes of images that :meth:`ask` reads at the moment.
        mapped: Access to its blocks, if they can be read in place at the moment.
    """

    durable: bool = False
    reason: str = ""
    asks: bool = False
    at_once_bytes: int = 0
    asks_bytes: int = 0
    mapped: HostBlocks | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._counts = TierStats()
        self._error = ""
        # Whether the beginning of the trouble was logged, and when its end was.
        self._logged = False
        self._ended_at = -math.inf

    @classmethod
    async def open(cls, address: TierAddress) -> Tier:
        """Open a tier that another distribution provides, by its address.

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
            logger.warning("tier %s works again", sayable(self.name))
        elif text and not self._logged and self._is_news():
            self._logged = True
            logger.warning("tier %s: %s", sayable(self.name), sayable(text))

    def _is_news(self) -> bool:
        """Return whether enough time has passed to log another failure."""
        return monotonic() - self._ended_at > STORE_LOG_AGAIN_S

    def read_in_place(self, blocks: int, nbytes: int) -> None:
        """Count blocks that were read from :attr:`mapped`."""
        self._counts.read_blocks += blocks

    def ask(self, namespace: Namespace, keys: Keys, act: AskedAct) -> bool:
        """Start a read of a few blocks that ends in a callback; by default, never.

        Args:
            namespace: Their namespace.
            keys: Their keys.
            act: Called once with the answer. If all blocks have landed, this use of
                them is not reported by ``touch``.

        Returns:
            Whether it was started. If not, :meth:`read` the blocks.
        """
        return False

    @property
    def taking(self) -> bool:
        """Whether it accepts blocks at the moment."""
        return True

    def too_large(self, namespace: Namespace) -> str:
        """Return why blocks of a namespace never fit here, or ""."""
        return ""

    @abstractmethod
    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        Cancel safety: safe, it only reads.
        """

    async def holds(self, keys: Keys) -> Bits:
        """Return the blocks that are known to be stored already.

        Cancel safety: safe, it only reads.
        """
        held = self.indexed(keys)
        return await self.find(keys) != ABSENT if held is None else held

    def indexed(self, keys: Keys) -> Bits | None:
        """Return the same as ``holds``; None if the index is not in this process."""
        return None

    async def write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Store blocks; blocks that are already stored count as used.

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
        """Write blocks, even if the caller is cancelled meanwhile."""

    @abstractmethod
    def _read(
        self, namespace: Namespace, batch: Batch
    ) -> Coroutine[Any, Any, BlockResults]:
        """Read blocks, even if the caller is cancelled meanwhile."""

    def touch(self, keys: Keys) -> None:  # noqa: B027 - most tiers ignore it
        """Record uses of blocks in another tier, so they are evicted later here."""

    @abstractmethod
    async def delete(self, keys: Keys) -> None:
        """Delete blocks: no ``find`` after this returns them, not even after a restart.

        Raises:
            OSError: Some blocks are still there, or may be; the text gives the reason.

        Cancel safety: safe, it may be called again.
        """

    def known(self, digest: bytes) -> Keys:
        """Return the blocks of a namespace that a local index lists."""
        return as_keys(())

    @abstractmethod
    async def delete_namespace(self, digest: bytes) -> None:
        """Delete every block of a namespace, as ``delete`` does.

        Raises:
            OSError: Some blocks are still there, or may be; the text gives the reason.

        Cancel safety: safe, it may be called again.
        """

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        """Pin, unpin or prefetch blocks of a namespace here; each key occurs once.

        Returns:
            The result of each block. This class has prefetched the blocks that are
            here, and refuses to pin and unpin.

        Cancel safety: safe, it may be called again.
        """
        here = await self.find(keys) != ABSENT
        placing = Placing(keys.size)
        if self.reason:
            placing.rule(~here, BlockState.DEFERRED, f"{self.name}: {self.reason}")
        if verb.kind is VerbKind.PREFETCH:
            placing.rule(here, BlockState.DONE)
        else:
            why = f"{self.name} cannot {verb.kind.name.lower()} blocks"
            placing.rule(here, BlockState.REFUSED, why)
        return placing.end()

    def tenant_uses(self) -> tuple[TenantUse, ...]:
        """Return each tenant's use by number; empty if tenants have no bounds."""
        return ()

    def stats(self) -> TierStats:
        """Return counts of moved blocks, and of the contents if known."""
        return self._counts

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces of the blocks that it had when it was opened."""
        return ()

    async def flush(self) -> None:  # noqa: B027 - see the class
        """Wait until all written blocks survive a power cut.

        Raises:
            OSError: Some blocks may not survive; the text gives the reason.

        Cancel safety: safe, it may be called again.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. No other call may be running. Never raises.

        Cancel safety: everything is released in any case.
        """
