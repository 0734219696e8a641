"""Blocks in a real Mooncake Store: a master, and segments in processes of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import inside

pytest.importorskip(
    "mooncake.store",
    reason="`make test-mooncake`, with libibverbs1, libnuma1 and libcurl4 of Debian",
    exc_type=ImportError,
)

from kvwire_store import BlockStore
from kvwire_store.tiers.mooncake import MooncakeTier
from packages.store.tests.contract import tier_of
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import until
from tests.support.servers import (
    Server,
    mooncake_master,
    mooncake_segment,
    mooncake_store,
)


@pytest.fixture(scope="module", autouse=True)
def master() -> Iterator[Server]:
    with mooncake_store() as made:
        yield made


def where(master: Server, **options: object) -> str:
    said = "&".join(f"{name}={value}" for name, value in options.items())
    return f"mooncake://127.0.0.1:{master.port}?{said}"


async def test_another_prefix_is_another_store(master: Server) -> None:
    async with BlockStore.open([where(master, prefix="a")]) as store:
        assert (await store.put(chain(1), Filled(seed=1).cache, [0])).complete
    async with BlockStore.open([where(master, prefix="b")]) as other:
        assert await other.match(chain(1), Filled().cache) == 0


async def test_batches_larger_than_a_stage(master: Server) -> None:
    """Blocks of 64 KiB, three of which have room in one."""
    source, target, hashes = (
        Filled(16, LARGE, seed=2),
        Filled(16, LARGE),
        chain(16, "l"),
    )
    every = list(range(16))
    small = where(master, prefix="l", buffer="200KiB")
    async with BlockStore.open(["memory:4MiB", small]) as store:
        assert (await store.put(hashes, source.cache, every)).complete
    async with BlockStore.open([small]) as store:
        assert (await store.get(hashes, target.cache, every)).complete
    assert np.array_equal(source.tokens(every), target.tokens(every))
    async with BlockStore.open([where(master, buffer="64KiB")]) as store:
        outcome = await store.put(chain(1), source.cache, [0])
        assert "?buffer=" in outcome.missing.reasons[0]


async def test_a_segment_is_killed_and_another_one_comes() -> None:
    """Without any there is no room; what one had is missing and never wrong."""
    source, target, hashes = Filled(seed=4), Filled(), chain(8, "killed")
    every = list(range(8))
    with mooncake_master() as master, contextlib.ExitStack() as stack:
        async with BlockStore.open([where(master, timeout=5)]) as store:
            tier = tier_of(store, MooncakeTier)

            async def put() -> bool:
                await until(lambda: tier.taking)
                outcome = await store.put(hashes, source.cache, every)
                await inside.tiers(store).memory.empty()
                return outcome.complete

            await until(lambda: tier.taking)
            outcome = await store.put(hashes, source.cache, every)
            assert "no room" in outcome.missing.reasons[0]
            first = stack.enter_context(mooncake_segment(master))
            assert await put()
            first.kill()
            outcome = await store.get(hashes, target.cache, every)
            assert not outcome.landed.ids().size
            assert outcome.missing.reasons
            stack.enter_context(mooncake_segment(master))
            # The master takes a segment for alive for a while: until then a put of
            # what was there does nothing.
            while not (await put() and await found(store, hashes, target)):
                continue
    assert np.array_equal(source.tokens(every), target.tokens(every))


async def found(store: BlockStore, hashes: list[bytes], target: Filled) -> bool:
    await until(lambda: tier_of(store, MooncakeTier).taking)
    return (await store.get(hashes, target.cache, range(8))).complete


async def test_a_call_that_hangs_is_given_up_with_its_stage(master: Server) -> None:
    source, target, hashes = Filled(seed=5), Filled(), chain(4, "still")
    gate = threading.Event()
    async with BlockStore.open([where(master, timeout=0.2)]) as store:
        tier = tier_of(store, MooncakeTier)
        real = tier._native

        class Hangs:
            """Answers a get when it is let."""

            def batch_get_into(self, *args: Any) -> Any:
                gate.wait()
                return real.batch_get_into(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        assert (await store.put(hashes, source.cache, range(4))).complete
        await inside.tiers(store).memory.empty()
        tier._native = Hangs()
        outcome = await store.get(hashes, target.cache, range(4))
        assert "no answer within 0.2 s" in outcome.missing.reasons[0]
        # The other stage serves on, once the master has answered.
        await until(lambda: tier.taking)
        assert await store.match(hashes, source.cache) == 4
        gate.set()
        await until(lambda: tier._stages.qsize() == 3)
        assert not any(tensor.any() for tensor in target.tensors)
        assert (await store.get(hashes, target.cache, range(4))).complete


async def test_a_master_that_comes_later() -> None:
    source = Filled(seed=6)
    with mooncake_master() as master:
        master.kill()
        async with BlockStore.open([where(master)]) as store:
            assert tier_of(store, MooncakeTier).error
            assert not (await store.put(chain(1), source.cache, [0])).complete
            master.start()
            with mooncake_segment(master):
                await until(lambda: tier_of(store, MooncakeTier).taking)
                assert (await store.put(chain(1), source.cache, [0])).complete
