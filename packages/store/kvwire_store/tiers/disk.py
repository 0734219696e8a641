"""A tier of slots in one file, which survives restarts.

An index in memory, and SQLite on the disk, record which image is in which slot. Only
one thread writes at a time: first images, then the rows that name them, in one
transaction. A read pins its slots, so that nothing is written to them. A disk error
fails only the requests during which it occurred, with a reason; later requests try
again.

Order
-----
A block on the disk goes only when its replacement is there. Images are written to
free slots only. The transaction that records them also removes the rows of the blocks
that they evict; if it fails, the disk is full for example, those blocks stay. So a few
slots of each size are kept free. A size that has none at all, because it is new or
because everything is in use, first evicts one block, or a slab of another size.

Trust
-----
If the tier was not closed in order, a row may name an image that was being overwritten.
So such a block is found, but does not count as *held* until it has been read and
compared. A put of it first reads it, and writes it again if it is damaged.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import time
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvwire.aio import run_to_completion
from kvwire.errors import UsageError, sayable, with_remedy
from kvwire.kv.blocks import Bits, Ids, all_of, any_of
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.types import in_bytes
from kvwire_store.address import TierAddress
from kvwire_store.images import Sums, image_sums, images_in, named_sums, views_of
from kvwire_store.index import Index
from kvwire_store.keys import IndexedSlots, Keys, Orders, once
from kvwire_store.limits import STORE_BATCH_BYTES
from kvwire_store.namespace import ABSENT, DIGEST_BYTES, Namespace
from kvwire_store.placement import BlockState, Placement, Placing, Verb, VerbKind
from kvwire_store.tenants import Tenants
from kvwire_store.threads import Threads
from kvwire_store.tiers.base import (
    DAMAGED,
    FAILED,
    LANDED,
    MISSING,
    REFUSED,
    Batch,
    BlockResults,
    TenantUse,
    TierStats,
    uses_of,
)
from kvwire_store.tiers.coded import CodedTier
from kvwire_store.tiers.directory import File, TierDirectory
from kvwire_store.tiers.disk_index import DiskRows
from kvwire_store.tiers.memory import InFlightFills
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs, rounded

logger: logging.Logger = logging.getLogger("kvwire.store")

_ABSENT: Final = np.uint8(ABSENT)
_SYNCS: Final = ("flush", "put")
_SERIALS_PER_S: Final = 1_000_000
# How often a write that lacks room waits for other calls that read and write.
_ROUNDS: Final = 8
# A sixteenth of the slots of each size stays free, but no more than one batch.
_RESERVE_SHARE: Final = 16
# Reading this little from the kernel's cache takes no longer than waking a thread.
_AT_ONCE_BYTES: Final = 256 * KIB
# The last one: Python cannot decode everything that SQLite quotes from a damaged file.
_ERRORS: Final = (OSError, sqlite3.Error, UnicodeDecodeError)
# SQLite's errors about the disk; all others are about a damaged file.
_NOT_DAMAGE: Final = tuple(
    f"SQLITE_{what}" for what in ("BUSY", "CANTOPEN", "IOERR", "PERM", "READONLY")
)


class _Room(NamedTuple):
    """Slots for a write, and the blocks that it evicts; both are pinned."""

    slots: Ids
    evicted: IndexedSlots


class DiskTier(CodedTier):
    """Keeps blocks in a file. Made by :meth:`open`.

    Attributes:
        index: The blocks that are there, in their slots.
        rows: The same on the disk, as rows of a database.
    """

    durable = True
    slotted = True
    at_once_bytes = _AT_ONCE_BYTES

    def __init__(
        self,
        address: TierAddress,
        directory: TierDirectory,
        tenants: Tenants,
        now: Callable[[], float],
    ) -> None:
        super().__init__(address)
        self._directory = directory
        self.rows = directory.index
        self._file = directory.file
        self._slabs = Slabs(directory.slabs, directory.index.slab_bytes)
        nbytes = len(self._slabs) * self._slabs.slab_bytes
        self._tenants = tenants
        self.index = Index(self._slabs, tenants.shares("disk", nbytes))
        self.index.now = now
        self._sums = np.zeros(self._slabs.slots, np.uint64)
        self._nbytes = np.zeros(self._slabs.slots, np.int64)
        self._trusted = np.zeros(self._slabs.slots, np.bool_)
        # For each slab, the slot size that its rows have; 0 without rows.
        self._named_bytes = np.zeros(len(self._slabs), np.int64)
        # Slots with a row for an image that is not there any more.
        self._stale: set[int] = set()
        self.index.unnamed = self._stale
        self._serial = 0
        # Written blocks that were not there before.
        self._written_blocks = 0
        self._counts.size_bytes = nbytes
        self._in_flight = InFlightFills()
        # The running reads and writes of slots.
        self._users: set[asyncio.Future[None]] = set()
        self._writing = asyncio.Lock()
        # The first failure of a flush since the tier was opened.
        self._unflushed = ""
        self._restore()

    @classmethod
    async def open(
        cls,
        address: TierAddress,
        tenants: Tenants | None = None,
        *,
        file_type: type[File] = File,
        now: Callable[[], float] = time,
    ) -> DiskTier:
        """Open a tier: ``disk:DIRECTORY?size=SIZE&slab=SIZE&sync=...``.

        ``now`` returns the seconds since 1970 by which blocks grow old.

        Cancel safety: the directory is unlocked and closed again.
        """
        nbytes, slab_bytes, sync = cls._asked(address)
        place = Path(address.place)
        threads = Threads()
        opened: list[TierDirectory] = []

        def open_it() -> DiskTier:
            opened.append(
                TierDirectory(place, nbytes, slab_bytes, sync == "put", file_type)
            )
            shared_by = Tenants() if tenants is None else tenants
            return cls(address, opened[0], shared_by, now)

        try:
            return await threads.run(open_it)
        except BaseException as exc:
            # Also if this was cancelled while the thread was opening it.
            for directory in opened:
                directory.discard()
            # An error with a file name means that no file could be made, of any size.
            if _is_full(exc) and not getattr(exc, "filename", None):
                there = next(filter(Path.exists, (place, *place.parents)))
                free = shutil.disk_usage(there).free
                text = (
                    f"the disk has no room for {in_bytes(nbytes)} and an index beside "
                    f"them: {in_bytes(free)} are free; set a smaller ?size="
                )
                raise UsageError(f"tier {address.text!r}: {text}") from exc
            if isinstance(exc, _ERRORS):
                raise UsageError(f"tier {address.text!r}: {_why(exc)}") from exc
            raise
        finally:
            threads.close()

    @staticmethod
    def _asked(address: TierAddress) -> tuple[int, int, str]:
        """Return the options: size, slab size and sync mode."""
        address.require("size", "slab", "sync", "codec")
        if not address.place or "size" not in address.options:
            raise UsageError(f"tier {address.text!r}: write disk:DIRECTORY?size=100GiB")
        nbytes = address.size(address.options["size"])
        return (
            nbytes,
            address.slab_bytes(nbytes),
            address.choice("sync", _SYNCS, "flush"),
        )

    async def find(self, keys: Keys) -> Orders:
        slots = self.index.find(keys)
        return np.where(slots >= 0, self.index.orders(slots), _ABSENT)

    def indexed(self, keys: Keys) -> Bits:
        """Return the blocks that this process has written or verified."""
        slots = self.index.find(keys)
        held: Bits = (slots >= 0) & self._trusted[slots]
        return held

    def touch(self, keys: Keys) -> None:
        if not keys.size:
            return
        slots = self.index.find(keys)
        here = slots >= 0
        if all_of(here):
            self.index.touch(slots)
        elif any_of(here):
            self.index.touch(slots[here])

    def too_large(self, namespace: Namespace) -> str:
        # The size of an encoded block is known only after encoding.
        if self._encodes:
            return ""
        return self._too_large(namespace, namespace.image_bytes)

    def _too_large(self, namespace: Namespace, nbytes: int) -> str:
        if self.index.fits(nbytes, self._tenants.number(namespace.tenant)):
            return ""
        if self._slabs.capacity(nbytes):
            return (
                f"a block of {nbytes} bytes, which takes {rounded(nbytes)}, is more "
                f"than half of the quota that tenant {namespace.tenant} has on this "
                f"disk"
            )
        return (
            f"a block of {nbytes} bytes has no room in a slab of "
            f"{self._slabs.slab_bytes}; open an empty directory with ?slab= of "
            f"several blocks"
        )

    async def _write_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Write the absent blocks, as many at a time as there are free slots."""
        nbytes = int(batch.images.lengths[0])
        results = np.full(batch.keys.size, LANDED, np.uint8)
        if error := self._too_large(namespace, nbytes):
            self.error = error
            results[:] = REFUSED
            return results
        left = np.arange(batch.keys.size)
        waits = 0
        while True:
            held = await self._look(namespace, batch.keys[left])
            self.touch(batch.keys[left[held]])
            left = left[~held]
            if not left.size:
                return results
            room = self._room(namespace, nbytes, batch.keys, left)
            if room.slots.size or room.evicted.slots.size:
                part = batch.selected(left[: room.slots.size])
                if not await self._write_to(room, namespace, part):
                    results[left] = FAILED
                    return results
                left = left[room.slots.size :]
            elif self._users and waits < _ROUNDS:
                waits += 1
                await asyncio.wait(tuple(self._users))
            else:
                self.error = "it has no room for so many blocks besides those in use"
                results[left] = REFUSED
                return results

    async def _read_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Fill images with blocks, and compare them with their checksums."""
        results = np.full(batch.keys.size, MISSING, np.uint8)
        slots = self.index.find(batch.keys)
        here = np.flatnonzero(slots >= 0)
        if not here.size:
            return results
        # Its order now: it may have been put again since it was found.
        batch.orders[here] = self.index.orders(slots[here])
        part = batch.selected(here)
        slots = slots[here]
        if batch.born is not None:
            batch.born[here] = self.index.born(slots)
        self.index.pin(slots)
        bad = np.zeros(here.size, np.bool_)
        try:
            got = None
            if part.images.nbytes <= _AT_ONCE_BYTES:
                with suppress(OSError):
                    got = self._read_slots(part, slots, at_once=True)
            if got is None:
                with self._in_use():
                    got = await self._threads.run(
                        partial(self._read_slots, part, slots)
                    )
            results[here] = got
            batch.tell(here, part)
            self._trusted[slots[got == LANDED]] = True
            # A block that could not be read may be whole, and readable the next time.
            self._trusted[slots[got == FAILED]] = False
            bad = got == DAMAGED
        finally:
            self.index.unpin(slots[~bad])
        if bad.any():
            await self._discard(part.keys[bad], slots[bad])
        return results

    async def delete(self, keys: Keys) -> None:
        """Delete blocks; with ``sync=flush`` a power cut may undo it before a flush."""
        while await self._in_flight.one_ended(keys):
            continue
        self.index.delete(keys)
        if not await self._erased():
            raise OSError(
                f"{self.name}: the delete lasts only until the tier is opened again: "
                f"{self.error}"
            )

    def known(self, digest: bytes) -> Keys:
        return self.index.of_namespace(digest)

    async def delete_namespace(self, digest: bytes) -> None:
        coming = self._in_flight.of_namespace(digest)
        await self.delete(np.concatenate((coming, self.known(digest))))

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        """See Tier. Pins are stored on the disk too; if that fails, nothing changes."""
        if verb.kind is VerbKind.PREFETCH:
            return await super().apply(verb, namespace, keys)
        return await run_to_completion(self._pin(verb, keys))

    def tenant_uses(self) -> tuple[TenantUse, ...]:
        return uses_of(self.index)

    def stats(self) -> TierStats:
        return msgspec.structs.replace(
            self._counts,
            blocks=len(self.index),
            used_bytes=self._slabs.used_bytes,
            written_blocks=self._written_blocks,
            evicted_blocks=self.index.evicted,
        )

    def namespaces(self) -> Iterable[Namespace]:
        return tuple(self.rows.namespaces.values())

    async def flush(self) -> None:
        # A disk may have dropped data that it failed to write, so the error stays until
        # the tier is closed.
        async with self._writing:
            try:
                await self._threads.run(self._sync)
            except _ERRORS as exc:
                self._failed("flushing", exc)
                # If an index is only full, its log still has all changes; and without a
                # thread nothing was tried.
                tried = not isinstance(exc, BlockingIOError)
                if tried and (isinstance(exc, OSError) or not _is_full(exc)):
                    self._unflushed = self.error
                raise OSError(f"{self.name}: {self.error}") from exc
        if self._unflushed:
            raise OSError(f"{self.name}: {self._unflushed}")

    async def close(self) -> None:
        in_order = False
        try:
            in_order = await self._erased()
            await self.flush()
            named = self.index.named().slots
            in_order &= not self._stale and bool(self._trusted[named].all())
        except OSError:
            in_order = False  # `error` has the reason
        finally:
            closing = partial(self._directory.close, in_order=in_order)
            try:
                await self._threads.run(closing)
            except _ERRORS as exc:
                self._failed("closing", exc)
            finally:
                self._threads.close()

    # --- on the loop ------------------------------------------------------------------

    async def _pin(self, verb: Verb, keys: Keys) -> Placement:
        """Pin or unpin blocks, in the index on the disk as well.

        A pin protects blocks here first, so that they stay while it is written. An
        unpin is written first, so that blocks whose rows are still pinned stay.
        """
        pins = verb.kind is VerbKind.PIN
        # Not beside another pin or unpin, which would see half of this one.
        async with self._writing:
            before = keys[self.index.kept(keys)]
            ends = self.index.ends(self.index.find(before))
            placement = None
            # Also blocks that are not pinned here, beyond the bound: their rows may be.
            named = keys[self.index.find(keys) >= 0]
            until = None
            if pins:
                placement = self.index.apply(verb, keys)
                named = keys[placement.done]
                until = self.index.ends(self.index.find(named))
            slots = self.index.find(named)
            try:
                await self._threads.run(partial(self.rows.pin, named, slots, until))
            except _ERRORS as exc:
                self._failed("pinning", exc)
                here = self.index.find(keys) >= 0
                if pins:
                    self.index.restore_pins(keys, before, ends)
                placing = Placing(keys.size)
                placing.rule(here, BlockState.DEFERRED, f"{self.name}: {self.error}")
                return placing.end()
            return placement or self.index.apply(verb, keys)

    async def _look(self, namespace: Namespace, keys: Keys) -> Bits:
        """Wait for running writes of these blocks; return which are held.

        All others are absent, or cannot be read. Between the last lookup and the return
        there is no await.
        """
        unreadable = np.zeros(keys.size, np.bool_)
        while True:
            slots = self.index.find(keys)
            there = (slots >= 0) & ~unreadable
            doubtful = there & ~self._trusted[slots]
            if await self._in_flight.one_ended(keys):
                continue
            if doubtful.any():
                found = await self._verify(namespace, keys[doubtful], slots[doubtful])
                unreadable[doubtful] = found == FAILED
                continue
            return there

    async def _verify(
        self, namespace: Namespace, keys: Keys, slots: Ids
    ) -> BlockResults:
        """Read blocks that may be damaged, and drop those that are."""
        scratch = np.empty(keys.size * namespace.image_bytes, np.uint8)
        images = images_in(scratch, namespace.image_bytes, keys.size)
        sizes = np.zeros(keys.size, np.int64)
        batch = Batch(keys, self.index.orders(slots), images, sizes)
        results = await self._read_entries(namespace, batch)
        self._counts.count(results, written=False)
        return results

    def _room(self, namespace: Namespace, nbytes: int, keys: Keys, left: Ids) -> _Room:
        """Take free slots for absent blocks, and choose the blocks to evict with them.

        Args:
            namespace: The blocks' namespace.
            nbytes: Bytes of each.
            keys: All blocks of the write, which are not evicted for each other.
            left: The positions of the absent ones.
        """
        index = self.index
        tenant = self._tenants.number(namespace.tenant)
        slots = index.take(nbytes, left.size, tenant, beyond=left.size)
        if slots.size < left.size and (news := self._slabs.news_of(nbytes)):
            logger.warning("tier %s lacks room: %s", sayable(self.name), news)
        mine = index.find(keys)
        mine = mine[mine >= 0]
        index.pin(mine)
        evicted = IndexedSlots.joined()
        if over := index.overdrawn(nbytes, tenant):
            evicted = index.own_victims(rounded(nbytes), over, tenant)
            paid = int(self._sizes(evicted.slots).sum()) // rounded(nbytes)
            kept = slots.size - max(0, over - paid)
            index.give_back(slots[max(0, kept) :])
            slots = slots[: max(0, kept)]
        lacking = self.reserve(nbytes) - self._slabs.free(rounded(nbytes))
        lacking -= int(np.count_nonzero(self._sizes(evicted.slots) == rounded(nbytes)))
        if lacking > 0:
            # Without a free slot, a block has to go before another one is written.
            more = index.victims(nbytes, lacking if slots.size else 1, tenant)
            evicted = IndexedSlots.joined(evicted, more)
        index.unpin(mine)
        # The old image of a block that could not be read goes once it is written again.
        again = keys[left[: slots.size]]
        old = index.find(again)
        replaced = IndexedSlots(again[old >= 0], old[old >= 0])
        index.pin(replaced.slots)
        return _Room(slots, IndexedSlots.joined(evicted, replaced))

    def reserve(self, nbytes: int) -> int:
        """Return how many slots of a size stay free, so that nothing is overwritten.

        A write goes to free slots. The blocks that it evicts lose their rows in the
        transaction that records it, and their slots are free from then on.
        """
        size = rounded(nbytes)
        slabs = int(np.count_nonzero(self._slabs.slot_bytes == size))
        share = slabs * self._slabs.slab_bytes // _RESERVE_SHARE
        return max(1, min(STORE_BATCH_BYTES, share) // size)

    def _sizes(self, slots: Ids) -> Ids:
        return self._slabs.slot_bytes[slots // self._slabs.stride]

    async def _write_to(self, room: _Room, namespace: Namespace, batch: Batch) -> bool:
        """Write images into the slots of a room; return whether that worked.

        Only then the slots get their keys, and the evicted blocks lose theirs.
        """
        slots, evicted = room
        self._in_flight.begin(batch.keys)
        written = False
        try:
            with self._in_use():
                async with self._writing:
                    evicted = self.index.evictable(evicted)
                    # From here on the old rows are wrong, whatever happens.
                    self._stale.update(slots.tolist())
                    work = partial(
                        self._write_slots, namespace, batch, slots, evicted.slots
                    )
                    await self._threads.run(work)
                    self._stale.difference_update(slots.tolist())
                    written = True
        except _ERRORS as exc:
            self._failed("writing", exc)
        finally:
            self._in_flight.end(batch.keys)
            if written:
                self.error = ""
                self.index.part_with(*evicted)
                self._stale.difference_update(evicted.slots.tolist())
                self._trusted[slots] = True
                self.index.mark(slots, batch.orders)
                self.index.name(batch.keys, slots, batch.born)
                self.index.unpin(slots)
                self._written_blocks += slots.size
            else:
                self.index.give_back(slots)
                self.index.unpin(evicted.slots[::-1])
        return written

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Make writers that need room wait until the block has ended."""
        over = asyncio.get_running_loop().create_future()
        self._users.add(over)
        try:
            yield
        finally:
            self._users.remove(over)
            over.set_result(None)

    async def _discard(self, keys: Keys, slots: Ids) -> None:
        """Drop damaged blocks, pinned by the caller, here and on the disk."""
        gone = slots[self.index.forget(keys, slots)]
        try:
            await self._erased()
        finally:
            self.index.give_back(gone)

    async def _erased(self) -> bool:
        """Erase stale rows from the index on the disk; return whether that worked."""
        try:
            async with self._writing:
                stale = [range(slot, slot + 1) for slot in sorted(self._stale)]
                if stale:
                    await self._threads.run(partial(self.rows.erase, stale))
                self._stale.difference_update(slot for (slot,) in stale)
        except _ERRORS as exc:
            self._failed("writing", exc)
            return False
        return True

    def _failed(self, what: str, error: Exception) -> None:
        if _is_full(error):
            # SQLite has no error number for it, only a text.
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.error = f"{what} failed: {with_remedy(error)}"

    # --- on a thread ------------------------------------------------------------------

    def _restore(self) -> None:
        """Load the index; if two slots have the same key, the later one counts."""
        found = list(self.rows.rows())
        if not found:
            return
        rows = DiskRows(*map(np.concatenate, zip(*found, strict=True)))
        self._serial = int(rows.serials.max())
        newest = np.argsort(rows.serials, kind="stable")[::-1]
        rows = rows.selected(newest)
        slabs = rows.slots // self._slabs.stride
        sizes = rounded(rows.nbytes)
        # All rows of a slab have one slot size; rows with another size are invalid.
        inside = slabs < len(self._slabs)
        known, first = np.unique(slabs[inside], return_index=True)
        self._named_bytes[known] = sizes[inside][first]
        inside[inside] = sizes[inside] == self._named_bytes[slabs[inside]]
        inside &= rows.slots % self._slabs.stride < self._slabs.slab_bytes // sizes
        inside[inside] = once(rows.keys[inside])
        self._stale.update(rows.slots[~inside].tolist())
        if inside.any():
            self._adopt(rows.selected(inside), sizes[inside])

    def _adopt(self, rows: DiskRows, sizes: Ids) -> None:
        """Load consistent rows, the newest first."""
        self._sums[rows.slots] = rows.sums
        self._nbytes[rows.slots] = rows.nbytes
        self._trusted[rows.slots] = self._directory.whole
        slots = np.sort(rows.slots)
        borders = np.flatnonzero(np.diff(slots // self._slabs.stride)) + 1
        for taken in np.split(slots, borders):
            slab = int(taken[0]) // self._slabs.stride
            self._slabs.restore(slab, int(self._named_bytes[slab]), taken)
        # The size with the newest write counts as the last used one. Times in the
        # future, from a wrong clock, are replaced by now, so that blocks can expire.
        born = np.minimum(rows.serials / _SERIALS_PER_S, self.index.now())
        owners = self._owners(rows.keys)
        for size in reversed(dict.fromkeys(sizes.tolist())):
            mine = sizes == size
            self.index.adopt(
                rows.keys[mine],
                rows.slots[mine],
                rows.orders[mine],
                owners[mine],
                born[mine],
            )
        slots, ends = self.rows.pins()
        for until in np.unique(ends).tolist():
            pinned = np.isin(rows.slots, slots[ends == until])
            self.index.keep(rows.keys[pinned], rows.slots[pinned], until)
        self.index.trim()

    def _owners(self, keys: Keys) -> Ids:
        """Return the tenant's number for each block."""
        numbers = {
            digest: self._tenants.number(namespace.tenant)
            for digest, namespace in self.rows.namespaces.items()
        }
        owners = (numbers.get(key[:DIGEST_BYTES], 0) for key in keys.tolist())
        return np.fromiter(owners, np.int64, keys.size)

    def _write_slots(
        self, namespace: Namespace, batch: Batch, slots: Ids, evicted: Ids
    ) -> None:
        """Write images, and then their rows in the place of evicted ones."""
        self._directory.check()
        self.rows.dirty()
        if not slots.size:
            self.rows.erase(range(slot, slot + 1) for slot in evicted.tolist())
            return
        nbytes = batch.images.lengths.astype(np.int64)
        size = rounded(int(nbytes[0]))
        slabs = np.unique(slots // self._slabs.stride)
        before = self._named_bytes[slabs]
        moved = slabs[(before != size) & (before > 0)]
        if moved.size:
            # Slots of the new size begin elsewhere, so the old rows become invalid.
            begins = (moved * self._slabs.stride).tolist()
            self.rows.erase(range(at, at + self._slabs.stride) for at in begins)
        self._named_bytes[slabs] = size
        sums = _sums_of(batch)
        for run, offset in self._runs(slots, nbytes):
            self._file.write(_padded(batch.images.selected(run)), offset)
        if self._directory.synced:
            self._file.sync()
        # A chain's head is newer than the blocks after it; see Index.unpin. Serial
        # numbers are also microseconds since 1970, and never decrease.
        self._serial = max(self._serial, int(self.index.now() * _SERIALS_PER_S))
        serials = self._serial + np.arange(slots.size, 0, -1)
        self._serial += slots.size
        rows = DiskRows(slots, batch.keys, batch.orders, nbytes, sums, serials)
        self.rows.record(namespace, rows, evicted)
        self._sums[slots] = sums
        self._nbytes[slots] = nbytes

    def _sync(self) -> None:
        self._directory.check()
        self._file.sync()
        self.rows.sync()

    def _read_slots(
        self, batch: Batch, slots: Ids, *, at_once: bool = False
    ) -> BlockResults:
        """Read images, and compare them with their checksums."""
        batch, fit = batch.stored(self._nbytes[slots])
        results = np.full(slots.size, LANDED, np.uint8)
        results[~fit] = DAMAGED
        nbytes = batch.images.lengths.astype(np.int64)
        order = np.argsort(slots)
        order = order[fit[order]]
        for run, offset in self._runs(slots[order], nbytes[order]):
            part = order[run]
            try:
                self._file.read(
                    _padded(batch.images.selected(part)), offset, at_once=at_once
                )
            except OSError as exc:
                if at_once:
                    raise
                results[part] = FAILED
                self._failed("reading", exc)
        whole = _sums_of(batch) == self._sums[slots]
        results[(results == LANDED) & ~whole] = DAMAGED
        return results

    def _runs(self, slots: Ids, nbytes: Ids) -> Iterable[tuple[Ids, int]]:
        """Yield the runs of slots that are adjacent in the file, with their offsets."""
        offsets = self._slabs.begins[slots]
        if slots.size == 1:
            yield np.zeros(1, np.int64), offsets.item()
            return
        breaks = np.flatnonzero(np.diff(offsets) != rounded(nbytes[:-1])) + 1
        for run in np.split(np.arange(slots.size), breaks) if slots.size else ():
            yield run, int(offsets[run[0]])


def _sums_of(batch: Batch) -> Sums:
    return image_sums(batch.images) ^ named_sums(batch.keys, batch.orders)


def _why(error: BaseException) -> str:
    """Return why a directory cannot be opened, with the remedy."""
    if isinstance(error, OSError):
        return with_remedy(error)
    if getattr(error, "sqlite_errorname", "").startswith(_NOT_DAMAGE):
        return (
            f"its index: {error}; see that the disk works, that this user may write "
            f"there, and that this process may open more files (ulimit -n)"
        )
    return f"its index is damaged: {error}; delete the directory, or use another one"


def _is_full(error: BaseException) -> bool:
    """Return whether an error only means that the disk is full."""
    name = getattr(error, "sqlite_errorname", "")
    return name == "SQLITE_FULL" or getattr(error, "errno", 0) == errno.ENOSPC


# The padding after an image that is shorter than its slot; its content does not matter.
_PAD: Final = memoryview(bytearray(GRAIN_BYTES))


def _padded(images: Fragments) -> Sequence[memoryview]:
    """Return the images, each followed by the padding of its slot."""
    views: list[memoryview] = []
    for view in views_of(images):
        views.append(view)
        if pad := -view.nbytes % GRAIN_BYTES:
            views.append(_PAD[:pad])
    return views
