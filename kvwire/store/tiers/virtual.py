"""Tiers without bytes, for a replay: they decide like real tiers but copy nothing.

A store's own classes decide which block gets room, which block is evicted for it, and
which blocks are written to lower tiers and read back. Only the code that moves images
is replaced, and the threads, since there is nothing to wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments
from kvwire.memory.arena import Arena
from kvwire.store.address import TierAddress
from kvwire.store.images import rows
from kvwire.store.namespace import Namespace
from kvwire.store.tenants import Tenants
from kvwire.store.threads import Threads
from kvwire.store.tiers.base import LANDED, Batch, BlockResults
from kvwire.store.tiers.directory import TierDirectory
from kvwire.store.tiers.disk import DiskTier
from kvwire.store.tiers.disk_index import DiskRows
from kvwire.store.tiers.memory import MemoryTier


class VirtualMemory(MemoryTier):
    """A memory tier whose slots have no memory.

    Attributes:
        written_bytes: Bytes of the images that puts would have copied here.
    """

    written_bytes = 0

    def images(self, slots: Ids, nbytes: int) -> Fragments:
        """Return fragments of the right number and length, at no address."""
        return _images(slots.size, nbytes)

    @staticmethod
    def _allocate(nbytes: int) -> tuple[Arena | None, np.ndarray[Any, Any]]:
        return None, np.empty(0, np.uint8)


# The addresses are never used, so all images of one size have the same ones.
@lru_cache(4096)
def _images(count: int, nbytes: int) -> Fragments:
    lengths, starts = rows(count, nbytes)
    return Fragments(lengths, lengths, owner=None, writable=False, starts=starts)


class VirtualClock:
    """The time of a replay.

    Attributes:
        now_s: The time, in seconds. It is above 0, because blocks born at 0 never
            expire.
    """

    now_s = 1.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class VirtualDisk(DiskTier):
    """A disk tier whose slots are in no file.

    Attributes:
        read_bytes: Bytes of the images that were read.
        written_bytes: Bytes of the images that were written.
    """

    # A read that is copied in one turn needs no task.
    at_once_bytes = sys.maxsize

    def __init__(
        self, address: TierAddress, tenants: Tenants, clock: VirtualClock
    ) -> None:
        nbytes, slab_bytes, _, evict = self._asked(address)
        if "codec" in address.options:
            raise UsageError(
                f"tier {address.text!r}: a replay takes no codec=: compressed lengths "
                "depend on the content, which a trace does not have"
            )
        nowhere = cast("TierDirectory", _Nowhere(nbytes // slab_bytes, slab_bytes))
        super().__init__(address, nowhere, tenants, evict)
        self._threads = Threads(inline=True)
        self._index.now = clock
        self.read_bytes = 0
        self.written_bytes = 0

    def _write_slots(self, namespace: Namespace, batch: Batch, slots: Ids) -> None:
        self._nbytes[slots] = namespace.image_bytes
        self.written_bytes += batch.images.nbytes

    def _read_slots(
        self, batch: Batch, slots: Ids, *, at_once: bool = False
    ) -> BlockResults:
        if batch.sizes is not None:
            batch.sizes[:] = self._nbytes[slots]
        self.read_bytes += batch.images.nbytes
        return np.full(slots.size, LANDED, np.uint8)


class _NoRows:
    """The part of :class:`DiskIndex` that a disk tier without a file calls."""

    namespaces: Final[dict[bytes, Namespace]] = {}

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes

    def rows(self) -> Iterator[DiskRows]:
        return iter(())

    def erase(self, slots: Iterable[range]) -> None:
        """Do nothing."""


class _Nowhere:
    """The part of :class:`TierDirectory` that a disk tier without a file calls."""

    file = None
    synced = False

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.slabs = slabs
        self.index = _NoRows(slab_bytes)
