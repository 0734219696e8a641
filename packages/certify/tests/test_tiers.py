"""The kit for tiers finds a tier that breaks a promise, by that promise's check."""

from __future__ import annotations

import asyncio
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
    Namespace,
    Orders,
    views_of,
)
from packages.store.tests.tiers.services import Played, PlayedTier


class FindsNothing(PlayedTier):
    async def find(self, keys: Keys) -> Orders:
        return np.full(keys.size, ABSENT, np.uint8)


class ReadsOtherBytes(PlayedTier):
    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = await super()._read(namespace, batch)
        views_of(batch.images)[0][0] ^= 1
        return results


class IgnoresDamage(PlayedTier):
    async def get_into(self, batch: Batch) -> BlockResults:
        results = await super().get_into(batch)
        for at in np.flatnonzero(results == BlockResult.DAMAGED):
            value = self.service.values[batch.keys[at]]
            views_of(batch.images)[at][:] = value[HEAD_BYTES:]
            results[at] = BlockResult.LANDED
        assert batch.sizes is not None
        batch.sizes[:] = batch.images.lengths[0]
        return results


class FailsTogether(PlayedTier):
    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = await super()._read(namespace, batch)
        if (results == BlockResult.MISSING).any():
            results.fill(BlockResult.FAILED)
        return results


class Late(PlayedTier):
    """Goes on with images when a call has returned."""

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        later = super()._write(namespace, batch)
        asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, later)
        return np.full(batch.keys.size, BlockResult.LANDED, np.uint8)


class LateRead(PlayedTier):
    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = await super()._read(namespace, batch)
        view, first = views_of(batch.images)[0], views_of(batch.images)[0][0]
        asyncio.get_running_loop().call_later(0.01, view.__setitem__, 0, first ^ 1)
        return results


class StopsInTheMiddle(PlayedTier):
    """What is cancelled goes on in a task, and does not finish first."""

    at_once_bytes = 1 << 40

    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        reading = asyncio.ensure_future(self._slowly(namespace, batch))
        return await asyncio.shield(reading)

    async def _slowly(self, namespace: Namespace, batch: Batch) -> BlockResults:
        for _ in range(20):
            await asyncio.sleep(0)
        return await super()._read(namespace, batch)


class OneAtATime(PlayedTier):
    busy = False

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        if self.busy:
            return np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        self.busy = True
        try:
            return await super()._write(namespace, batch)
        finally:
            self.busy = False


class KeepsDeleted(PlayedTier):
    async def remove(self, keys: Keys) -> Bits:
        return np.ones(keys.size, np.bool_)


class DeletesAll(PlayedTier):
    async def remove_folder(self, folder: str) -> None:
        self.service.values.clear()


class Forgets(PlayedTier):
    async def disconnect(self) -> None:
        self.service.values.clear()


class Raises(PlayedTier):
    async def put(self, batch: Batch) -> BlockResults:
        if self.service.down:
            raise ConnectionResetError("it is away")
        return await super().put(batch)


class StaysAway(PlayedTier):
    async def is_back(self) -> bool:
        return False


class TakesAnything(PlayedTier):
    """It says that nothing is too large, and fails."""

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        if namespace.image_bytes > 1 << 20:
            return np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        return await super()._write(namespace, batch)


class CountsNothing(PlayedTier):
    def stats(self) -> Any:
        stats = super().stats()
        stats.read_blocks = 0
        return stats


class OldHeads(PlayedTier):
    """It remembers, and is not told of what it has deleted."""

    async def heads(self, keys: Keys) -> list[Head]:
        found = self.__dict__.setdefault("found", {})
        heads = await super().heads(keys)
        for key, head in zip(keys.tolist(), heads, strict=True):
            if not isinstance(head, BlockResult):
                found[key] = head
        named = zip(keys.tolist(), heads, strict=True)
        return [found.get(key, head) for key, head in named]


BROKEN = {
    FindsNothing: "found.landed",
    ReadsOtherBytes: "exact.bytes",
    IgnoresDamage: "exact.damaged",
    FailsTogether: "each.missing",
    Late: "done.write",
    LateRead: "done.read",
    StopsInTheMiddle: "cancelled.read",
    OneAtATime: "overlap.same",
    KeepsDeleted: "deleted.blocks",
    OldHeads: "deleted.blocks",
    DeletesAll: "deleted.namespace",
    Forgets: "kept.closed",
    Raises: "away.answered",
    StaysAway: "away.answered",
    TakesAnything: "room.large",
    CountsNothing: "room.counted",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
async def test_a_broken_promise_is_found(broken: type[PlayedTier]) -> None:
    service, found = Played(), BROKEN[broken]
    report = await check_tier(
        lambda: service.open(broken),
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
        await check_tier(lambda: service.open(FindsNothing), only=["found.landed"])
