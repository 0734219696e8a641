"""Berths: how many at once, and which of them may be used again."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.limits import NAME_CHARS_MAX
from kvwire_store.server.client_memory import Berth, ClientMemory
from kvwire_store.server.messages import StatsReport, decode_reply, encode
from kvwire_store.server.served import ServedStore, TransferBuffers
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.base import TenantUse
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from packages.store.tests.server.test_client_memory import HolderOf


async def test_so_many_at_once_and_no_more() -> None:
    """An honest client asks for no more by itself; another one would."""
    berths = TransferBuffers(2, ClientMemory(8), HolderOf())
    held = most = 0

    async def use() -> None:
        nonlocal held, most
        async with berths.one():
            held += 1
            most = max(most, held)
            await asyncio.sleep(0)
            held -= 1

    await asyncio.gather(*(use() for _ in range(7)))
    assert (held, most) == (0, 2)


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
async def test_a_berth_that_something_may_touch_is_used_by_nobody(
    error: type[BaseException],
) -> None:
    """There is another one in its place, so a client goes on."""
    berths, left = TransferBuffers(1, ClientMemory(8), HolderOf()), []

    async def fails() -> Berth:
        async with berths.one() as berth:
            left.append(berth)
            raise error

    with pytest.raises(error):
        await fails()
    async with berths.one() as other:
        assert other is not left[0]
    async with berths.one() as again:
        assert again is other


async def test_a_report_can_be_read_whatever_a_tier_is_called() -> None:
    """Paths are long, and of any bytes: Python has halves of characters for some."""
    uses = TenantUse(), TenantUse(4096)
    shared = type("Shared", (FakeTier,), {"tenant_uses": lambda _: uses})
    tier = shared("disk:\udcff" + "x" * NAME_CHARS_MAX)
    tier.error = "\udcff"
    async with store_on(tier, tenants=Tenants(["t"])) as store:
        served = ServedStore(store, False, 1, 1, {}, "server")
        report = decode_reply(encode(served.report(1, "")))
    assert isinstance(report, StatsReport)
    assert report.tiers[1].error == "?"
    name, use = report.tenants[1].tiers[1]
    assert name.startswith("disk:?xxx")
    assert use.used_bytes == 4096
