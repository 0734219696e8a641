"""Replays a trace through tiers in virtual time, to predict their hits.

The virtual tiers (:mod:`kvwire.store.tiers.virtual`) make the same decisions as a
store's tiers, and each line runs the store's own put and get, without the copies. So a
replay admits and evicts exactly as a store does, at the speed of the store's index.

Lines are replayed one after another. The trace's timestamps are the clock, also for the
expiry of blocks whose tenant has a ``ttl``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments
from kvwire.kv.spec import KVSpec
from kvwire.store.address import TierAddress
from kvwire.store.counters import StoreCounters
from kvwire.store.eviction import EVICTIONS
from kvwire.store.index import Index
from kvwire.store.keys import Keys, Orders
from kvwire.store.limits import STORE_NAMESPACES_MAX
from kvwire.store.namespace import DIGEST_BYTES, Namespace
from kvwire.store.operations.base import Operation
from kvwire.store.operations.get import GetOperation
from kvwire.store.operations.group_request import BlockRequest
from kvwire.store.operations.put import PutOperation
from kvwire.store.placement import leading
from kvwire.store.tenants import Tenants
from kvwire.store.threads import Threads
from kvwire.store.tier_stack import TierStack
from kvwire.store.tiers.base import TierStats
from kvwire.store.tiers.slabs import Slabs
from kvwire.store.tiers.virtual import VirtualClock, VirtualDisk, VirtualMemory
from kvwire.store.trace import TraceLine, TraceOp

# The most intervals of the timeline; when there are more, intervals become twice as
# long.
_POINTS_MAX: Final = 128
# The initial length of an interval; it doubles.
_PART_S: Final = 1 / 1024
_ID_BYTES: Final = 8


class ReplayedTier(msgspec.Struct, kw_only=True):
    """One tier's counts.

    Attributes:
        name: Its address.
        hit_blocks: Blocks that gets read from it.
        read_bytes: The bytes of these blocks.
        written_blocks: Blocks that it stored.
        written_bytes: The bytes of these blocks.
        evicted_blocks: Blocks that it evicted to make room for others.
        blocks: Blocks that it has at the end.
        used_bytes: Bytes that these blocks use.
        size_bytes: Bytes that blocks may use.
    """

    name: str
    hit_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    blocks: int = 0
    used_bytes: int = 0
    size_bytes: int = 0


class ReplayPoint(msgspec.Struct, kw_only=True):
    """The counts of one time interval, and the tiers' contents at its end.

    Attributes:
        time_s: The end of the interval, in seconds of the trace.
        asked_blocks: Requested blocks.
        hit_blocks: Blocks that were read from each tier.
        evicted_blocks: Blocks that each tier evicted to make room for others.
        used_bytes: Bytes in use in each tier.
    """

    time_s: float
    asked_blocks: int
    hit_blocks: list[int]
    evicted_blocks: list[int]
    used_bytes: list[int]


class ReplayReport(msgspec.Struct, kw_only=True):
    """The result of a replay.

    Attributes:
        lines: Lines of the trace.
        accesses: Blocks that the lines name.
        asked_blocks: Requested blocks: those of all prompts, loads and gets.
        hit_blocks: Requested blocks that were found.
        hit_rate: ``hit_blocks`` as a share of ``asked_blocks``.
        span_s: The time of the last line.
        counters: The values that the store's own counters would have.
        tiers: Each tier, the fastest first.
        part_s: The length of one interval of the timeline, in seconds of the trace.
        timeline: Up to 128 intervals; intervals in which nothing happened are left out.
    """

    lines: int
    accesses: int
    asked_blocks: int
    hit_blocks: int
    hit_rate: float
    span_s: float
    counters: StoreCounters
    tiers: list[ReplayedTier]
    part_s: float
    timeline: list[ReplayPoint]


_Sums = tuple[list[int], list[int], list[int]]
"""Hits, evictions and bytes in use so far, by tier."""


class Replay:
    """Replays one trace through one configuration of tiers.

    Attributes:
        accesses: Blocks that its lines have named so far.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        write: Literal["through", "back"] = "through",
        tenants: Sequence[str] = (),
        block_bytes: int = 0,
        ticks_per_s: float = 1000.0,
    ) -> None:
        """Make the tiers.

        Args:
            tiers: See :meth:`kvwire.BlockStore.open`; only ``memory:`` and ``disk:``. A
                disk's directory is not touched.
            write: See :meth:`kvwire.BlockStore.open`.
            tenants: See :meth:`kvwire.BlockStore.open`.
            block_bytes: The size of a block, for lines that do not record it.
            ticks_per_s: The trace's time units per second.

        Raises:
            UsageError: A tier or tenant cannot be parsed, or its kind is not supported.
        """
        memory, *below = map(TierAddress.parse, tiers)
        for address, kind in ((memory, "memory"), *((one, "disk") for one in below)):
            if address.scheme != kind:
                raise UsageError(
                    f"tier {address.text!r}: a replay takes memory:SIZE first, then "
                    "disk:NAME?size=SIZE; they also represent a server's tiers"
                )
        memory.require("slab", "evict", "populate")
        nbytes = memory.size(memory.place)
        slab = memory.slab_bytes(nbytes)
        evict = memory.choice("evict", EVICTIONS, "lru")
        known = Tenants(tenants)
        shares = known.shares("memory", nbytes)
        self._clock = VirtualClock()
        self._disks = [VirtualDisk(one, known, self._clock) for one in below]
        self._tiers = TierStack(
            Index(Slabs(nbytes // slab, slab), evict, shares, self._clock),
            self._disks,
            through=write == "through",
            threads=Threads(inline=True),
            tenants=known,
            memory=VirtualMemory,
        )
        assert isinstance(self._tiers.memory, VirtualMemory)
        self._memory = self._tiers.memory
        self._names = [address.text for address in (memory, *below)]
        self._block_bytes = block_bytes
        self._ticks_per_s = ticks_per_s
        self._namespaces: dict[tuple[str, int], Namespace] = {}
        self._now_s = 0.0
        self._lines = 0
        self.accesses = 0
        self._asked = 0
        self._hits = 0
        self._timeline = _Timeline(len(self._names))

    async def play(self, line: TraceLine) -> None:
        """Replay one line.

        Raises:
            UsageError: The size of the line's blocks is not known, or there is no such
                tenant.

        Cancel safety: the replay cannot be used afterwards.
        """
        time_s = line.timestamp / self._ticks_per_s
        self._now_s = max(self._now_s, time_s)
        self._clock.now_s = VirtualClock.now_s + self._now_s
        if time_s >= self._timeline.end_s:
            self._timeline.advance(time_s, self._asked, self._sums())
        namespace = self._namespace(line)
        keys = _keys(line.hash_ids, namespace)
        op = line.op
        self._lines += 1
        self.accesses += keys.size
        if not keys.size:
            return
        if op is TraceOp.TOUCH:
            self._tiers.touch(keys)
            return
        if op is TraceOp.DELETE:
            await self._tiers.delete(keys)
            return
        found = 0
        if op is not TraceOp.PUT:
            found = await self._get(keys, namespace, chain=op is not TraceOp.GET)
        if op in (TraceOp.REQUEST, TraceOp.PUT) and found < keys.size:
            put = _Put(self._tiers, (_Blocks(namespace, keys[found:]),))
            await put.run()
            self._memory.written_bytes += put.copied_bytes
        if not self._tiers.through:
            await self._tiers.memory.settle()

    def report(self) -> ReplayReport:
        """Return the result so far."""
        self._timeline.advance(self._now_s, self._asked, self._sums())
        counters = self._tiers.counters
        stats = self._stats()
        tiers = []
        below = sum(disk.read_bytes for disk in self._disks)
        moved = [
            (counters.got_bytes - below, self._memory.written_bytes),
            *((disk.read_bytes, disk.written_bytes) for disk in self._disks),
        ]
        for name, counts, hits, nbytes in zip(
            self._names, stats, self._by_tier(), moved, strict=True
        ):
            tiers.append(
                ReplayedTier(
                    name=name,
                    hit_blocks=hits,
                    read_bytes=nbytes[0],
                    written_bytes=nbytes[1],
                    written_blocks=counts.written_blocks,
                    evicted_blocks=counts.evicted_blocks,
                    blocks=counts.blocks,
                    used_bytes=counts.used_bytes,
                    size_bytes=counts.size_bytes,
                )
            )
        return ReplayReport(
            lines=self._lines,
            accesses=self.accesses,
            asked_blocks=self._asked,
            hit_blocks=self._hits,
            hit_rate=self._hits / self._asked if self._asked else 0.0,
            span_s=self._now_s,
            counters=counters,
            tiers=tiers,
            part_s=self._timeline.part_s,
            timeline=self._timeline.points,
        )

    # --- inside -----------------------------------------------------------------------

    async def _get(self, keys: Keys, namespace: Namespace, *, chain: bool) -> int:
        """Get blocks (only the leading ones of a ``chain``); return their number."""
        self._asked += keys.size
        found = leading(await self._tiers.find(keys)) if chain else int(keys.size)
        if found:
            request = _Blocks(namespace, keys[:found])
            get = _Get(self._tiers, (request,))
            if get.at_once():
                get.end()
            else:
                await get.run()
            self._hits += int(np.count_nonzero(get.landed(request)))
        return found

    def _stats(self) -> list[TierStats]:
        return [self._memory.stats(), *(disk.stats() for disk in self._disks)]

    def _by_tier(self) -> list[int]:
        """Return the hits that came from each tier."""
        below = [disk.stats().read_blocks for disk in self._disks]
        return [self._hits - sum(below), *below]

    def _sums(self) -> _Sums:
        stats = self._stats()
        evicted = [one.evicted_blocks for one in stats]
        return self._by_tier(), evicted, [one.used_bytes for one in stats]

    def _namespace(self, line: TraceLine) -> Namespace:
        nbytes = line.block_bytes or self._block_bytes
        namespace = self._namespaces.get((line.tenant, nbytes))
        if namespace is not None:
            return namespace
        if not nbytes:
            raise UsageError(
                "this trace does not give the block size: pass it, such as 2MiB"
            )
        if line.tenant:
            self._tiers.tenants.require(line.tenant)
        if len(self._namespaces) >= STORE_NAMESPACES_MAX:
            raise UsageError(
                f"this trace has more than {STORE_NAMESPACES_MAX} block sizes"
            )
        spec = KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=nbytes,
            block_tokens=1,
            dtype="uint8",
            components=1,
            kind="state",
        )
        namespace = Namespace("", spec, line.tenant)
        number = self._tiers.tenants.number(line.tenant)
        memory = self._tiers.memory.too_large(nbytes, number)
        below = [disk.too_large(namespace) for disk in self._disks]
        for name, why in zip(self._names, (memory, *below), strict=True):
            if why:
                raise UsageError(f"tier {name!r}: {why}")
        self._namespaces[line.tenant, nbytes] = namespace
        return namespace


def _keys(ids: list[int], namespace: Namespace) -> Keys:
    """Return the keys of numbered blocks, without a loop over them in Python."""
    rows = np.empty((len(ids), DIGEST_BYTES + _ID_BYTES), np.uint8)
    rows[:, :DIGEST_BYTES] = np.frombuffer(namespace.digest, np.uint8)
    rows[:, DIGEST_BYTES:] = np.array(ids, ">i8").view(np.uint8).reshape(-1, _ID_BYTES)
    keys: Keys = np.empty(len(ids), np.object_)
    keys[:] = rows.view(f"V{rows.shape[1]}").ravel().tolist()
    return keys


class _Blocks(BlockRequest):
    """Blocks without bytes."""

    __slots__ = ()

    def __init__(self, namespace: Namespace, keys: Keys) -> None:
        super().__init__(namespace, keys, 0)

    def fragments(self, positions: Ids, order: int) -> Fragments:
        raise NotImplementedError


class _NoCopy(Operation):
    """Counts the bytes of a copy instead of making it.

    Attributes:
        copied_bytes: The total of the bytes not copied.
    """

    # There is no other work that needs a turn.
    batch_bytes = sys.maxsize
    copied_bytes = 0

    async def copy(
        self,
        request: BlockRequest,
        positions: Ids,
        images: Fragments,
        orders: Orders | int,
    ) -> None:
        self.copied_bytes += images.nbytes

    def copy_now(
        self, request: BlockRequest, images: Fragments, orders: Orders
    ) -> None:
        self.copied_bytes += images.nbytes


class _Get(_NoCopy, GetOperation):
    """A get without copies."""


class _Put(_NoCopy, PutOperation):
    """A put without copies."""


class _Timeline:
    """A replay's counts over time, in a bounded number of equal intervals."""

    def __init__(self, tiers: int) -> None:
        self.points: list[ReplayPoint] = []
        self.end_s = 0.0
        self.part_s = _PART_S
        self._asked = 0
        self._hits = [0] * tiers
        self._evicted = [0] * tiers

    def advance(self, now_s: float, asked: int, sums: _Sums) -> None:
        """End the current interval, and begin the one that contains ``now_s``."""
        hits, evicted, used = sums
        if asked > self._asked or evicted != self._evicted:
            self.points.append(
                ReplayPoint(
                    time_s=self.end_s,
                    asked_blocks=asked - self._asked,
                    hit_blocks=_less(hits, self._hits),
                    evicted_blocks=_less(evicted, self._evicted),
                    used_bytes=used,
                )
            )
        self._asked = asked
        self._hits = hits
        self._evicted = evicted
        while len(self.points) > _POINTS_MAX:
            self.part_s *= 2
            self._join()
        self.end_s = (now_s // self.part_s + 1) * self.part_s

    def _join(self) -> None:
        """Merge the points that now fall into one interval."""
        joined: list[ReplayPoint] = []
        for point in self.points:
            end_s = math.ceil(point.time_s / self.part_s) * self.part_s
            if not joined or joined[-1].time_s < end_s:
                joined.append(msgspec.structs.replace(point, time_s=end_s))
                continue
            last = joined[-1]
            last.asked_blocks += point.asked_blocks
            last.hit_blocks = _more(last.hit_blocks, point.hit_blocks)
            last.evicted_blocks = _more(last.evicted_blocks, point.evicted_blocks)
            last.used_bytes = point.used_bytes
        self.points = joined


def _less(these: list[int], those: list[int]) -> list[int]:
    return [one - other for one, other in zip(these, those, strict=True)]


def _more(these: list[int], those: list[int]) -> list[int]:
    return [one + other for one, other in zip(these, those, strict=True)]
