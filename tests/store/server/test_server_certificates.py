"""A store address with certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire import BlockStore, UsageError
from tests.store.caches import Filled, chain
from tests.store.server.test_server import serving, where
from tests.support.certificates import FAR, NEAR, Authority


async def test_only_who_has_a_certificate_is_served(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(**authority.config(FAR, NEAR)) as (_, server):
        for name, served in ((NEAR, True), ("spiffe://kvwire.test/else", False)):
            keys = {k: v for k, v in authority.config(name).items() if k != "trust"}
            keys["tls_peers"] = f"spiffe://kvwire.test/other,{FAR}"
            tier = where(server, "?" + "&".join(f"{k}={v}" for k, v in keys.items()))
            if not served:
                with pytest.raises(UsageError, match="tier"):
                    await BlockStore.open([tier])
                continue
            async with BlockStore.open([tier]) as store:
                put = await store.put(chain(1), Filled(seed=1).cache, [0])
                assert put.complete
