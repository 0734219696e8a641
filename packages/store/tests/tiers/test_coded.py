"""Tiers with codecs: exact, or a miss with a reason; what was there stays readable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import inside

pytest.importorskip("obstore", reason="needs obstore: pip install obstore")

import obstore.store

from kvwire import BackendUnavailable, KVSpec, UsageError
from kvwire_store import BlockStore
from kvwire_store.tiers.disk import DiskTier
from tests.support.caches import Filled, chain

# Its threads start with the first request of a process, and stay.
obstore.put(obstore.store.MemoryStore(), "first", b"")

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
IDS = list(range(12))

Tiers = Callable[..., list[str]]
CODEC = "zstd-planes"


@pytest.fixture(params=["disk", "object"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    """Return tiers of one directory, with a codec or without."""

    def of(codec: str = "") -> list[str]:
        place = f"disk:{tmp_path}/d?size=8MiB&slab=512KiB"
        if request.param == "object":
            place = f"object:file://{tmp_path}/o?requests=8"
        return ["memory:4MiB", place + (f"&codec={codec}" if codec else "")]

    return of


def kv(seed: int = 1) -> Filled:
    filled = Filled(16, SPEC)
    rng = np.random.default_rng(seed)
    for tensor in filled.tensors:
        values = rng.normal(size=tensor.shape).astype(np.float32)
        tensor[:] = values.view(np.uint32) >> np.uint32(16)
    return filled


def numbers(filled: Filled) -> np.ndarray:
    """What the blocks are of, as float32."""
    words = np.stack([tensor[IDS] for tensor in filled.tensors]).astype(np.uint32)
    return (words << np.uint32(16)).view(np.float32)


async def put(tiers: list[str], source: Filled, name: str = "") -> tuple[int, int]:
    """Put its blocks by a store of their own; the bytes that a disk has for them."""
    async with BlockStore.open(tiers) as store:
        outcome = await store.put(chain(len(IDS), name), source.cache, IDS)
        assert outcome.complete, outcome.missing.reasons
        stats = store.stats()[tiers[1]]
        return stats.used_bytes or 0, stats.written_blocks


async def get(tiers: list[str], name: str = "") -> tuple[Filled, set[str]]:
    async with BlockStore.open(tiers) as store:
        into = Filled(16, SPEC)
        outcome = await store.get(chain(len(IDS), name), into.cache, IDS)
        assert outcome.complete != bool(outcome.missing.reasons)
        return into, set(outcome.missing.reasons)


def damage(folder: Path) -> None:
    """Change a bit in the middle of every file."""
    for path in folder.rglob("*"):
        if path.is_file():
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 16
            path.write_bytes(raw)


async def test_blocks_come_back_exactly(tiers: Tiers) -> None:
    """By a store that was opened with the codec, or none."""
    source = kv()
    plain, _ = await put(tiers(), kv(2), "plain")
    both, written = await put(tiers(CODEC), source)
    assert written == len(IDS)
    assert not plain or both - plain < 0.95 * plain
    for reader in ("", CODEC):
        for name, expected in (("", source), ("plain", kv(2))):
            got, missing = await get(tiers(reader), name)
            assert not missing
            assert (numbers(got) == numbers(expected)).all()


async def test_what_does_not_shrink_is_kept_as_it_is(tiers: Tiers) -> None:
    source = Filled(16, SPEC, seed=3)  # random bytes, some of which are no numbers
    await put(tiers(CODEC), source)
    got, missing = await get(tiers(CODEC))
    assert not missing
    assert (numbers(got).view("u4") == numbers(source).view("u4")).all()


async def test_damaged_bytes_are_a_miss(tmp_path: Path) -> None:
    place = ["memory:4MiB", f"object:file://{tmp_path}?codec={CODEC}"]
    await put(place, kv())
    damage(tmp_path)
    _, missing = await get(place)
    assert missing == {f"its bytes in {place[1]} are damaged"}


async def test_an_entry_that_cannot_be_decoded_is_a_miss(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(tiers("zstd-planes"), kv())
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zstandard", None)
        with pytest.raises(BackendUnavailable, match="needs zstandard, which is not"):
            await BlockStore.open(tiers("zstd-planes"))
        # Without asking for it nobody knows before the get.
        _, (missing,) = await get(tiers())
        assert "could not read it: codec zstd-planes needs zstandard" in missing
    monkeypatch.setattr("kvwire_store.codecs.planes.NUMBER", 9)
    async with BlockStore.open(tiers()) as store:
        into = Filled(16, SPEC)
        outcome = await store.get(chain(len(IDS)), into.cache, IDS)
        (missing,) = outcome.missing.reasons
        assert "could not read it: the entry uses codec 1, which this" in missing
        assert store.stats()[tiers()[1]].failed_blocks == len(IDS)
        assert "codec 1" in store.report[tiers()[1]]


async def test_entries_of_a_disk_have_few_lengths(tmp_path: Path) -> None:
    """Each takes a slab, and a slab that is needed is taken from other lengths."""
    place = ["memory:4MiB", f"disk:{tmp_path}?size=1MiB&slab=64KiB&codec=zstd-planes"]
    async with BlockStore.open(place) as store:
        for seed in range(8):
            source = kv(seed)
            spread = source.tensors[0].view(np.uint16)
            spread[: 2 * seed] = np.arange(spread[0].size).reshape(spread[0].shape)
            assert (await store.put(chain(12, str(seed)), source.cache, IDS)).complete
        (tier,) = inside.tiers(store).below
        assert isinstance(tier, DiskTier)
        sizes = set(tier.index.slabs.slot_bytes.tolist())
        assert 2 <= len(sizes - {0}) <= 16
        into = Filled(16, SPEC)
        assert (await store.get(chain(12, "7"), into.cache, IDS)).complete
        assert (numbers(into) == numbers(source)).all()


REFUSED = [
    (["memory:1MiB?codec=zstd-planes"], "use the codec in a tier below"),
    (["memory:1MiB", "kvwire://a:1?codec=zstd-planes"], "the server's own tiers"),
    (["memory:1MiB", "disk:D?size=1MiB&codec=zstd"], "did you mean 'zstd-planes'"),
]


@pytest.mark.parametrize(("tiers_", "why"), REFUSED)
async def test_what_is_refused(tiers_: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        await BlockStore.open(tiers_)
