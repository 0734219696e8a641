"""What tiers in a key-value service are alike in: they ask until it is back."""

from __future__ import annotations

import numpy as np

from kvwire.kv.blocks import Bits
from kvwire.store.address import TierAddress
from kvwire.store.index import Keys, Orders
from kvwire.store.namespace import ABSENT, Namespace
from kvwire.store.tiers.base import Batch, BlockResult, BlockResults
from kvwire.store.tiers.values import ValueTier
from tests.support.pairs import until


class Service(ValueTier):
    """A service without blocks, whose client raises what it likes."""

    raising: list[Exception]

    async def find(self, keys: Keys) -> Orders:
        return np.full(keys.size, ABSENT, np.uint8)

    async def delete_namespace(self, digest: bytes) -> None:
        pass

    async def _connect(self) -> None:
        self.raising = [RuntimeError("no cluster"), OSError("refused")]

    async def _disconnect(self) -> None:
        pass

    async def _is_back(self) -> bool:
        if self.raising:
            raise self.raising.pop(0)
        return True

    async def _get(self, batch: Batch) -> BlockResults:
        return np.full(batch.keys.size, BlockResult.MISSING, np.uint8)

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        return await self._get(batch)

    async def _remove(self, keys: Keys) -> Bits:
        return np.ones(keys.size, np.bool_)


async def test_it_is_asked_again_whatever_its_client_raises() -> None:
    """Clients raise what is no OSError; nobody would ever ask again after that."""
    tier = await Service.open(TierAddress.parse("service:"))
    try:
        tier._failed(OSError("lost"))
        assert tier.unavailable_reason == "lost"
        await until(lambda: not tier.unavailable_reason)
        assert not tier.raising
    finally:
        await tier.close()
