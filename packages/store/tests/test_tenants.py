"""Who shares a store: how each is written, and what an index lets it have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwire import UsageError
from kvwire_store.index import Index
from kvwire_store.keys import NO_SLOT, as_keys
from kvwire_store.limits import STORE_TENANTS_MAX
from kvwire_store.placement import Verb, VerbKind
from kvwire_store.tenants import Shares, Tenant, Tenants
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs

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
    assert index._kept.tolist() == [True] + [False] * 7


def test_no_tenant_may_pin_what_all_may_pin_together() -> None:
    """Pins may last for ever."""
    of = Tenants(["a", "b?quota=64MiB", "c?pinned=200MiB", "d?pinned=1GiB"])
    mib = of.shares("memory", 1 << 30).pinned_bytes >> 20
    # The first is for blocks of no tenant.
    assert mib.tolist() == [256, 64, 32, 200, 256]
    assert Tenants().shares("memory", 1 << 30).pinned_bytes.tolist() == [256 << 20]
