"""A tier on a disk: restarts, damage, failures, and other processes."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvwire import BlockStore, UsageError
from kvwire.limits import KIB
from kvwire.store.address import TierAddress
from kvwire.store.disk import DiskTier
from kvwire.store.file import File
from kvwire.store.images import images_in
from kvwire.store.index import Keys, as_keys
from kvwire.store.slab_file import ENTRY_BYTES, SUPERBLOCK_BYTES
from kvwire.store.slabs import GRAIN_BYTES
from kvwire.store.space import ABSENT, Space, space_of
from kvwire.store.tier import Batch, Fate
from tests.store.caches import SPEC, Filled, chain
from tests.store.files import Faults, disk, store_on

IDS = list(range(16))


async def landed(store: BlockStore, source: Filled, hashes: list[bytes]) -> list[int]:
    """Get a chain, and compare what is said to have landed with what was put."""
    target = Filled(len(hashes))
    ids = list(range(len(hashes)))
    outcome = await store.get(hashes, target.cache, ids)
    here: list[int] = outcome.landed.ids().tolist()
    if here:
        assert np.array_equal(target.tokens(here), source.tokens(here))
    return here


def tiers(path: Path, size: str = "1MiB") -> list[str]:
    return ["memory:128KiB", f"disk:{path}?size={size}"]


async def test_a_restart_finds_what_was_put(tmp_path: Path) -> None:
    source, hashes = Filled(seed=1), chain(16)
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert (await store.put(hashes, source.cache, IDS)).complete
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(hashes) == 16
        assert await landed(store, source, hashes) == IDS
        # And what it has is not written again.
        await store.put(hashes, source.cache, IDS)
        assert store.stats()[tiers(tmp_path)[1]].written_blocks == 0


async def test_a_put_is_complete_when_it_is_in_the_file(tmp_path: Path) -> None:
    """Without closing, flushing, or anything else after the put."""
    source, hashes = Filled(seed=1), chain(16)
    first = await disk(tmp_path / "a")
    store = store_on(first)
    await store.put(hashes, source.cache, IDS)
    (tmp_path / "b").mkdir()
    for name in ("blocks", "spaces.json"):
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
    await store.close()
    async with BlockStore.open(tiers(tmp_path / "b")) as copy:
        assert await landed(copy, source, hashes) == IDS


async def test_written_back_blocks_are_there_after_a_close(tmp_path: Path) -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    async with BlockStore.open(tiers(tmp_path), write="back") as store:
        assert (await store.put(hashes, source.cache, list(range(64)))).complete
        stats = store.stats()
        assert stats["memory:128KiB"].evicted_blocks >= 32
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await landed(store, source, hashes) == list(range(64))


@pytest.mark.parametrize("seed", range(8))
async def test_a_flipped_bit_is_never_returned(tmp_path: Path, seed: int) -> None:
    """Anywhere in the file behind its first page: heads, entries, images, padding."""
    source, hashes = Filled(seed=1), chain(16)
    async with BlockStore.open(tiers(tmp_path)) as store:
        await store.put(hashes, source.cache, IDS)
    rng = np.random.default_rng(seed)
    blocks = tmp_path / "blocks"
    data = bytearray(blocks.read_bytes())
    used = np.flatnonzero(np.frombuffer(data, np.uint8)[SUPERBLOCK_BYTES:])
    for place in rng.choice(used, 40) + SUPERBLOCK_BYTES:
        data[place] ^= 1 << int(rng.integers(8))
    blocks.write_bytes(data)
    async with BlockStore.open(tiers(tmp_path)) as store:
        here = await landed(store, source, hashes)
        assert len(here) < 16
        # What was damaged is forgotten, and can be put again.
        assert (await store.put(hashes, source.cache, IDS)).complete
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await landed(store, source, hashes) == IDS


@pytest.mark.parametrize("first", range(0, ENTRY_BYTES, 16))
async def test_an_entry_with_a_flipped_bit_is_none(tmp_path: Path, first: int) -> None:
    """Key, order, length, checksum: each byte of an entry, one in each of 16 entries.

    An order that is another one would be valid, and give a block in a wrong layout.
    """
    source, hashes = Filled(seed=1), chain(16)
    one = "memory:128KiB", f"disk:{tmp_path}?size=260KiB&slab=256KiB"
    async with BlockStore.open(one) as store:
        await store.put(hashes, source.cache, IDS)
    blocks = tmp_path / "blocks"
    data = bytearray(blocks.read_bytes())
    for place in range(16):
        entry = SUPERBLOCK_BYTES + (1 + place) * ENTRY_BYTES
        data[entry + first + place] ^= 1
    blocks.write_bytes(data)
    async with BlockStore.open(one) as store:
        assert store.stats()[one[1]].blocks == 0
        assert await landed(store, source, hashes) == []


async def test_damage_is_a_reason(tmp_path: Path) -> None:
    source, hashes = Filled(seed=1), chain(4)
    async with BlockStore.open(tiers(tmp_path)) as store:
        await store.put(hashes, source.cache, IDS[:4])
    blocks = tmp_path / "blocks"
    data = bytearray(blocks.read_bytes())
    at = data.find(source.tensors[0][2].tobytes()[:32])
    assert at > 0
    data[at] ^= 1
    blocks.write_bytes(data)
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(hashes) == 4
        outcome = await store.get(hashes, Filled().cache, IDS[:4])
        assert dict(outcome.missing) == {
            ("kv", 2): f"its bytes in {tiers(tmp_path)[1]} are damaged"
        }
        assert outcome.usable_prefix == 2
        assert await store.match(hashes) == 2
        assert store.stats()[tiers(tmp_path)[1]].damaged_blocks == 1
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(hashes) == 2


@pytest.mark.parametrize("kept", [0.01, 0.1, 0.2])
async def test_a_file_that_was_cut_short(tmp_path: Path, kept: float) -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    async with BlockStore.open(tiers(tmp_path)) as store:
        await store.put(hashes, source.cache, list(range(64)))
    blocks = tmp_path / "blocks"
    os.truncate(blocks, int(blocks.stat().st_size * kept))
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert len(await landed(store, source, hashes)) < 64
        assert (await store.put(hashes, source.cache, list(range(64)))).complete
        assert await landed(store, source, hashes) == list(range(64))


async def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    async with BlockStore.open(["memory:16KiB", tiers(tmp_path)[1]]) as store:
        await store.put(hashes, source.cache, list(range(64)))
        os.truncate(tmp_path / "blocks", SUPERBLOCK_BYTES + GRAIN_BYTES)
        outcome = await store.get(hashes, Filled(64).cache, list(range(64)))
        assert not outcome.complete
        assert any(
            "shorter than it was" in reason for reason in outcome.missing.reasons
        )


async def test_a_slot_that_another_block_has_taken(tmp_path: Path) -> None:
    """Its entry was lost in a power cut: the older one does not fit its bytes."""
    source, hashes = Filled(64, seed=1), chain(64)
    one = tiers(tmp_path, "68KiB&slab=64KiB")
    async with BlockStore.open(["memory:16KiB", one[1]]) as store:
        await store.put(hashes[:4], source.cache, IDS[:4])
        early = (tmp_path / "blocks").read_bytes()
        await store.put(hashes[4:], source.cache, list(range(4, 64)))
    late = bytearray((tmp_path / "blocks").read_bytes())
    slab = SUPERBLOCK_BYTES
    late[slab : slab + GRAIN_BYTES] = early[slab : slab + GRAIN_BYTES]
    (tmp_path / "blocks").write_bytes(late)
    async with BlockStore.open(["memory:16KiB", one[1]]) as store:
        assert store.stats()[one[1]].blocks > 0
        assert await landed(store, source, hashes) == []
        assert store.stats()[one[1]].damaged_blocks > 0


async def test_the_later_of_two_slots_counts(tmp_path: Path) -> None:
    source, hashes = Filled(seed=1), chain(8)
    for _ in range(3):
        async with BlockStore.open(tiers(tmp_path)) as store:
            await store.put(hashes, source.cache, IDS[:8])
            tier = store._tiers.below[0]
            assert (await tier.find(store_keys(hashes, source)) != ABSENT).all()
            # It forgets them, and its file does not.
            named = tier._index.victims(512, 8)  # type: ignore[attr-defined]
            tier._index.drop(*named)  # type: ignore[attr-defined]
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await landed(store, source, hashes) == IDS[:8]


def store_keys(hashes: list[bytes], source: Filled) -> Keys:
    space = space_of(source.cache.groups["kv"], None)
    return as_keys(space.digest + one for one in hashes)


@pytest.mark.parametrize("first", [True, False])
async def test_a_slot_of_another_size_is_damaged(tmp_path: Path, first: bool) -> None:
    """No store writes such an entry, and its checksum is right."""
    small, large = Space("kv", SPEC), Space("kv", replace(SPEC, layers=40))
    keys = as_keys(small.digest + one for one in chain(2))
    wrong, right = keys[:1], keys[1:]
    memory = np.random.default_rng(1).integers(0, 256, 64 * KIB, np.uint8)
    tier = await disk(tmp_path)
    for space, key in ((large, wrong), (small, right)):
        images = images_in(memory, space.image_bytes, 1)
        written = await tier.write(space, Batch(key, np.zeros(1, np.uint8), images))
        assert written.tolist() == [Fate.LANDED]
    await tier.close()
    tier = await disk(tmp_path)
    both = keys if first else keys[::-1]
    target = np.zeros(2 * small.image_bytes, np.uint8)
    images = images_in(target, small.image_bytes, 2)
    batch = Batch(both, np.zeros(2, np.uint8), images)
    fates = dict(zip(both, await tier.read(small, batch), strict=True))
    assert fates == {wrong[0]: Fate.DAMAGED, right[0]: Fate.LANDED}
    image = target.reshape(2, -1)[1 if first else 0]
    assert np.array_equal(image, memory[: small.image_bytes])
    # It is forgotten, and nothing is held: every slot can be had again.
    assert (await tier.find(both) == ABSENT).tolist() == [first, not first]
    assert not tier._index._pins.any()
    for space in (large, small):
        tier._index.evict(space.image_bytes, 4)
    assert tier.stats().used_bytes == 0
    await tier.close()


async def test_the_block_that_was_written_last_goes_last(tmp_path: Path) -> None:
    """After a restart as well, and where an older slot has the same block."""
    space = Space("kv", SPEC)
    keys = as_keys(space.digest + one for one in chain(3))
    memory = np.zeros(space.image_bytes, np.uint8)
    images = images_in(memory, space.image_bytes, 1)
    tier = await disk(tmp_path)
    for one in keys[:1], keys[1:2], keys[2:], keys[:1]:
        if (slot := tier._index.find(one)) >= 0:
            # Forgotten, and its entry is not written over.
            tier._index.pin(one, slot)
            tier._index.forget(one, slot)
        await tier.write(space, Batch(one, np.zeros(1, np.uint8), images))
    await tier.close()
    tier = await disk(tmp_path)
    named = tier._index.victims(space.image_bytes, 3)
    assert named.keys.tolist() == [keys[1], keys[2], keys[0]]
    tier._index.unpin(*named)
    await tier.close()


async def test_a_disk_that_is_full_degrades_its_tier(tmp_path: Path) -> None:
    faults, source, hashes = Faults(), Filled(seed=1), chain(16)
    tier = await disk(tmp_path, hook=faults)
    async with store_on(tier) as store:
        assert (await store.put(hashes[:4], source.cache, IDS[:4])).complete
        faults.full()
        outcome = await store.put(hashes, source.cache, IDS)
        assert outcome.usable_prefix == 4
        (reason,) = outcome.missing.reasons
        assert "in memory only" in reason
        assert "No space left" in reason
        assert "No space left" in store.report[tier.name]
        assert not tier.taking
        # Memory serves all of them, and the disk what it had.
        assert await landed(store, source, hashes) == IDS
        writes = faults.calls.count("pwritev")
        assert not (await store.put(chain(1, "b"), source.cache, [0])).complete
        assert faults.calls.count("pwritev") == writes
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await landed(store, source, hashes) == IDS[:4]


async def test_a_disk_that_breaks_ends_no_process(tmp_path: Path) -> None:
    faults, source, hashes = Faults(), Filled(64, seed=1), chain(64)
    tier = await disk(tmp_path, hook=faults)
    async with store_on(tier, memory="memory:32KiB") as store:
        await store.put(hashes, source.cache, list(range(64)))
        faults.broken()
        target = Filled(64)
        outcome = await store.get(hashes, target.cache, list(range(64)))
        assert 0 < outcome.usable_prefix < 64
        for reason in outcome.missing.reasons:
            assert "could not read it: " in reason
            assert "failed: Input/output error" in reason
        assert tier.stats().failed_blocks == len(outcome.missing)
        await store.flush()
        assert "Input/output error" in store.report[tier.name]


async def test_a_disk_without_room_is_said_at_once(tmp_path: Path) -> None:
    faults = Faults()
    faults.failing["allocate"] = errno.ENOSPC
    with pytest.raises(UsageError, match="has no room for 1048576 bytes"):
        await disk(tmp_path, hook=faults)


@pytest.mark.parametrize("call", ["allocate", "sync", "preadv"])
async def test_a_cancelled_open_lets_go_of_the_directory(
    tmp_path: Path, call: str
) -> None:
    """The thread that opens it is finished first, and has it by then."""
    await (await disk(tmp_path / "old")).close()
    begun, go = threading.Event(), threading.Event()

    def wait(name: str, *_: object) -> None:
        if name == call:
            begun.set()
            go.wait(10)

    path = tmp_path / ("old" if call == "preadv" else "new")
    opening = asyncio.create_task(disk(path, hook=wait))
    await asyncio.to_thread(begun.wait, 10)
    opening.cancel()
    await asyncio.sleep(0)
    assert not opening.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await (await disk(path)).close()


async def test_a_file_that_cannot_be_closed_is_a_reason(tmp_path: Path) -> None:
    class Stuck(File):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    address = TierAddress.parse(f"disk:{tmp_path}?size=1MiB")
    tier = await DiskTier.open(address, file_type=Stuck)
    await tier.close()
    assert "Input/output error" in tier.trouble
    await (await disk(tmp_path)).close()


async def test_two_processes_cannot_have_one_directory(tmp_path: Path) -> None:
    async with BlockStore.open(tiers(tmp_path)):
        program = (
            "import asyncio, sys, kvwire\n"
            "async def main():\n"
            "    await kvwire.BlockStore.open(sys.argv[1:])\n"
            "asyncio.run(main())\n"
        )
        command = [sys.executable, "-c", program, *tiers(tmp_path)]
        run = partial(subprocess.run, capture_output=True, text=True, check=False)
        done = await asyncio.to_thread(run, command)
        assert done.returncode == 1
        assert f"process {os.getpid()} has this store open" in done.stderr
        with pytest.raises(UsageError, match="give each its own directory"):
            await BlockStore.open(tiers(tmp_path))
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(chain(1)) == 0


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (b"x" * 9000, "this is no store"),
        (b"x" * 9, "too short"),
        (struct.pack("<8sIxxxxQ", b"kvwstore", 7, 0).ljust(9000, b"\0"), "format 7"),
        (struct.pack("<8sIxxxxQ", b"kvwstore", 1, 2**60).ljust(9000, b"\0"), "damaged"),
    ],
)
async def test_another_file_is_left_alone(
    tmp_path: Path, page: bytes, said: str
) -> None:
    (tmp_path / "blocks").write_bytes(page)
    with pytest.raises(UsageError, match=said):
        await BlockStore.open(tiers(tmp_path))
    assert (tmp_path / "blocks").read_bytes() == page


async def test_a_smaller_and_a_larger_size(tmp_path: Path) -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    for size, least, most in (("1MiB", 64, 64), ("256KiB", 1, 63), ("2MiB", 1, 63)):
        async with BlockStore.open(tiers(tmp_path, size)) as store:
            if size == "1MiB":
                await store.put(hashes, source.cache, list(range(64)))
            assert least <= len(await landed(store, source, hashes)) <= most
    with pytest.raises(UsageError, match="its slabs have 65536 bytes"):
        await BlockStore.open(tiers(tmp_path, "32KiB"))


@pytest.mark.parametrize(
    "damage", [b'[{"group": 1}]', b"", b'[{"group": "\xff"}]', b"\x00" * 100]
)
async def test_spaces_that_cannot_be_read_are_only_words(
    tmp_path: Path, damage: bytes
) -> None:
    source, hashes = Filled(seed=1), chain(4)
    async with BlockStore.open(tiers(tmp_path)) as store:
        await store.put(hashes, source.cache, IDS[:4])
    (tmp_path / "spaces.json").write_bytes(damage)
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(hashes, source.cache) == 4
        assert await landed(store, source, hashes) == IDS[:4]
        # What was got is known again, also to whoever evicts it from memory.
        assert await store.match(hashes) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("disk:a", "write disk:DIRECTORY"),
        ("disk:?size=1GiB", "write disk:DIRECTORY"),
        ("disk:a?size=1GiB&sync=1", "no option 'sync'"),
        ("disk:a?size=1GiB&slab=2GiB", "a slab of 2147483648 bytes"),
        ("disk:a?size=4KiB", "a slab of 0 bytes"),
        ("disk:a?size=8191", "a slab of 0 bytes"),
    ],
)
async def test_a_wrong_address_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        await BlockStore.open(["memory:1MiB", text])
