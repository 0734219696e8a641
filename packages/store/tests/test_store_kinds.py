"""What is one block and what is another: groups, element types, models, shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire import KVSpec, PagedCache, UsageError
from kvwire_store import BlockStore
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain

MEMORY = ["memory:512KiB"]


def spec(**changed: object) -> KVSpec:
    fields = {name: getattr(SPEC, name) for name in SPEC.__slots__}
    return KVSpec(**fields | changed)


DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
# One latent a token, and a block that is no multiple of a page.
MLA = {"components": 1, "kv_heads": 1, "head_dim": 576, "layers": 3}


@pytest.mark.parametrize("changed", [*({"dtype": d} for d in DTYPES), MLA], ids=str)
async def test_every_kind_comes_back(tmp_path: Path, changed: dict[str, Any]) -> None:
    kind = spec(**changed)
    source, hashes = Filled(8, kind, seed=3), chain(8)
    tiers = [*MEMORY, f"disk:{tmp_path}?size=1MiB"]
    for layout in ("NHD", "HND"):
        target = Filled(8, kind, layout)
        async with BlockStore.open(tiers) as store:
            await store.put(hashes, source.cache, list(range(8)))
            outcome = await store.get(hashes, target.cache, list(range(8)))
        assert outcome.complete
        assert np.array_equal(source.tokens([*range(8)]), target.tokens([*range(8)]))


async def test_a_block_of_another_model_is_never_returned() -> None:
    """What else makes a model another one is in test_namespace."""
    source, other, hashes = Filled(seed=1), Filled(spec=spec(shard=(1, 2))), chain(4)
    async with BlockStore.open(MEMORY) as store:
        await store.put(hashes, source.cache, [0, 1, 2, 3])
        assert await store.match(hashes, other.cache) == 0
        outcome = await store.get(hashes, other.cache, [0, 1, 2, 3])
        assert outcome.usable_prefix == 0
        (reason,) = outcome.missing.reasons
        assert "shard_rank" in reason
        assert not other.tokens([0, 1, 2, 3]).any()
        # Both are in one store, each for itself.
        await store.put(hashes[:2], other.cache, [0, 1])
        assert await store.match(hashes, other.cache) == 2
        assert await store.match(hashes, source.cache) == 4
        with pytest.raises(UsageError, match=r"different .*shard_rank.*; pass cache="):
            await store.match(hashes)


async def test_the_field_is_named_after_a_restart(tmp_path: Path) -> None:
    tiers = [*MEMORY, f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        await store.put(chain(2), Filled(seed=1).cache, [0, 1])
    async with BlockStore.open(tiers) as store:
        other = Filled(spec=spec(dtype="bfloat16"))
        outcome = await store.get(chain(2), other.cache, [0, 1])
        assert outcome.missing.reasons == (
            "it is not in the store for this cache; it is for one with another dtype",
        )


def grouped(full: Filled, window: Filled) -> PagedCache:
    return PagedCache.grouped(
        {
            "full": (full.spec, full.tensors, full.layout),
            "window": (window.spec, window.tensors, window.layout),
        }
    )


async def test_groups_are_kept_apart() -> None:
    """Two groups of one spec, and one hash for a block of each."""
    full, window, hashes = Filled(seed=1), Filled(seed=2), chain(4)
    to_full, to_window = Filled(), Filled()
    async with BlockStore.open(MEMORY) as store:
        await store.put(
            {"full": hashes, "window": hashes[2:]},
            grouped(full, window),
            {"full": [0, 1, 2, 3], "window": [7, 8]},
        )
        assert await store.match({"full": hashes, "window": hashes}) == {
            "full": 4,
            "window": 0,
        }
        # Of the groups that are named, and of no others.
        both = grouped(to_full, to_window)
        assert await store.match({"window": hashes[2:]}, both) == {"window": 2}
        assert await store.match({}) == await store.match({}, both) == {}
        said = "the groups are full, window"
        with pytest.raises(UsageError, match=f"hashes: {said}"):
            await store.match({"window": hashes, "else": hashes}, both)
        with pytest.raises(UsageError, match=f"hash_tokens: {said}"):
            await store.match({"full": hashes}, both, hash_tokens={"else": 4})
        with pytest.raises(UsageError, match=f"hashes: {said}"):
            store.put({"full": hashes}, both, {"full": [0, 1, 2, 3], "window": []})
        outcome = await store.get(
            {"full": hashes, "window": hashes[2:]},
            grouped(to_full, to_window),
            {"full": [4, 5, 6, 7], "window": [1, 0]},
        )
        assert outcome.complete
        assert outcome.usable_prefix == 4
        # One group of it alone, and a group that has nothing in this call.
        alone = PagedCache.grouped({"full": (full.spec, to_full.tensors)})
        assert (
            await store.get({"full": hashes}, alone, {"full": [0, 1, 2, 3]})
        ).complete
        some = await store.get(
            {"full": hashes, "window": []}, both, {"full": [8, 9, 10, 11], "window": []}
        )
        assert some.complete
    assert np.array_equal(full.tokens([0, 1, 2, 3]), to_full.tokens([4, 5, 6, 7]))
    assert np.array_equal(full.tokens([0, 1, 2, 3]), to_full.tokens([0, 1, 2, 3]))
    assert np.array_equal(window.tokens([7, 8]), to_window.tokens([1, 0]))


async def test_the_same_hash_twice_in_one_call() -> None:
    source, target, hashes = Filled(seed=1), Filled(), chain(3)
    twice = [hashes[0], hashes[1], hashes[0]]
    source.tensors[0][2], source.tensors[1][2] = (t[0] for t in source.tensors)
    async with BlockStore.open(MEMORY) as store:
        assert (await store.put(twice, source.cache, [0, 1, 2])).complete
        assert store.stats()[MEMORY[0]].written_blocks == 2
        assert (await store.get(twice, target.cache, [4, 5, 6])).complete
    assert np.array_equal(source.tokens([0, 1, 0]), target.tokens([4, 5, 6]))


async def test_a_block_that_fits_nowhere_is_a_reason(tmp_path: Path) -> None:
    kind = spec(layers=64, head_dim=64)
    source = Filled(1, kind, seed=1)
    async with BlockStore.open(["memory:512KiB?slab=64KiB"]) as store:
        outcome = await store.put(chain(1), source.cache, [0])
        (reason,) = outcome.missing.reasons
        assert "a block of 131072 bytes has no room in a slab" in reason
    tiers = ["memory:1MiB?slab=256KiB", f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        outcome = await store.put(chain(1), source.cache, [0])
        (reason,) = outcome.missing.reasons
        assert "in memory only" in reason
        assert "?slab=" in store.report[tiers[1]]
        assert (await store.get(chain(1), Filled(1, kind).cache, [0])).complete


async def test_what_fits_nowhere_is_known_before_there_is_a_block(
    tmp_path: Path,
) -> None:
    large, small = Filled(1, spec(layers=64, head_dim=64)).cache, Filled(1).cache
    disk = f"disk:{tmp_path}?size=1MiB"
    for tiers, refusing, said in (
        (
            ["memory:512KiB?slab=64KiB"],
            0,
            "131072 bytes has no room in a slab of 65536",
        ),
        (["memory:1MiB?slab=256KiB", disk], 1, "131072 bytes has no room in a slab of"),
        (["memory:1MiB?slab=256KiB"], None, ""),
    ):
        async with BlockStore.open(tiers) as store:
            store.require_room(small)
            if refusing is None:
                store.require_room(large)
                continue
            with pytest.raises(UsageError, match=said) as refused:
                store.require_room(large)
            assert repr(tiers[refusing]) in str(refused.value)


async def test_a_codec_may_make_room(tmp_path: Path) -> None:
    large = Filled(1, spec(layers=64, head_dim=64)).cache
    tiers = [
        "memory:1MiB?slab=256KiB",
        f"disk:{tmp_path}?size=1MiB&slab=192KiB&codec=zstd-planes",
    ]
    async with BlockStore.open(tiers) as store:
        store.require_room(large)
        assert (await store.put(chain(1), large, [0])).complete
