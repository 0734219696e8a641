"""Tenants of one server, who try each other's blocks, quotas and names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire import KVSpec, PagedCache, UsageError
from kvwire.config import Config
from kvwire.errors import KVWireError
from kvwire.security.keys import write_key_file
from kvwire_store import BlockStore, StoreServer
from kvwire_store.server.client import ask_report, delete_all
from kvwire_store.server.messages import Delete
from packages.store.tests.server.rig import where
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.certificates import FAR, NEAR, Authority
from tests.support.inside import mapped

A, B = chain(4, "a"), chain(4, "b")


class Shop:
    """A server with tenants x and y, and their keys."""

    def __init__(self, path: Path, store: BlockStore, server: StoreServer) -> None:
        self.path, self.store, self.server = path, store, server

    def tier(self, who: str) -> str:
        return where(self.server, f"?psk_file={self.path}/{who}")

    def config(self, who: str) -> Config:
        return Config.load(None, trust="psk", psk_file=str(self.path / who))

    def client(self, who: str, **arguments: Any) -> Any:
        return BlockStore.open(["memory:64KiB", self.tier(who)], **arguments)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    for who in ("x", "y", "all"):
        write_key_file(tmp_path / who)
    tiers = ["memory:128KiB", f"disk:{tmp_path}/disk?size=1MiB"]
    tenants = [f"x?quota=32KiB&key={tmp_path}/x", f"y?key={tmp_path}/y"]
    key = str(tmp_path / "all")
    async with (
        BlockStore.open(tiers, tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=key) as server,
    ):
        yield Shop(tmp_path, store, server)


async def test_one_tenant_neither_finds_gets_deletes_nor_pins_anothers(
    shop: Shop,
) -> None:
    have, other = Filled(seed=1), Filled(seed=2)
    async with shop.client("x") as x, shop.client("y") as y:
        assert (await x.put(A, have.cache, range(4))).complete
        assert await y.match(A, have.cache) == 0
        got = await y.get(A, Filled().cache, range(4))
        # Nor is it told for which cache somebody else has them.
        assert set(got.missing.reasons) == {"it is not in the store"}
        await y.delete(A, have.cache)
        await y.delete_all(have.cache)
        assert (await y.pin(A, have.cache)).prefix == 0
        # The same hashes with other bytes are its own.
        assert (await y.put(A, other.cache, range(4))).complete
    for who, cache in (("x", have), ("y", other)):
        async with shop.client(who) as again:
            target = Filled()
            assert (await again.get(A, target.cache, range(4))).complete
            assert (target.tokens([0, 1, 2, 3]) == cache.tokens([0, 1, 2, 3])).all()
            assert (await again.pin(A, cache.cache)).prefix == 4
            assert shop.store.tenant_stats()[who].tiers["memory:128KiB"].pinned_bytes
            await again.unpin(A, cache.cache)
            await again.delete(A[3:], cache.cache)
            assert await again.match(A, cache.cache) == 3
            await again.delete_all(cache.cache)
            assert await again.match(A, cache.cache) == 0


async def test_no_tenant_maps_the_memory_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large block travels between processes of a host as a copy."""
    monkeypatch.setenv("KVWIRE_PREFER", "local,tcp")
    for who in ("x", "all"):
        write_key_file(tmp_path / who)
    spec = KVSpec(layers=1, kv_heads=4, head_dim=64, block_tokens=256, dtype="float16")
    cache = PagedCache(spec, [np.ones((2, 2, 256, 4, 64), np.float16)])
    async with (
        BlockStore.open(["memory:64MiB"], tenants=[f"x?key={tmp_path}/x"]) as served,
        StoreServer(served, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as server,
    ):
        tiers = ["memory:64MiB", where(server, f"?psk_file={tmp_path}/x")]
        async with BlockStore.open(tiers) as store:
            await store.put(A[:2], cache, [0, 1])
            await store.flush()
        async with BlockStore.open(tiers) as store:
            assert (await store.get(A[:2], cache, [0, 1])).complete
            assert mapped("kvwire-staging")
            assert not mapped("kvwire-store")
        assert inside.tiers(served).memory.index.shared is None


async def test_a_tenant_is_told_of_itself_and_the_operator_of_all(shop: Shop) -> None:
    cache, address = Filled(seed=1).cache, str(shop.server.address).split("//")[-1]
    async with shop.client("x") as x, shop.client("all", tenants=["y"]) as operator:
        await x.put(A, cache, range(4))
        assert (await operator.put(B, cache, range(4), tenant="y")).complete
        report = await ask_report(address, shop.config("x"))
        assert [row.name for row in report.tenants] == ["x"]
        assert {row.tenant for row in report.clients} == {"x"}
        assert report.tiers == ()
        assert report.tenants[0].counters.stored_blocks == 4
        whole = await ask_report(address, shop.config("all"))
        assert [row.name for row in whole.tenants] == ["", "x", "y"]
        assert len(whole.tiers) == 2
        with pytest.raises(KVWireError, match="tenant x, and cannot act for 'y'"):
            await delete_all(address, shop.config("x"), "y")
        async with shop.client("y") as y, shop.client("x") as again:
            assert await y.match(B, cache) == 4
            assert await again.match(A, cache) == 4
        await delete_all(address, shop.config("x"), "x")
        await delete_all(address, shop.config("all"), "y")
        async with shop.client("y") as y, shop.client("x") as again:
            assert await y.match(B, cache) == 0
            assert await again.match(A, cache) == 0
    with pytest.raises(KVWireError, match="the tenants are x, y"):
        await delete_all(address, shop.config("all"), "z")


async def test_a_tenant_cannot_act_for_another(shop: Shop) -> None:
    cache = Filled(seed=1).cache
    async with shop.client("x", tenants=["y"]) as x:
        put = await x.put(A, cache, range(4), tenant="y")
        assert any("cannot act for 'y'" in why for why in put.missing.reasons)
        assert await x.match(A, cache, tenant="y") == 4, "in its own memory"
    async with shop.client("y") as y:
        assert await y.match(A, cache) == 0


async def test_a_tenant_acts_for_itself_and_the_operator_for_each(
    tmp_path: Path,
) -> None:
    cache = Filled(seed=1).cache
    for who in ("x", "y", "all"):
        write_key_file(tmp_path / who)
    tenants = [f"x?pinned=8KiB&key={tmp_path}/x", f"y?key={tmp_path}/y"]
    async with (
        BlockStore.open(["memory:128KiB"], tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as server,
    ):
        await store.put(A, cache, range(4), tenant="x")
        for who, named, counts in (
            ("x", "", {"done": 2, "clipped": 2}),
            ("y", "", {"missing": 4}),
            ("all", "x", {"done": 2, "clipped": 2}),
            ("all", "z", {"refused": 4}),
            ("y", "x", {"refused": 4}),
        ):
            async with BlockStore.open(
                ["memory:64KiB", where(server, f"?psk_file={tmp_path}/{who}")],
                tenants=[named] if named else (),
            ) as client:
                told = await client.pin(A, cache, tenant=named)
                assert told.counts == counts, (who, named, told.reasons)
        assert "it is tenant y, and cannot act for 'x'" in told.reasons[0]


@pytest.mark.parametrize(
    ("listed", "certified"),
    [
        (NEAR, NEAR),
        ("Acme.Example", "acme.example"),
        ("acme.example", "ACME.Example"),
    ],
)
async def test_a_certificate_says_who_a_tenant_is(
    listed: str, certified: str, tmp_path: Path
) -> None:
    """Whatever the case of a DNS name; a tenant must not pass for the operator."""
    authority, cache = Authority(tmp_path), Filled(seed=1).cache
    async with (
        BlockStore.open(
            ["memory:1MiB"], tenants=[f"x?identity={listed}", "y"]
        ) as store,
        StoreServer(store, "127.0.0.1:0", **authority.config(FAR, NEAR)) as server,
    ):

        def tier(name: str) -> str:
            keys = {k: v for k, v in authority.config(name).items() if k != "trust"}
            keys["tls_peers"] = f"spiffe://kvwire.test/other,{FAR}"
            return where(server, "?" + "&".join(f"{k}={v}" for k, v in keys.items()))

        async with BlockStore.open([tier(certified)]) as x:
            assert (await x.put(A, cache, range(4))).complete
            assert [row.tenant for row in server.clients()] == ["x"]
        with pytest.raises(UsageError, match="tier"):
            await BlockStore.open([tier("spiffe://kvwire.test/else")])
        assert await store.match(A, cache) == 0
        assert await store.match(A, cache, tenant="x") == 4


@pytest.mark.parametrize(
    ("tenant", "named", "other"),
    [(f"x?identity={NEAR}", ("Ops.Example",), None), ("x", (), "")],
    ids=["named", "all may connect"],
)
async def test_who_is_accepted_but_unknown_is_not_the_operator(
    tenant: str, named: tuple[str, ...], other: str | None, tmp_path: Path
) -> None:
    """If all may connect, every certificate is the operator's."""
    config = Authority(tmp_path).config(FAR, *named)
    async with (
        BlockStore.open(["memory:1MiB"], tenants=[tenant]) as store,
        StoreServer(store, "127.0.0.1:0", **config) as server,
    ):
        served = inside.served(server)
        assert served.proved("ops.example") == ""
        assert served.proved("else.example") == other


async def test_a_key_that_is_replaced_too_early_does_not_prove_the_operator(
    tmp_path: Path,
) -> None:
    """The server knows the tenants' keys when it is made, and accepts them later."""
    for who in ("x", "all"):
        write_key_file(tmp_path / who)
    key = str(tmp_path / "all")
    tenants = [f"x?key={tmp_path}/x"]
    async with BlockStore.open(["memory:64KiB"], tenants=tenants) as store:
        server = StoreServer(store, "127.0.0.1:0", psk_file=key)
        (tmp_path / "x").unlink()
        write_key_file(tmp_path / "x")
        async with server:
            shop = Shop(tmp_path, store, server)
            async with shop.client("x") as x:
                put = await x.put(A, Filled(seed=1).cache, range(4))
                assert len(put.missing) == 4
                assert server.clients() == ()
            async with shop.client("all"):
                assert [row.tenant for row in server.clients()] == [""]


WRONG = [
    (["x?key={0}/x"], {}, "the server needs a key too"),
    (["x?identity=a"], {"psk_file": "{0}/all"}, 'needs trust="mtls"'),
    (["x?key={0}/all"], {"psk_file": "{0}/all"}, "its own key"),
    (["x?key={0}/x", "y?key={0}/x"], {"psk_file": "{0}/all"}, "have the same key"),
    (["x?identity=Acme.Example", "y?identity=acme.example"], {}, "have the same key"),
    (["x?key={0}/none"], {"psk_file": "{0}/all"}, "none"),
]


@pytest.mark.parametrize(("tenants", "arguments", "said"), WRONG)
async def test_keys_that_prove_nothing_are_refused(
    tmp_path: Path, tenants: list[str], arguments: dict[str, str], said: str
) -> None:
    for who in ("x", "all"):
        write_key_file(tmp_path / who)
    given: Any = {key: text.format(tmp_path) for key, text in arguments.items()}
    named = [text.format(tmp_path) for text in tenants]
    async with BlockStore.open(["memory:64KiB"], tenants=named) as store:
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(UsageError, match=said))
            StoreServer(store, "127.0.0.1:0", **given)


def test_a_request_without_a_subject_is_none() -> None:
    with pytest.raises(ValueError, match="digest"):
        Delete(1, None, b"short")
