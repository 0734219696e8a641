"""A tier of slots in one file, which is found again after a restart.

The index is in memory; the file has it again, as :mod:`kvwire.store.slab_file` says.
Writing is done by one thread at a time, in the order in which it has to be on the disk:
heads of new slabs, images, entries. Reading needs no order: who reads has the slots
pinned, so that nothing else is written there.

Errors of the disk end no request otherwise than by a reason. After one while writing,
nothing is written any more until the tier is opened again, since where the file ends up
after it is not known; what is there is still read, and checked. A block that cannot be
read, or is not what was written, is forgotten here and on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments
from kvwire.store.address import TierAddress
from kvwire.store.directory import Directory
from kvwire.store.file import File, fragments_of
from kvwire.store.filling import Filling
from kvwire.store.index import Index, Keys, Orders, once
from kvwire.store.slab_file import (
    ENTRY_BYTES,
    SUPERBLOCK_BYTES,
    Found,
    Sums,
    image_sums,
    make_entries,
    make_head,
    scan,
    slab_offset,
)
from kvwire.store.slabs import GRAIN_BYTES, Slabs, rounded
from kvwire.store.space import ABSENT, Space
from kvwire.store.threads import Threads
from kvwire.store.tier import Batch, Fate, Fates, Tier, TierStats


class DiskTier(Tier):
    """Blocks in a file. Made by :meth:`open`."""

    durable = True

    def __init__(self, name: str, directory: Directory, threads: Threads) -> None:
        slabs = Slabs(directory.slabs, directory.slab_bytes, entry_bytes=ENTRY_BYTES)
        self.name = name
        self.trouble = ""
        self._directory = directory
        self._file = directory.file
        self._slabs = slabs
        self._index = Index(slabs)
        self._sums = np.zeros(slabs.slots, np.uint64)
        # What the head of each slab on the disk says: the bytes of its slots.
        self._heads = np.zeros(len(slabs), np.int64)
        self._serial = 0
        self._counts = TierStats(size_bytes=len(slabs) * slabs.slab_bytes)
        self._filling = Filling()
        self._writing = asyncio.Lock()
        self._threads = threads
        self._taking = True

    @classmethod
    async def open(
        cls, address: TierAddress, *, file_type: type[File] = File
    ) -> DiskTier:
        """Open a tier: ``disk:DIRECTORY?size=SIZE``.

        Args:
            address: As the user has written it.
            file_type: How the file is read and written.

        Raises:
            UsageError: The address is wrong, the directory cannot be used, another
                process has it, or the disk has no room; and what to do.

        Cancel safety: the directory is let go of again.
        """
        address.require("size", "slab")
        if not address.place or "size" not in address.options:
            raise UsageError(f"tier {address.text!r}: write disk:DIRECTORY?size=100GiB")
        nbytes = address.size(address.options["size"])
        slab_bytes = address.slab_bytes(nbytes - SUPERBLOCK_BYTES)
        threads = Threads()
        opened: list[Directory] = []

        def open_it() -> None:
            path = Path(address.place)
            opened.append(Directory.open(path, nbytes, slab_bytes, file_type))

        try:
            await threads.run(open_it)
            tier = cls(address.text, opened[0], threads)
            tier._restore(await threads.run(tier._scan))
        except BaseException as exc:
            # Also when this was cancelled while the thread was opening it.
            for directory in opened:
                directory.close()
            threads.close()
            if isinstance(exc, OSError):
                raise UsageError(f"tier {address.text!r}: {exc}") from exc
            raise
        return tier

    @property
    def taking(self) -> bool:
        """Whether it takes blocks: until the first error while writing."""
        return self._taking

    async def find(self, keys: Keys) -> Orders:
        """The order of each block's image, or ``ABSENT``.

        Cancel safety: safe, it only looks.
        """
        slots = self._index.find(keys)
        found = np.full(keys.size, ABSENT, np.uint8)
        found[slots >= 0] = self._index.orders(slots[slots >= 0])
        return found

    def touch(self, keys: Keys) -> None:
        """See Tier."""
        slots = self._index.find(keys)
        self._index.touch(keys[slots >= 0], slots[slots >= 0])

    async def write(self, space: Space, batch: Batch) -> Fates:
        """Take blocks; those that are there already are touched.

        Cancel safety: the write is finished first.
        """
        fates = np.full(batch.keys.size, Fate.REFUSED, np.uint8)
        nbytes = space.image_bytes
        if not self._slabs.capacity(nbytes):
            self.trouble = (
                f"a block of {nbytes} bytes has no room in a slab of "
                f"{self._slabs.slab_bytes}; open an empty directory with ?slab= of "
                f"several blocks"
            )
            return fates
        while (busy := batch.keys[self._filling.busy(batch.keys)]).size:
            await self._filling.ended(busy[0])
        there = self._index.find(batch.keys) >= 0
        self.touch(batch.keys[there])
        fates[there] = Fate.LANDED
        lacking = np.flatnonzero(~there)
        if not self._taking or not lacking.size:
            return fates
        slots = self._room(nbytes, lacking.size)
        if slots.size < lacking.size:
            self.trouble = "every slot is being read or written"
        mine = lacking[: slots.size]
        if mine.size:
            fates[mine] = await self._write(space, batch.selected(mine), slots)
        self._counts.count(fates[mine], written=True)
        return fates

    async def read(self, space: Space, batch: Batch) -> Fates:
        """Fill images with blocks, and compare them with their checksums.

        Cancel safety: the read is finished first.
        """
        fates = np.full(batch.keys.size, Fate.MISSING, np.uint8)
        slots = self._index.find(batch.keys)
        here = np.flatnonzero(slots >= 0)
        if not here.size:
            return fates
        part, slots = batch.selected(here), slots[here]
        self._index.pin(part.keys, slots)
        bad = np.zeros(here.size, np.bool_)
        try:
            got = await self._threads.run(
                partial(self._read_slots, part.images, slots, space.image_bytes)
            )
            fates[here] = got
            bad = got != Fate.LANDED
        finally:
            self._index.unpin(part.keys[~bad], slots[~bad])
        if bad.any():
            await self._discard(part.keys[bad], slots[bad])
        self._counts.count(fates, written=False)
        return fates

    def stats(self) -> TierStats:
        """See Tier."""
        self._counts.blocks = len(self._index)
        self._counts.used_bytes = self._slabs.used_bytes
        self._counts.evicted_blocks = self._index.evicted
        return self._counts

    def spaces(self) -> Iterable[Space]:
        """See Tier."""
        return tuple(self._directory.spaces.values())

    async def flush(self) -> None:
        """Return when what was written survives a power cut as well.

        Cancel safety: safe, it may be called again.
        """
        try:
            async with self._writing:
                await self._threads.run(self._file.sync)
        except OSError as exc:
            self._failed("flushing", exc)

    async def close(self) -> None:
        """Flush, and let go of the directory. Never raises.

        Cancel safety: the directory is let go of in any case.
        """
        try:
            await self.flush()
        finally:
            self._threads.close()
            try:
                self._directory.close()
            except OSError as exc:
                self._failed("closing", exc)

    # --- on the loop ------------------------------------------------------------------

    def _restore(self, found: list[Found]) -> None:
        """Take up what the file has; of two slots with one key the later counts."""
        if not found:
            return
        keys = np.concatenate([one.keys for one in found])
        slots = np.concatenate([one.slots for one in found])
        serials = np.concatenate([one.serials for one in found])
        self._sums[slots] = np.concatenate([one.sums for one in found])
        orders = np.zeros(self._slabs.slots, np.uint8)
        orders[slots] = np.concatenate([one.orders for one in found])
        self._serial = int(serials.max(initial=0))
        newest_first = np.argsort(serials, kind="stable")[::-1]
        keys, slots = keys[newest_first], slots[newest_first]
        latest = once(keys)
        keys, slots = keys[latest], slots[latest]
        slabs = slots // self._slabs.stride
        for one in found:
            self._heads[one.slab] = one.slot_bytes
            mine = slots[slabs == one.slab]
            if mine.size:
                self._slabs.restore(one.slab, one.slot_bytes, mine)
        sizes = self._slabs.slot_bytes[slabs]
        # A size that was written to last is the one that was used last.
        for size in reversed(dict.fromkeys(sizes.tolist())):
            mine = sizes == size
            self._index.adopt(keys[mine], slots[mine], orders[slots[mine]])

    def _room(self, nbytes: int, count: int) -> Ids:
        """Slots for some blocks, as many as there are without those in use."""
        slots = self._index.take(nbytes, count)
        while slots.size < count:
            if not self._index.evict(nbytes, count - slots.size).slots.size:
                break
            more = self._index.take(nbytes, count - slots.size)
            slots = np.concatenate((slots, more))
        return np.sort(slots)

    async def _write(self, space: Space, batch: Batch, slots: Ids) -> Fates:
        """Write images into slots that were taken for them, and name these."""
        self._filling.begin(batch.keys)
        written = False
        try:
            async with self._writing:
                if self._taking:
                    job = partial(self._write_slots, space, batch, slots)
                    self._sums[slots] = await self._threads.run(job)
                    written = True
        except OSError as exc:
            self._failed("writing", exc)
        finally:
            self._filling.end(batch.keys)
            if written:
                self._index.mark(slots, batch.orders)
                self._index.name(batch.keys, slots)
                self._index.unpin(batch.keys, slots)
            else:
                self._index.give_back(slots)
        fate = Fate.LANDED if written else Fate.FAILED
        return np.full(batch.keys.size, fate, np.uint8)

    async def _discard(self, keys: Keys, slots: Ids) -> None:
        """Forget pinned blocks that are no good, here and on the disk.

        A slot is free only when its entry is erased: nobody else's is, by then.
        """
        gone = slots[self._index.forget(keys, slots)]
        try:
            if gone.size and self._taking:
                async with self._writing:
                    await self._threads.run(partial(self._erase_slots, gone))
        except OSError as exc:
            self._failed("writing", exc)
        finally:
            self._index.give_back(gone)

    def _failed(self, what: str, error: OSError) -> None:
        self.trouble = f"{what} failed: {error.strerror or error}; nothing is written"
        self._taking = False

    # --- on a thread ------------------------------------------------------------------

    def _scan(self) -> list[Found]:
        """What the file has."""
        return list(scan(self._file, self._slabs))

    def _write_slots(self, space: Space, batch: Batch, slots: Ids) -> Sums:
        """Heads, images, entries: in this order. Returns the images' checksums."""
        self._directory.describe(space)
        slabs = slots // self._slabs.stride
        for slab in sorted(set(slabs.tolist())):
            self._write_head(slab, rounded(space.image_bytes))
        sums = image_sums(batch.images)
        for run, offset in self._runs(slots, space.image_bytes):
            self._file.write(_padded(batch.images.selected(run)), offset)
        count = slots.size
        # The head of a chain is younger than what follows it; see Index.unpin.
        serials = self._serial + np.arange(count, 0, -1)
        self._serial += count
        entries = make_entries(
            batch.keys,
            batch.orders,
            space.image_bytes,
            sums,
            serials.astype(np.uint64),
        )
        self._write_entries(slots, entries)
        return sums

    def _write_head(self, slab: int, slot_bytes: int) -> None:
        """The head of a slab, unless it is the one that is there."""
        if self._heads[slab] == slot_bytes:
            return
        head = np.frombuffer(make_head(slot_bytes), np.uint8)
        begin = slab_offset(slab, self._slabs.slab_bytes)
        self._file.write(fragments_of(head), begin)
        self._heads[slab] = slot_bytes

    def _write_entries(self, slots: Ids, entries: np.ndarray[tuple[int], Any]) -> None:
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        for run in np.split(np.arange(slots.size), breaks):
            slab, place = divmod(int(slots[run[0]]), self._slabs.stride)
            offset = slab_offset(slab, self._slabs.slab_bytes)
            offset += (1 + place) * ENTRY_BYTES
            self._file.write(fragments_of(entries[run]), offset)

    def _erase_slots(self, slots: Ids) -> None:
        slots = np.sort(slots)
        empty = np.zeros(slots.size, np.dtype((np.void, ENTRY_BYTES)))
        self._write_entries(slots, empty)

    def _read_slots(self, images: Fragments, slots: Ids, nbytes: int) -> Fates:
        """Read images, and say of each whether it is what was written."""
        order = np.argsort(slots)
        fates = np.full(slots.size, Fate.LANDED, np.uint8)
        for run, offset in self._runs(slots[order], nbytes):
            part = order[run]
            try:
                self._file.read(_padded(images.selected(part)), offset)
            except OSError as exc:
                fates[part] = Fate.FAILED
                self.trouble = f"reading failed: {exc.strerror or exc}"
        whole = image_sums(images) == self._sums[slots]
        fates[(fates == Fate.LANDED) & ~whole] = Fate.DAMAGED
        return fates

    def _runs(self, slots: Ids, nbytes: int) -> Iterable[tuple[Ids, int]]:
        """Slots whose images lie side by side in the file, and where they begin."""
        offsets = self._slabs.offsets(slots) + SUPERBLOCK_BYTES
        breaks = np.flatnonzero(np.diff(offsets) != rounded(nbytes)) + 1
        for run in np.split(np.arange(slots.size), breaks):
            yield run, int(offsets[run[0]])


# Read and written where a slot is longer than its image; nobody looks at it.
_PAD = np.zeros(GRAIN_BYTES, np.uint8)


def _padded(images: Fragments) -> Fragments:
    """Images with what fills their slots behind each of them."""
    nbytes = int(images.lengths[0])
    pad = rounded(nbytes) - nbytes
    if not pad:
        return images
    addresses = np.full((len(images), 2), _PAD.ctypes.data, np.uint64)
    lengths = np.full((len(images), 2), pad, np.uint64)
    addresses[:, 0], lengths[:, 0] = images.addresses, images.lengths
    return Fragments(
        addresses.ravel(), lengths.ravel(), owner=(images, _PAD), writable=True
    )
