"""Who shares a store: how each is written, what it may have, and what it may see."""

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
from kvwire_store.index import Index
from kvwire_store.keys import NO_SLOT, as_keys
from kvwire_store.limits import STORE_TENANTS_MAX
from kvwire_store.placement import Verb, VerbKind
from kvwire_store.server.client import ask_report, delete_all
from kvwire_store.server.messages import Delete
from kvwire_store.tenants import Shares, Tenant, Tenants
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs
from packages.store.tests.server.rig import where
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.certificates import FAR, NEAR, Authority
from tests.support.inside import mapped

READ = [
    ("acme", Tenant("acme")),
    ("a?quota=8KiB&disk=1GiB", Tenant("a", {"memory": 8192, "disk": 1 << 30})),
    ("a?disk=1GiB&ttl=60", Tenant("a", {"disk": 1 << 30}, 60.0)),
    ("a.b-c_1?pinned=4KiB&identity=x", Tenant("a.b-c_1", {}, 0.0, 4096, "", "x")),
]
WRONG: list[tuple[Any, str]] = [
    (7, "write 'acme"),
    ("", "letters"),
    ("a/b", "letters"),
    ("a?size=1GiB", "unknown option 'size'"),
    ("a?ttl=0", "ttl='0'"),
    ("a?ttl=x", "ttl='x'"),
    ("a?quota=1", "allowed"),
]


@pytest.mark.parametrize(("text", "tenant"), READ)
def test_a_tenant_is_read(text: str, tenant: Tenant) -> None:
    assert Tenant.parse(text) == tenant


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_wrong_one_is_refused(text: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Tenant.parse(text)


def test_tenants_are_numbered_named_once_and_bounded() -> None:
    both = Tenants(["a", "b"])
    assert [both.number(name) for name in ("", "a", "b", "c")] == [0, 1, 2, 0]
    both.require("b")
    with pytest.raises(UsageError, match="tenant: pass a tenant's name, not a list"):
        both.require(["a"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the tenants are a, b"):
        both.require("c")
    with pytest.raises(UsageError, match="twice"):
        Tenants(["a", "a?ttl=1"])
    with pytest.raises(UsageError, match="at most"):
        Tenants(f"t{number}" for number in range(STORE_TENANTS_MAX + 1))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shared:
    """An index of 16 slots of one grain and two tenants, 1 with a quota of 8."""

    def __init__(self, ttl_s: float = 0.0) -> None:
        self.clock = Clock()
        grains = [1024, 8, 1024]
        shares = Shares(
            [GRAIN_BYTES * one for one in grains],
            [GRAIN_BYTES * one for one in (4, 4, 4)],
            [0.0, ttl_s, 0.0],
        )
        slabs = Slabs(2, 8 * GRAIN_BYTES)
        self.index = Index(slabs, shares)
        self.index.now = self.clock

    def put(self, tenant: int, *names: str, grains: int = 1) -> list[str]:
        """Put blocks one by one; what was evicted for them."""
        gone: list[str] = []
        for name in names:
            while not (slots := self.index.take(grains * GRAIN_BYTES, 1, tenant)).size:
                found = self.index.evict(grains * GRAIN_BYTES, 1, tenant).keys
                assert found.size, "nothing goes"
                gone += [key.decode() for key in found.tolist()]
            keys = as_keys([name.encode()])
            self.index.name(keys, slots)
            self.index.unpin(slots)
        return gone

    def keep(self, *names: str) -> list[bool]:
        keys = as_keys(name.encode() for name in names)
        kept: list[bool] = self.index.keep(keys, self.index.find(keys)).tolist()
        return kept

    def __contains__(self, name: str) -> bool:
        return bool(self.index.find(as_keys([name.encode()]))[0] != NO_SLOT)


def test_a_quota_takes_from_nobody_else() -> None:
    shared = Shared()
    assert shared.put(2, *"abcdefgh") == []
    assert shared.put(1, *"ijklmnop") == []
    assert shared.put(1, *"qrstuvwx") == list("ijklmnop")
    assert all(name in shared for name in "abcdefgh")
    assert shared.index.used_bytes.tolist() == [0, 8 * GRAIN_BYTES, 8 * GRAIN_BYTES]
    assert shared.index.evicted_blocks.tolist() == [0, 8, 0]
    # One below its quota takes what was used least recently, whoever has it.
    assert shared.put(2, "y") == ["a"]


def test_a_quota_of_one_size_makes_room_for_another() -> None:
    shared = Shared()
    shared.put(1, *"abcdefgh")
    assert shared.put(1, "i", grains=2) == ["a", "b"]
    assert shared.index.used_bytes[1] == 8 * GRAIN_BYTES
    assert shared.index.fits(4 * GRAIN_BYTES, 1)
    assert not shared.index.fits(5 * GRAIN_BYTES, 1)


def test_a_block_is_gone_when_its_time_is_over() -> None:
    shared = Shared(ttl_s=10)
    shared.put(1, "a", "b")
    shared.put(2, "c")
    held = as_keys([b"b"])
    slots = shared.index.find(held)
    shared.index.pin(slots)
    shared.clock.now += 9
    shared.put(1, "d")
    shared.clock.now += 1
    assert [name in shared for name in "abcd"] == [False, False, True, True]
    assert shared.index.used_bytes.tolist() == [0, 2 * GRAIN_BYTES, GRAIN_BYTES]
    shared.index.unpin(slots)
    assert shared.index.used_bytes[1] == GRAIN_BYTES
    # Also when nobody asks for it, but for its room.
    shared.clock.now += 10
    shared.put(1, *"efghijkl")
    assert shared.index.evicted_blocks.sum() == 0


def test_what_is_kept_stays_as_far_as_it_may() -> None:
    shared = Shared()
    shared.put(2, *"abcdefgh")
    assert shared.keep(*"abcde") == [True] * 4 + [False]
    shared.put(0, *"ijklmnop")
    assert shared.put(2, *"qr") == ["e", "f"]
    keys = as_keys([b"a", b"e"])
    shared.index.unkeep(shared.index.find(keys[:1]))
    assert shared.index.kept_bytes[2] == 3 * GRAIN_BYTES
    assert shared.put(2, *"stuvwxyzABCDE")[-1] == "a"
    assert all(name in shared for name in "bcd")
    # A size that has no slab at all is not kept from its first one.
    keys = as_keys([b"d"])
    shared.index.unkeep(shared.index.find(keys))
    shared.put(2, "0", grains=2)
    assert all(name in shared for name in "bcd0")
    assert shared.keep("0") == [True]
    assert set("bcd") <= set(shared.put(2, "1", grains=8))
    assert shared.index.pinned == 0


def test_what_is_deleted_is_not_found_and_free_when_nobody_reads_it() -> None:
    shared = Shared()
    index = shared.index
    shared.put(1, *"abc")
    shared.keep("a")
    keys = as_keys([b"a", b"b", b"b", b"z"])
    slots = index.find(keys[:2])
    index.pin(slots[1:])
    assert sorted(index.delete(keys)) == sorted(slots)
    assert [name in shared for name in "abc"] == [False, False, True]
    assert index.doomed(slots)
    assert (index.kept_bytes == 0).all()
    # The name may come back, in another slot, before the reader is done.
    shared.put(1, "b")
    assert not index.drop(keys[1:2], slots[1:]).any()
    assert not index.doomed(slots)
    assert "b" in shared
    assert index.used_bytes[1] == 2 * GRAIN_BYTES == index.slabs.used_bytes
    index.delete(as_keys([b"b", b"c"]))
    assert not index.slabs.used.any()
    assert not np.count_nonzero(index.used_bytes)


def test_who_needs_room_looks_for_old_blocks_once_a_second() -> None:
    """On a large disk that takes a while, and what has no room yet comes often."""
    shared = Shared(ttl_s=10)
    shared.put(1, "a")
    shared.put(2, *"bcdefghijklmnop")
    index = shared.index
    # A clock may also be set back; and a block that is too old goes in a look alone.
    for since, gone in ((9.8, 0), (0.3, 0), (-100, 0), (100.8, 1)):
        shared.clock.now += since
        assert index.take(GRAIN_BYTES, 1, 2).size == gone


def test_who_has_nothing_yet_makes_room_of_what_others_have() -> None:
    index = Index(Slabs(1, 2 * GRAIN_BYTES), Tenants(["a", "b"]).shares("", 1 << 20))
    keys, slots = as_keys([b"a", b"b"]), index.take(GRAIN_BYTES, 2, 1)
    index.name(keys, slots)
    index.unpin(slots)
    assert index.victims(GRAIN_BYTES, 1, 2).keys.tolist() == [b"b"]


def test_a_block_that_grows_too_old_while_it_is_pinned_is_not_pinned() -> None:
    """Of a call that looks once, whatever the time is at its end."""
    clock = Clock()
    shares = Tenants(["t?ttl=60"]).shares("memory", 1 << 20)
    index = Index(Slabs(1, 8 * GRAIN_BYTES), shares)
    index.now = clock
    keys, slots = as_keys([b"a"]), index.take(GRAIN_BYTES, 1, 1)
    index.name(keys, slots)
    index.unpin(slots)
    looked = []

    def later() -> float:
        looked.append(clock.now)
        return clock.now + 60 * (len(looked) > 1)

    index.now = later
    assert index.apply(Verb(VerbKind.PIN), keys).done.tolist() == [True]
    assert index.kept_bytes.sum() == GRAIN_BYTES


def test_no_tenant_may_pin_what_all_may_pin_together() -> None:
    """Pins may last for ever."""
    of = Tenants(["a", "b?quota=64MiB", "c?pinned=200MiB", "d?pinned=1GiB"])
    mib = of.shares("memory", 1 << 30).pinned_bytes >> 20
    # The first is for blocks of no tenant.
    assert mib.tolist() == [256, 64, 32, 200, 256]
    assert Tenants().shares("memory", 1 << 30).pinned_bytes.tolist() == [256 << 20]


# --- tenants of one server ------------------------------------------------------------


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


PROVE_NOTHING = [
    (["x?key={0}/x"], {}, "the server needs a key too"),
    (["x?identity=a"], {"psk_file": "{0}/all"}, 'needs trust="mtls"'),
    (["x?key={0}/all"], {"psk_file": "{0}/all"}, "its own key"),
    (["x?key={0}/x", "y?key={0}/x"], {"psk_file": "{0}/all"}, "have the same key"),
    (["x?identity=Acme.Example", "y?identity=acme.example"], {}, "have the same key"),
    (["x?key={0}/none"], {"psk_file": "{0}/all"}, "none"),
]


@pytest.mark.parametrize(("tenants", "arguments", "said"), PROVE_NOTHING)
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
