"""The kit for tiers: the ten promises of :class:`~kvwire_store.tiers.base.Tier`.

>>> await check_tier("disk:/tmp/blocks?size=64MiB")

Every tier of kvwire passes the kit, and tiers in other distributions should too. It
depends on no test framework; docs/howto/write-a-tier.md shows how to make a pytest test
from each check.

Each check uses its own namespace, so the place may contain other blocks. A check
deletes its blocks at its end.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from kvwire.aio import gather_all
from kvwire.kv.spec import KVSpec
from kvwire_certify.conformance.check import Check, Report, require
from kvwire_certify.conformance.runner import CheckOptions, run_all
from kvwire_certify.oracle import content
from kvwire_store.spi import (
    ABSENT,
    ORDERS,
    UNKNOWN,
    Batch,
    BlockResult,
    BlockResults,
    Keys,
    Namespace,
    Tier,
    TierAddress,
    as_keys,
    images_in,
)
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.registry import open_tier

OpenTier: TypeAlias = Callable[[], Awaitable[Tier]]
Away: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]
Damage: TypeAlias = Callable[[bytes, bytes], None]

# The time limit of operations that a tier on a quiet machine completes at once.
TIMEOUT_S: Final = 10.0
# The largest block that a check writes.
_LARGE_BYTES: Final = 16 << 20
# The numbers of loop turns after which a call is cancelled.
_TURNS: Final = (0, 1, 2, 3, 5, 8, 13, 40)
# How long memory is watched in which nothing may change.
_QUIET_S: Final = 0.05
_COUNT: Final = 8


class TierRig:
    """Opens tiers on one place for one check, and makes blocks for them.

    Args:
        opens: Opens a tier; each call acts like another process.
        away: Makes the service unreachable within a context; None if the tier has no
            service.
        damage: Changes the stored bytes of one block, given its key and bytes; None if
            that is impossible.
        timeout_s: The time limit of each operation.
    """

    def __init__(
        self,
        opens: OpenTier,
        away: Away | None = None,
        damage: Damage | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.away = away
        self.damage = damage
        self.timeout_s = timeout_s
        self._opens = opens
        self._tiers: list[Tier] = []
        self._namespaces: list[Namespace] = []

    async def open(self) -> None:
        """Do nothing, because a check opens its tiers itself."""

    async def tier(self) -> Tier:
        """Open a tier; it is closed at the end of the check."""
        self._tiers.append(await self._opens())
        return self._tiers[-1]

    async def close(self, tier: Tier) -> None:
        """Close a tier before the end of the check."""
        self._tiers.remove(tier)
        await tier.close()

    def namespace(self, nbytes: int = 8192) -> Namespace:
        """Return a unique namespace for blocks of the given size."""
        spec = KVSpec(
            layers=nbytes // 4096,
            kv_heads=1,
            head_dim=256,
            block_tokens=8,
            dtype="uint8",
            fingerprint=secrets.token_hex(8),
        )
        self._namespaces.append(Namespace("kv", spec))
        return self._namespaces[-1]

    async def aclose(self) -> None:
        """Delete the check's blocks, and close its tiers."""
        try:
            if self._namespaces:
                tier = self._tiers[0] if self._tiers else await self.tier()
                for namespace in self._namespaces:
                    await tier.delete_namespace(namespace.digest)
        finally:
            for tier in self._tiers:
                await tier.close()


class Blocks:
    """Blocks of one namespace, each with unique bytes.

    Attributes:
        namespace: The namespace of the blocks.
        keys: The blocks' keys, which form a chain from its head on.
        bytes: The blocks' bytes, one row per block.
    """

    def __init__(self, rig: TierRig, count: int = _COUNT, nbytes: int = 8192) -> None:
        self.namespace: Namespace = rig.namespace(nbytes)
        digest = self.namespace.digest
        self.keys: Keys = as_keys(
            [digest + secrets.token_bytes(16) for _ in range(count)]
        )
        self._orders = np.arange(count, dtype=np.uint8) % len(ORDERS)
        data = content(count * nbytes, int.from_bytes(digest[:8]))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8).reshape(
            count, nbytes
        )

    def batch(self) -> tuple[Batch, npt.NDArray[np.uint8]]:
        """Return a batch of all blocks and their memory, for a write."""
        memory = self.bytes.copy()
        images = images_in(memory.reshape(-1), memory.shape[1], self.keys.size)
        return Batch(self.keys, self._orders.copy(), images), memory

    def room(self) -> tuple[Batch, npt.NDArray[np.uint8]]:
        """Return a batch of all blocks with empty memory, for a read."""
        memory = np.full_like(self.bytes, 0xEE)
        images = images_in(memory.reshape(-1), memory.shape[1], self.keys.size)
        orders = np.full(self.keys.size, UNKNOWN, np.uint8)
        return Batch(self.keys, orders, images), memory

    async def write(self, tier: Tier, *, landed: bool = True) -> BlockResults:
        """Write all blocks; unless ``landed`` is false, each must land."""
        results = await tier.write(self.namespace, self.batch()[0])
        require(
            not landed or bool((results == BlockResult.LANDED).all()),
            f"write returned {_names(results)}, {tier.error!r}",
        )
        return results

    async def taken(self, tier: Tier, timeout_s: float) -> None:
        """Write all blocks, after the service has recovered, until they land."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        results = await self.write(tier, landed=False)
        while not (results == BlockResult.LANDED).all():
            require(loop.time() < until, f"no block lands: {tier.error!r}")
            await asyncio.sleep(_QUIET_S)
            results = await self.write(tier, landed=False)

    async def read(self, tier: Tier) -> list[int]:
        """Read all blocks; return the positions of blocks that landed correctly."""
        batch, memory = self.room()
        results = await tier.read(self.namespace, batch)
        require(results.size == self.keys.size, f"{results.size} results")
        landed = np.flatnonzero(results == BlockResult.LANDED).tolist()
        for at in landed:
            require(
                np.array_equal(memory[at], self.bytes[at]),
                f"block {at} landed with other bytes than were written",
            )
            require(
                batch.orders[at] == self._orders[at],
                f"block {at} landed with order {batch.orders[at]}, and was written "
                f"with {self._orders[at]}",
            )
        return landed

    async def found(self, tier: Tier) -> list[int]:
        """Return the positions and orders of the blocks that ``find`` returns."""
        orders = await tier.find(self.keys)
        require(orders.size == self.keys.size, f"{orders.size} orders")
        here = np.flatnonzero(orders != ABSENT).tolist()
        for at in here:
            require(
                orders[at] in (self._orders[at], UNKNOWN),
                f"find returned order {orders[at]} for a block with order "
                f"{self._orders[at]}",
            )
        return here

    async def expect(self, tier: Tier, there: Iterable[int]) -> None:
        """Fail unless ``find`` and ``read`` return exactly these blocks."""
        wanted = list(there)
        for name, call in (("find", self.found), ("read", self.read)):
            seen = await call(tier)
            require(seen == wanted, f"{name} returned {seen}, and {wanted} are stored")


ALL: Final = list(range(_COUNT))

TIER_CHECKS: list[Check] = []
"""Every check of tiers, in the order they run."""
_NEEDS: dict[str, str] = {}


def checks_with(*, away: bool, damage: bool) -> list[Check]:
    """Return the checks that are possible with the given hooks."""
    given = {"": True, "away": away, "damage": damage}
    return [check for check in TIER_CHECKS if given[_NEEDS[check.id]]]


def _check(name: str, promise: str, needs: str = "") -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        TIER_CHECKS.append(Check(id=name, promise=promise, run=run))
        _NEEDS[name] = needs
        return run

    return add


# --- 1. found -------------------------------------------------------------------------


@_check("found.landed", "find returns blocks that landed, and no others")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    others = Blocks(rig)
    await blocks.expect(tier, [])
    await blocks.write(tier)
    require(await blocks.found(tier) == ALL, "find lacks a block that has landed")
    held = await tier.holds(blocks.keys)
    require(bool(held.all()), "holds lacks a block that has landed")
    require(
        await others.found(tier) == [], "find returned a block that was never written"
    )


@_check("found.none", "calls without blocks return")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    none = as_keys(())
    require((await tier.find(none)).size == 0, "find of nothing")
    tier.touch(none)
    await tier.delete(none)


@_check("found.touched", "touch changes only the order of eviction")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    tier.touch(blocks.keys)
    await blocks.expect(tier, [])
    await blocks.write(tier)
    tier.touch(blocks.keys)
    await blocks.expect(tier, ALL)


# --- 2. exact -------------------------------------------------------------------------


@_check("exact.bytes", "read returns the bytes and the order that were written")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    require(await blocks.read(tier) == ALL, f"not all blocks were read: {tier.error!r}")


@_check("exact.many", "read is exact for many blocks in one call")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig, 100)
    await blocks.write(tier)
    await blocks.expect(tier, range(100))


@_check("exact.twice", "a block that is written twice is stored once")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    await blocks.write(tier)
    await blocks.expect(tier, ALL)


@_check(
    "exact.damaged", "a damaged block does not land until it is written again", "damage"
)
async def _(rig: TierRig) -> None:
    assert rig.damage is not None
    blocks = Blocks(rig)
    tier = await rig.tier()
    await blocks.write(tier)
    await tier.flush()
    await rig.close(tier)
    tier = await rig.tier()
    require(await blocks.found(tier) == ALL, "another process does not find all blocks")
    rig.damage(blocks.keys[0], blocks.bytes[0].tobytes())
    landed = await blocks.read(tier)
    require(landed == ALL[1:], f"block 0 was damaged, but {landed} have landed")
    require(
        not (await tier.holds(blocks.keys))[0],
        "holds returned True for a damaged block",
    )
    await blocks.write(tier)
    await blocks.expect(tier, ALL)


# --- 3. each for itself ---------------------------------------------------------------


@_check("each.missing", "a missing block does not affect the others")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    batch, _ = blocks.batch()
    some = np.array([1, 2, 5])
    results = await tier.write(blocks.namespace, batch.selected(some))
    require(results.size == 3, f"{results.size} results of 3 blocks")
    await blocks.expect(tier, some.tolist())
    room, _ = blocks.room()
    results = await tier.read(blocks.namespace, room)
    rest = set(np.delete(results, some).tolist())
    require(
        rest == {BlockResult.MISSING},
        f"blocks that were never written are {_names(rest)}",
    )


# --- 4. done --------------------------------------------------------------------------


@_check("done.write", "after write has returned, its images may be changed")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    batch, memory = blocks.batch()
    results = await tier.write(blocks.namespace, batch)
    memory[:] = 0xAA
    require(bool((results == BlockResult.LANDED).all()), f"{_names(results)}")
    await asyncio.sleep(_QUIET_S)
    await blocks.expect(tier, ALL)


@_check("done.read", "after read has returned, nothing writes to its images")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    room, memory = blocks.room()
    await tier.read(blocks.namespace, room)
    memory[:] = 0xAA
    await _require_quiet(memory)


# --- 5. cancelled ---------------------------------------------------------------------


@_check("cancelled.write", "a cancelled write ends or copies its images first")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    for turns in _TURNS:
        blocks = Blocks(rig)
        batch, memory = blocks.batch()
        await _cancelled(tier.write(blocks.namespace, batch), turns)
        memory[:] = 0xAA
        landed = await blocks.read(tier)  # each block that landed is compared
        require(
            set(landed) <= set(await blocks.found(tier)),
            "find lacks a block that can be read",
        )
        await blocks.write(tier)
        await blocks.expect(tier, ALL)


@_check("cancelled.read", "after a cancelled read, nothing writes to its images")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    for turns in _TURNS:
        room, memory = blocks.room()
        await _cancelled(tier.read(blocks.namespace, room), turns)
        memory[:] = 0xAA
        await _require_quiet(memory)
        await blocks.expect(tier, ALL)


@_check("cancelled.look", "a cancelled find or delete may be repeated")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    for turns in _TURNS:
        await _cancelled(tier.find(blocks.keys), turns)
    await blocks.expect(tier, ALL)
    for turns in _TURNS:
        await _cancelled(tier.delete(blocks.keys), turns)
        await tier.delete(blocks.keys)
        await blocks.expect(tier, [])
        await blocks.write(tier)


# --- 6. side by side ------------------------------------------------------------------


@_check("overlap.same", "calls for the same blocks may overlap")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    writes = (blocks.write(tier) for _ in range(4))
    reads = (blocks.read(tier) for _ in range(4))
    finds = (blocks.found(tier) for _ in range(4))
    await gather_all(*writes, *reads, *finds)
    await blocks.expect(tier, ALL)


@_check("overlap.deletes", "after concurrent writes and deletes, find and read agree")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    for _ in range(8):
        blocks = Blocks(rig)
        await gather_all(
            blocks.write(tier, landed=False),
            blocks.read(tier),
            _try_delete(tier, blocks.keys[::2]),
            blocks.found(tier),
            blocks.write(tier, landed=False),
            _try_delete(tier, blocks.keys[::3]),
        )
        landed = await blocks.read(tier)
        orders = await tier.find(blocks.keys)
        # A head that was not read may belong to an incomplete block.
        sure = np.flatnonzero((orders != ABSENT) & (orders != UNKNOWN)).tolist()
        here = np.flatnonzero(orders != ABSENT).tolist()
        require(
            set(sure) <= set(landed) <= set(here),
            f"find returned {here}, and read {landed}",
        )
        await tier.delete(blocks.keys)
        await blocks.expect(tier, [])


# --- 7. deleted -----------------------------------------------------------------------


@_check("deleted.blocks", "deleted blocks are not found, and all others are")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    await blocks.expect(tier, ALL)
    for _ in range(2):  # deleting a missing block is allowed
        await tier.delete(blocks.keys[:3])
        await blocks.expect(tier, ALL[3:])
    await blocks.expect(await rig.tier() if _shared(tier) else tier, ALL[3:])
    await blocks.write(tier)
    await blocks.expect(tier, ALL)


@_check("deleted.namespace", "deleting a namespace deletes its blocks and no others")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    others = Blocks(rig)
    await blocks.write(tier)
    await others.write(tier)
    await blocks.expect(tier, ALL)
    for _ in range(2):
        await tier.delete_namespace(blocks.namespace.digest)
        await blocks.expect(tier, [])
        await others.expect(tier, ALL)
    await blocks.write(tier)
    await blocks.expect(tier, ALL)


# --- 8. kept --------------------------------------------------------------------------


@_check("kept.closed", "after a restart, a durable tier still has all its blocks")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    await tier.flush()
    durable = tier.durable
    await rig.close(tier)
    tier = await rig.tier()
    there = await blocks.read(tier)
    require(not durable or there == ALL, f"only {there} are left after a restart")
    await blocks.expect(tier, there)


# --- 9. no exception ------------------------------------------------------------------


@_check(
    "away.answered",
    "while the service is unreachable, calls return with the reason",
    "away",
)
async def _(rig: TierRig) -> None:
    assert rig.away is not None
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    async with rig.away():
        results = await blocks.write(tier, landed=False)
        require(not (results == BlockResult.LANDED).any(), "a write has landed")
        require(await blocks.read(tier) == [], "a block was read")
        await blocks.found(tier)
        require(bool(tier.error), "error does not give the reason for the refusal")
        try:
            await tier.delete(blocks.keys)
        except OSError:
            pass
        else:
            require(
                False, "a delete returned without an error, but cannot have deleted"
            )
        began = time.monotonic()
        for _ in range(100):
            await blocks.found(tier)
        took_s = time.monotonic() - began
        require(took_s < rig.timeout_s, f"100 finds took {took_s:.1f} s")
    await blocks.taken(tier, rig.timeout_s)
    await blocks.expect(tier, ALL)
    require(
        not tier.reason, f"the service is back, but the reason is still {tier.reason!r}"
    )


@_check(
    "away.opened",
    "a tier opens without its service, and works once that is back",
    "away",
)
async def _(rig: TierRig) -> None:
    assert rig.away is not None
    async with rig.away():
        tier = await rig.tier()
        blocks = Blocks(rig)
        results = await blocks.write(tier, landed=False)
        require(not (results == BlockResult.LANDED).any(), "a write has landed")
        require(bool(tier.error), "error does not give the reason for the refusal")
    await blocks.taken(tier, rig.timeout_s)
    await blocks.expect(tier, ALL)


# --- 10. room -------------------------------------------------------------------------


@_check("room.large", "a block either fits or is refused with a reason")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    nbytes = 4096
    while nbytes <= _LARGE_BYTES:
        blocks = Blocks(rig, 1, nbytes)
        why = tier.too_large(blocks.namespace)
        results = await blocks.write(tier, landed=False)
        landed = bool(results[0] == BlockResult.LANDED)
        # A codec may or may not make the block fit, so only the write can decide.
        refused = bool(results[0] == BlockResult.REFUSED) and bool(tier.error)
        require(
            refused or (landed and not why),
            f"a block of {nbytes} bytes is {_names(results)}; too_large returned "
            f"{why!r}, error is {tier.error!r}",
        )
        await blocks.expect(tier, [0] if landed else [])
        nbytes *= 8
    small = Blocks(rig)
    await small.write(tier)
    await small.expect(tier, ALL)


@_check("room.counted", "stats count the blocks that landed")
async def _(rig: TierRig) -> None:
    tier = await rig.tier()
    blocks = Blocks(rig)
    await blocks.write(tier)
    await blocks.read(tier)
    stats = tier.stats()
    seen = stats.written_blocks, stats.read_blocks, stats.damaged_blocks
    require(seen == (_COUNT, _COUNT, 0), f"written, read, damaged are {seen}")


# --- running them ---------------------------------------------------------------------


async def check_tier(
    tier: str | OpenTier,
    *,
    name: str = "",
    away: Away | None = None,
    damage: Damage | None = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[CheckOptions],
) -> Report:
    """Check a tier against the promises of :class:`~kvwire_store.tiers.base.Tier`.

    Args:
        tier: Its address, as in :meth:`kvwire_store.BlockStore.open`, or a coroutine
            function that opens it. It is opened many times, always at the same place.
        name: Its name in the report; by default its address.
        away: Returns a context within which the tier's service is unreachable. Without
            it, promise 9 is not checked.
        damage: Changes the stored bytes of a block, given the block's key and bytes.
            Without it, the part of promise 2 about damage is not checked.
        timeout_s: The time limit of each operation.
        **options: See :class:`~kvwire_certify.conformance.runner.CheckOptions`.

    Raises:
        UsageError: There is no such tier.
        CheckFailed: A check failed.

    Cancel safety: safe, but the running check may leave blocks behind.
    """
    opens = opener(tier) if isinstance(tier, str) else tier
    await (await opens()).close()
    return await run_all(
        name or (tier if isinstance(tier, str) else "tier"),
        checks_with(away=away is not None, damage=damage is not None),
        lambda: TierRig(opens, away, damage, timeout_s),
        kind=" of tiers",
        what="tier",
        **options,
    )


def opener(address: str) -> OpenTier:
    """Return a function that opens the tier at an address."""
    return lambda: open_tier(TierAddress.parse(address), Tenants())


def _shared(tier: Tier) -> bool:
    """Return whether several tiers may have the same place open."""
    return tier.asks


async def _try_delete(tier: Tier, keys: Keys) -> None:
    with suppress(OSError):  # a file that is being written may still exist
        await tier.delete(keys)


async def _cancelled(call: Awaitable[Any], turns: int) -> None:
    """Cancel a call after some turns of the loop, and wait until it has ended."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _require_quiet(memory: npt.NDArray[np.uint8]) -> None:
    await asyncio.sleep(_QUIET_S)
    changed = int((memory != 0xAA).sum())
    require(not changed, f"{changed} bytes were written after the call had returned")


def _names(results: Iterable[Any]) -> str:
    return ", ".join(sorted({BlockResult(one).name for one in results}))
