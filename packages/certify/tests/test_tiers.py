"""The kit for tiers finds a tier that breaks a promise, by that promise's check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvwire import UsageError
from kvwire.kv.blocks import Bits
from kvwire_certify.conformance import CheckFailed
from kvwire_certify.tiers import check_tier
from kvwire_store.spi import (
    ABSENT,
    HEAD_BYTES,
    Batch,
    BlockResult,
    BlockResults,
    Head,
    Keys,
    Orders,
    views_of,
)
from packages.store.tests.tiers.services import Played, PlayedTier

BROKEN: list[Any] = []
Usual = Callable[[], Any]


def broken(
    check: str, method: str, **also: object
) -> Callable[[Any], type[PlayedTier]]:
    """Put a function in the place of a tier's method, and name the check it fails.

    It is given the tier, the usual call, and the last thing that is called with.
    """

    def note(mistake: Any) -> type[PlayedTier]:
        def instead(tier: PlayedTier, *given: Any) -> Any:
            usual = partial(getattr(super(kind, tier), method), *given)
            return mistake(tier, usual, given[-1] if given else None)

        kind = type(mistake.__name__, (PlayedTier,), {method: instead, **also})
        BROKEN.append(pytest.param(kind, check, id=mistake.__name__))
        return kind

    return note


def all_are(result: BlockResult, batch: Batch) -> BlockResults:
    return np.full(batch.keys.size, result, np.uint8)


@broken("found.landed", "find")
async def finds_nothing(_: PlayedTier, __: Usual, keys: Keys) -> Orders:
    return np.full(keys.size, ABSENT, np.uint8)


@broken("exact.bytes", "_read")
async def reads_other_bytes(_: PlayedTier, read: Usual, batch: Batch) -> Any:
    results = await read()
    views_of(batch.images)[0][0] ^= 1
    return results


@broken("exact.damaged", "get_into")
async def ignores_damage(tier: PlayedTier, get: Usual, batch: Batch) -> Any:
    results = await get()
    for at in np.flatnonzero(results == BlockResult.DAMAGED):
        value = tier.service.values[batch.keys[at]]
        views_of(batch.images)[at][:] = value[HEAD_BYTES:]
        results[at] = BlockResult.LANDED
    assert batch.sizes is not None
    batch.sizes[:] = batch.images.lengths[0]
    return results


@broken("each.missing", "_read")
async def fails_together(_: PlayedTier, read: Usual, batch: Batch) -> Any:
    results = await read()
    if (results == BlockResult.MISSING).any():
        results.fill(BlockResult.FAILED)
    return results


@broken("done.write", "_write")
async def late(_: PlayedTier, write: Usual, batch: Batch) -> BlockResults:
    """Goes on with images when a call has returned."""
    asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, write())
    return all_are(BlockResult.LANDED, batch)


@broken("done.read", "_read")
async def late_read(_: PlayedTier, read: Usual, batch: Batch) -> Any:
    results = await read()
    view, first = views_of(batch.images)[0], views_of(batch.images)[0][0]
    asyncio.get_running_loop().call_later(0.01, view.__setitem__, 0, first ^ 1)
    return results


@broken("cancelled.read", "_read", at_once_bytes=1 << 40)
async def stops_in_the_middle(_: PlayedTier, read: Usual, __: Batch) -> Any:
    """What is cancelled goes on in a task, and does not finish first."""

    async def slowly() -> Any:
        for _ in range(20):
            await asyncio.sleep(0)
        return await read()

    return await asyncio.shield(asyncio.ensure_future(slowly()))


@broken("overlap.same", "_write", busy=False)
async def one_at_a_time(tier: Any, write: Usual, batch: Batch) -> Any:
    if tier.busy:
        return all_are(BlockResult.FAILED, batch)
    tier.busy = True
    try:
        return await write()
    finally:
        tier.busy = False


@broken("deleted.blocks", "remove")
async def keeps_deleted(_: PlayedTier, __: Usual, keys: Keys) -> Bits:
    return np.ones(keys.size, np.bool_)


@broken("deleted.blocks", "heads")
async def old_heads(tier: PlayedTier, heads: Usual, keys: Keys) -> list[Head]:
    """It remembers, and does not hear of what it has deleted."""
    found = tier.__dict__.setdefault("found", {})
    named = list(zip(keys.tolist(), await heads(), strict=True))
    found |= {key: head for key, head in named if not isinstance(head, BlockResult)}
    return [found.get(key, head) for key, head in named]


@broken("deleted.namespace", "remove_folder")
async def deletes_all(tier: PlayedTier, _: Usual, __: str) -> None:
    tier.service.values.clear()


@broken("kept.closed", "disconnect")
async def forgets(tier: PlayedTier, _: Usual, __: None) -> None:
    tier.service.values.clear()


@broken("away.answered", "put")
async def raises(tier: PlayedTier, put: Usual, _: Batch) -> Any:
    if tier.service.down:
        raise ConnectionResetError("it is away")
    return await put()


@broken("away.answered", "is_back")
async def stays_away(*_: object) -> bool:
    return False


@broken("room.large", "_write")
async def takes_anything(_: PlayedTier, write: Usual, batch: Batch) -> Any:
    """It says that nothing is too large, and fails."""
    if batch.images.lengths[0] > 1 << 20:
        return all_are(BlockResult.FAILED, batch)
    return await write()


@broken("room.counted", "stats")
def counts_nothing(_: PlayedTier, stats: Usual, __: None) -> Any:
    found = stats()
    found.read_blocks = 0
    return found


@pytest.mark.parametrize(("kind", "found"), BROKEN)
async def test_a_broken_promise_is_found(kind: type[PlayedTier], found: str) -> None:
    service = Played()
    report = await check_tier(
        lambda: service.open(kind),
        away=service.away,
        damage=service.damage,
        only=[found],
        timeout_s=2.0,
        raising=False,
    )
    (failed,) = report.failed
    assert failed.check.id == found
    assert failed.reason


async def test_what_a_tier_cannot_show_is_not_checked() -> None:
    service = Played()
    report = await check_tier(service.open, name="mine")
    ids = {result.check.id for result in report}
    assert "found.landed" in ids
    assert not ids & {"exact.damaged", "away.answered", "away.opened"}
    assert report.summary.startswith(f"tier 'mine': {len(ids)} of {len(ids)} checks")
    with pytest.raises(UsageError, match=r"unknown check of tiers away\.opened"):
        await check_tier(service.open, only=["away.opened"])
    with pytest.raises(CheckFailed, match=r"found\.landed: .*find lacks"):
        await check_tier(lambda: service.open(finds_nothing), only=["found.landed"])
