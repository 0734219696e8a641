"""Reads blocks of a store server on this host in place.

The server's memory, its index and the generations of its slots are mapped here. So a
match needs no request, and a get is a single copy; :mod:`kvwire_store.shared_index`
explains why neither can find a wrong block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Array, Fragments
from kvwire_store.images import images_at
from kvwire_store.keys import NO_SLOT, Keys, Orders
from kvwire_store.namespace import ABSENT
from kvwire_store.shared_index import NOTHING, FoundSlots, IndexReader, words_for
from kvwire_store.tiers.slabs import rounded, stride_of


class HostBlocks:
    """Finds blocks in the memory of another process's store.

    Args:
        images: The memory of the store.
        words: Its index.
        generations: The generation of each slot.
        slab_bytes: Bytes of a slab.
        alone: Whether the store has no tiers below its memory.

    Attributes:
        alone: Whether the store has no tiers below its memory.
        index: Finds each block's slot, and checks after a read that the block was still
            there.

    Raises:
        UsageError: The sizes are inconsistent.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        words: Array,
        generations: Array,
        slab_bytes: int,
        *,
        alone: bool,
    ) -> None:
        slabs = images.size // slab_bytes if slab_bytes > 0 else 0
        self._stride = stride_of(slab_bytes)
        slots = slabs * self._stride
        if not slots or generations.size != slots or words.size != words_for(slots):
            raise UsageError(
                f"the parts of a store's memory do not fit together: {images.size} "
                f"bytes in slabs of {slab_bytes}, {generations.size} generations, "
                f"{words.size} index words"
            )
        self._images = images
        self._begin = images.__array_interface__["data"][0]
        self._slab_bytes = slab_bytes
        self.alone: bool = alone
        self.index: IndexReader = IndexReader(words, generations)

    @property
    def complete(self) -> bool:
        """Return whether a block that is absent here is absent at the server, too."""
        return self.alone and self.index.complete

    def orders(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``."""
        found = self.index.find(keys)
        return np.where(found.slots == NO_SLOT, np.uint8(ABSENT), found.orders)

    def find(self, keys: Keys, nbytes: int) -> FoundSlots:
        """Look up blocks whose images have ``nbytes``."""
        found = self.index.find(keys)
        if keys.size == 1:
            end = found.slots.item(0) % self._stride * rounded(nbytes) + nbytes
            return found if end <= self._slab_bytes else NOTHING
        ends = found.slots % self._stride * rounded(nbytes) + nbytes
        beyond = ends > self._slab_bytes
        if np.logical_or.reduce(beyond):
            found.slots[beyond] = NO_SLOT
        return found

    def images(self, slots: Ids, nbytes: int) -> Fragments:
        """Return the images in the found slots, one fragment each."""
        if slots.size == 1:
            slot = slots.item(0)
            begin = slot // self._stride * self._slab_bytes + self._begin
            begin += slot % self._stride * rounded(nbytes)
            return images_at(np.array((begin,), np.uint64), nbytes, self._images)
        slab, place = np.divmod(slots, self._stride)
        begins = slab * self._slab_bytes + place * rounded(nbytes) + self._begin
        return images_at(begins.view(np.uint64), nbytes, self._images)
