"""What clients of a server hold, one and all together, and which is let go of."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest

from kvwire import ConnectionClosed
from kvwire.limits import MIB, NAME_CHARS_MAX
from kvwire_store.keys import as_keys
from kvwire_store.limits import STORE_REQUESTS_MAX
from kvwire_store.namespace import Namespace
from kvwire_store.server import messages
from kvwire_store.server.client_memory import Berth, ClientMemory, MemoryHolder
from kvwire_store.server.messages import StatsReport, decode_reply, encode
from kvwire_store.server.served import ServedStore
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.base import TenantUse
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from packages.store.tests.server.rig import Client, client, serving
from tests.support import inside
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import until


class HolderOf:
    def __init__(self, stalled_since: float = math.inf) -> None:
        self.stalled_since = stalled_since
        self.reasons: list[str] = []

    def drop(self, reason: str) -> None:
        self.reasons.append(reason)


def test_who_has_taken_nothing_for_longest_goes_first() -> None:
    memory = ClientMemory(8, held_bytes_max=100)
    takes, slow, slower = HolderOf(), HolderOf(5.0), HolderOf(2.0)
    memory.hold(takes, 90)
    memory.hold(slow, 5)
    memory.hold(slower, 5)
    memory.hold(takes, 1)
    memory.hold(takes, 1)
    assert (len(slower.reasons), slow.reasons, takes.reasons) == (1, [], [])
    memory.hold(takes, 5)
    assert (len(slower.reasons), len(slow.reasons), takes.reasons) == (1, 1, [])
    for one, nbytes in ((slower, 5), (slow, 5), (takes, 97)):
        memory.release(one, nbytes)
        memory.forget(one)
    assert memory.held_bytes == 0
    memory.hold(takes, 100)
    assert not takes.reasons


def test_nobody_goes_who_takes_everything() -> None:
    memory, takes = ClientMemory(8, held_bytes_max=100), HolderOf()
    memory.hold(takes, 500)
    assert not takes.reasons


async def test_nothing_is_taken_in_until_there_is_room() -> None:
    memory, takes = ClientMemory(8, held_bytes_max=100), HolderOf()
    await memory.room()
    memory.hold(takes, 101)
    waiting = asyncio.create_task(memory.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    memory.release(takes, 1)
    await waiting


async def test_so_many_berths_for_all_clients_together() -> None:
    """Who has one for too long while others wait is let go of, and nobody else."""
    memory = ClientMemory(8, berths_bytes=16, timeout_s=0.05)
    others = HolderOf()
    gone: asyncio.Event = asyncio.Event()

    class Slow(HolderOf):
        def drop(self, reason: str) -> None:
            super().drop(reason)
            gone.set()

    slow = Slow()

    async def stand_still() -> None:
        async with memory.berth(slow):
            await gone.wait()

    async def move() -> None:
        async with memory.berth(others):
            await asyncio.sleep(0)

    still = [asyncio.create_task(stand_still()) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.gather(*(move() for _ in range(5)), *still)
    assert "for more than 0.05 s while others wait" in slow.reasons[0]
    assert not others.reasons


async def test_clients_that_take_nothing_hold_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are many, and are let go of; who takes its blocks goes on meanwhile."""
    bound = 4 * MIB
    namespace, cache = Namespace("kv", LARGE), Filled(1, LARGE, seed=1).cache
    names = messages.Names.of(as_keys([namespace.digest + chain(1)[0]]))
    text = messages.text_of(namespace)

    async def ask_for_more(one: Client) -> None:
        with contextlib.suppress(ConnectionClosed):
            for number in range(1, STORE_REQUESTS_MAX + 1):
                await one.say(messages.Get(number, text, names, 60_000))

    async with serving("memory:1MiB") as (store, server):
        await store.put(chain(1), cache, [0])
        memory = inside.served(server).memory
        memory.held_bytes_max = bound
        most = 0
        hold = memory.hold

        def watched(holder: MemoryHolder, nbytes: int) -> None:
            nonlocal most
            hold(holder, nbytes)
            most = max(most, memory.held_bytes)

        monkeypatch.setattr(memory, "hold", watched)
        async with contextlib.AsyncExitStack() as stack:
            many = [await stack.enter_async_context(client(server)) for _ in range(8)]
            await asyncio.gather(*map(ask_for_more, many))
            await until(lambda: server.dropped > 0)
            async with client(server) as good:
                for number in range(1, 9):
                    found = await good.ask(messages.Get(number, text, names, 60_000))
                    assert len(found.images) == LARGE.block_bytes
        # And what one turn of each client has begun.
        assert most <= bound + 8 * (LARGE.block_bytes + 1024)
        await until(lambda: not server.clients())
        assert memory.held_bytes == 0


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
async def test_a_berth_that_something_may_touch_is_used_by_nobody(
    error: type[BaseException],
) -> None:
    """There is another one in its place, so a client goes on."""
    memory, holder = ClientMemory(8, berths_bytes=8), HolderOf()
    left: list[Berth] = []

    async def fails() -> Berth:
        async with memory.berth(holder) as berth:
            left.append(berth)
            raise error

    with pytest.raises(error):
        await fails()
    async with memory.berth(holder) as other:
        assert other is not left[0]
    async with memory.berth(holder) as again:
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
