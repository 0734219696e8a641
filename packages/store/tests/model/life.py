"""A store on a disk that is open, and a shadow of what has to be in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvwire.kv.blocks import Bits
from kvwire_certify.oracle import Wrong
from kvwire_store.address import TierAddress
from kvwire_store.keys import as_keys
from kvwire_store.namespace import ABSENT
from kvwire_store.placement import VerbKind
from kvwire_store.store import BlockStore
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.disk import DiskTier
from packages.store.tests.files import store_on
from packages.store.tests.model.faults import POINTS, PointedFile
from packages.store.tests.model.kinds import Block, Cache, contents, spec_of, tenant_of
from tests.support import inside

TTL_S = 100_000


class Clock:
    """The time of all stores of this process, which may be ahead."""

    ahead_s = 0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


CLOCK = Clock()


def size_of(kind: int) -> int:
    return spec_of(kind).block_bytes


# Of each room whose blocks have several sizes and are evicted.
_SLAB_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Room:
    """How large a store's tiers are, and what is put into them.

    Attributes:
        memory: The size of the memory tier, as in its address.
        disk: What stands behind ``disk:DIRECTORY?``.
        kinds: The kinds of blocks.
        numbers: How many blocks there are of each kind.
        batch: The most blocks of a put.
        puts: The most puts between two restarts.
        evicts: Whether there are more blocks than room.
        tenants: Who shares it; blocks of a room with tenants are of one size.
    """

    memory: str
    disk: str
    kinds: tuple[int, ...]
    numbers: int
    batch: int
    puts: int
    evicts: bool = True
    tenants: tuple[str, ...] = ()


@dataclass
class Shadow:
    """What has to be found.

    Attributes:
        sure: Blocks that were acknowledged, and that nobody has evicted since.
        flushed: Those of them that a power cut leaves as well.
        tried: Blocks that were put at all.
        rotten: Blocks damaged on the disk, which is known once one is read.
        deleted: Blocks that must not be found, since they were deleted or are too old.
        pinned: Blocks that are not evicted.
    """

    sure: set[Block] = field(default_factory=set)
    flushed: set[Block] = field(default_factory=set)
    tried: set[Block] = field(default_factory=set)
    rotten: set[Block] = field(default_factory=set)
    deleted: set[Block] = field(default_factory=set)
    pinned: set[Block] = field(default_factory=set)

    def forget(self, blocks: set[Block]) -> None:
        """These may be missing from now on."""
        self.sure -= blocks
        self.flushed -= blocks
        self.pinned -= blocks


class Life:
    """One store from its opening to its end, with every answer checked."""

    def __init__(self, directory: Path, room: Room, shadow: Shadow) -> None:
        self.directory = directory
        self.room = room
        self.shadow = shadow
        self._tier: DiskTier | None = None
        self._store: BlockStore | None = None
        # What was there when the process before this one ended; a write under way then
        # may have put others in the place of some of it.
        self.inherited: set[Block] | None = None
        # Blocks whose pins end by themselves.
        self.timed: set[Block] = set()

    async def open(self) -> None:
        address = TierAddress.parse(f"disk:{self.directory}?{self.room.disk}")
        POINTS.watch(self.directory)
        self._tier = None
        tenants = Tenants(self.room.tenants)
        self._tier = await DiskTier.open(
            address, tenants, file_type=PointedFile, now=CLOCK
        )
        memory = f"memory:{self.room.memory}"
        self._store = store_on(self._tier, memory=memory, tenants=tenants)
        inside.tiers(self._store).memory.index.now = CLOCK
        replaced = 0
        if self.inherited is not None:
            replaced = len(self.present(self.shadow.tried) - self.inherited)
            if len(sizes := {size_of(kind) for kind in self.room.kinds}) > 1:
                # A size without a slab takes that of another, before it is written to.
                replaced += _SLAB_BYTES // min(sizes)
        self._check_present(set(self.shadow.sure), -replaced)

    @property
    def is_open(self) -> bool:
        return self._store is not None

    async def close(self) -> None:
        if self._store is None:
            return
        before, counts = set(self.shadow.sure), self.counts
        store, self._store = self._store, None
        await store.close()
        # What memory still had was written to the disk, in the place of something.
        self._check_present(before, counts[0])
        self._check_replaced(counts)

    async def put(self, blocks: Sequence[Block]) -> list[Block]:
        """Put blocks of one kind; those that were not acknowledged."""
        kind, cache = blocks[0].kind, Cache.of(blocks[0].kind, blocks)
        before, counts = set(self.shadow.sure), self.counts
        self.shadow.tried.update(blocks)
        self.shadow.deleted.difference_update(blocks)
        hashes, ids = [block.hash for block in blocks], list(range(len(blocks)))
        assert self._store is not None
        tenant = tenant_of(kind)
        outcome = await self._store.put(hashes, cache.paged, ids, tenant=tenant)
        if not np.array_equal(cache.rows, Cache.of(kind, blocks).rows):
            raise Wrong("late-write", "a put has changed the caller's cache")
        landed = {blocks[place] for place in outcome.landed.ids().tolist()}
        if landed | {blocks[place] for _, place in outcome.missing} != set(blocks):
            raise Wrong("lost", "an outcome does not speak of every block")
        self.shadow.rotten &= self.present(self.shadow.rotten)
        landed -= self.shadow.rotten
        self.shadow.sure |= landed
        if "sync=put" in self.room.disk:
            self.shadow.flushed |= landed
        self._check_present(before | landed, counts[0])
        self._check_replaced(counts)
        return [blocks[place] for _, place in outcome.missing]

    async def get(self, blocks: Sequence[Block], *, failing: bool = False) -> None:
        """Get blocks of one kind; all that have to be there, with all their bytes.

        Args:
            blocks: Which.
            failing: Whether reading may fail: then they need only be there.
        """
        kind, cache = blocks[0].kind, Cache.empty(blocks[0].kind, len(blocks))
        before, evicted = set(self.shadow.sure), self._evicted
        hashes, ids = [block.hash for block in blocks], list(range(len(blocks)))
        assert self._store is not None
        tenant = tenant_of(kind)
        outcome = await self._store.get(hashes, cache.paged, ids, tenant=tenant)
        here = outcome.landed.ids()
        numbers = np.array([block.number for block in blocks], np.uint64)[here]
        wrong = (cache.rows[here] != contents(kind, numbers)).any(axis=1)
        if wrong.any():
            raise Wrong("foreign", f"wrong bytes: {[blocks[at] for at in here[wrong]]}")
        shadow = self.shadow
        strange = {blocks[at] for at in here} - (shadow.tried - shadow.deleted)
        if strange:
            some = sorted(strange)[:5]
            raise Wrong("stale", f"not put, or deleted, or too old: {some}")
        self._check_present(before, evicted)
        missed = self.shadow.sure & {blocks[at] for _, at in outcome.missing}
        if len(missed) > self._evicted - evicted and not failing:
            raise Wrong(
                "lost",
                f"{len(missed)} acknowledged blocks are lost: {sorted(missed)[:5]}; "
                f"{'; '.join(outcome.missing.reasons)}",
            )

    async def delete(self, blocks: Sequence[Block]) -> None:
        self.shadow.forget(set(blocks))
        hashes, cache = [one.hash for one in blocks], Cache.empty(blocks[0].kind, 1)
        assert self._store is not None
        tenant = tenant_of(blocks[0].kind)
        await self._store.delete(hashes, cache.paged, tenant=tenant)
        self.shadow.deleted.update(blocks)

    async def apply(self, verb: VerbKind, blocks: Sequence[Block], ttl_s: int) -> None:
        """Carry out a verb on blocks; what it reports has to be what is there."""
        assert self._store is not None
        assert self._tier is not None
        before, evicted = set(self.shadow.sure), self._evicted
        unpinned = self.shadow.pinned - set(blocks)
        if verb is not VerbKind.PREFETCH:
            # Until it has returned they may be pinned or not.
            self.shadow.pinned = unpinned
        call = getattr(self._store, verb.name.lower())
        options: dict[str, object] = {}
        if verb is VerbKind.PIN:
            options["ttl_s"] = ttl_s or None
        hashes, cache = [one.hash for one in blocks], Cache.empty(blocks[0].kind, 1)
        tenant = tenant_of(blocks[0].kind)
        told = await call(hashes, cache.paged, tenant=tenant, **options)
        keys = as_keys(block.key for block in blocks)
        memory, disk = inside.tiers(self._store).memory.index, self._tier.index
        kept = memory.kept(keys), disk.kept(keys)
        right = {
            VerbKind.PREFETCH: memory.find(keys) >= 0,
            VerbKind.PIN: kept[0] | kept[1],
            VerbKind.UNPIN: ~(kept[0] | kept[1]),
        }[verb]
        if (wrong := told.done & ~right).any():
            named = self._named(blocks, wrong)
            raise Wrong("failed", f"{verb.name}: done, and not so: {named}")
        # Where there are several sizes, one without a slab takes that of pinned blocks.
        if verb is VerbKind.PIN and len(set(map(size_of, self.room.kinds))) == 1:
            sure = zip(blocks, kept[1], strict=True)
            self.shadow.pinned |= {block for block, pinned in sure if pinned}
            self.timed -= set(blocks)
            self.timed |= set(blocks) if ttl_s else set()
        self._check_present(before, evicted)
        lost = self.shadow.sure & set(self._named(blocks, told.missing))
        if len(lost) > self._evicted - evicted:
            some = sorted(lost)[:5]
            raise Wrong("lost", f"{verb.name}: acknowledged, and missing: {some}")

    @staticmethod
    def _named(blocks: Sequence[Block], which: Bits) -> list[Block]:
        return [block for block, one in zip(blocks, which, strict=True) if one]

    def age(self) -> None:
        """Let so much time pass that what a tenant has is too old."""
        late = {block for block in self.shadow.tried if tenant_of(block.kind) == "b"}
        CLOCK.ahead_s += TTL_S
        # A pin with an end is over by now.
        self.shadow.pinned -= self.timed
        self.shadow.forget(late)
        self.shadow.deleted |= late

    async def get_all(self) -> None:
        """Get every block that was ever put, some at a time."""
        for kind in self.room.kinds:
            blocks = sorted(one for one in self.shadow.tried if one.kind == kind)
            for first in range(0, len(blocks), 256):
                await self.get(blocks[first : first + 256])

    async def flush(self) -> None:
        assert self._store is not None
        before, counts = set(self.shadow.sure), self.counts
        try:
            await self._store.flush()
        finally:
            self._check_present(before, counts[0])
            self._check_replaced(counts)
        self.shadow.flushed |= self.shadow.sure

    def present(self, blocks: Iterable[Block]) -> set[Block]:
        """Those of some blocks that the disk tier says it has; from any thread."""
        listed = list(blocks)
        if self._tier is None:
            return set(listed)  # it is being opened, and nothing is evicted by that
        keys = as_keys(block.key for block in listed)
        looking = self._tier.find(keys)
        try:
            looking.send(None)
        except StopIteration as done:
            found = done.value != ABSENT
            return {b for b, here in zip(listed, found, strict=True) if here}
        raise AssertionError("a disk tier waits before it answers")

    def damage(self, block: Block) -> None:
        """Change a byte of a block, wherever it is on the disk."""
        image = contents(block.kind, np.array([block.number], np.uint64)).tobytes()
        self.shadow.forget({block})
        self.shadow.rotten.add(block)
        for file in self.directory.iterdir():
            with file.open("r+b") as opened:
                data, place = opened.read(), -1
                while (place := data.find(image, place + 1)) >= 0:
                    opened.seek(place + len(image) // 2)
                    opened.write(bytes([data[place + len(image) // 2] ^ 1]))

    # --- inside -----------------------------------------------------------------------

    @property
    def counts(self) -> tuple[int, int]:
        """How many blocks the disk has evicted and written."""
        assert self._tier is not None
        stats = self._tier.stats()
        return stats.evicted_blocks, stats.written_blocks

    @property
    def _evicted(self) -> int:
        return self.counts[0]

    def _check_replaced(self, before: tuple[int, int]) -> None:
        """Whatever failed, no more blocks have gone than were written in their place.

        A put may also free the slots of the reserve. Where there are several sizes, one
        without a slab takes that of others; and where there is no free slot at all, one
        block goes before another is written.
        """
        evicted, written = (
            now - then for now, then in zip(self.counts, before, strict=True)
        )
        size, *others = set(map(size_of, self.room.kinds))
        assert self._tier is not None
        if not others and evicted > written + 1 + self._tier.reserve(size):
            text = f"{evicted} blocks were evicted for {written} that were written"
            raise Wrong("lost", text)

    def _check_present(self, expected: set[Block], evicted: int) -> None:
        """What is not there any more was evicted, and nothing else."""
        gone = expected - self.present(expected)
        count = self._evicted - evicted
        if pinned := gone & self.shadow.pinned:
            raise Wrong("lost", f"pinned blocks are gone: {sorted(pinned)[:5]}")
        if len(gone) > count or (gone and not self.room.evicts):
            some = sorted(gone)[:5]
            text = f"{len(gone)} blocks are gone and {count} were evicted: {some}"
            raise Wrong("lost", text)
        self.shadow.forget(gone)
