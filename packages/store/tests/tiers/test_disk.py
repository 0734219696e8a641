"""A tier on a disk: restarts, damage, failures, kills, and other processes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvwire import KVSpec, UsageError
from kvwire.memory.arena import may_share
from kvwire_store import BlockStore, StoreServer
from kvwire_store.address import TierAddress
from kvwire_store.images import image_sums, images_in
from kvwire_store.keys import Keys, as_keys
from kvwire_store.namespace import ABSENT, Namespace, namespace_of
from kvwire_store.tiers.base import Batch, BlockResult
from kvwire_store.tiers.directory import File, Views
from kvwire_store.tiers.disk import DiskTier
from kvwire_store.tiers.disk_index import DiskIndex
from kvwire_store.tiers.slabs import GRAIN_BYTES
from packages.store.tests.contract import put_before
from packages.store.tests.files import Faults, disk, store_on
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, Memory, chain
from tests.support.pairs import until
from tests.support.runs import Beside, beside

IDS = list(range(16))
Chosen = Callable[[Sequence[int]], tuple[Namespace, Batch]]


async def landed(store: BlockStore, source: Filled, hashes: list[bytes]) -> list[int]:
    """Get a chain, and compare what is said to have landed with what was put."""
    target = Filled(len(hashes))
    ids = list(range(len(hashes)))
    outcome = await store.get(hashes, target.cache, ids)
    here: list[int] = outcome.landed.ids().tolist()
    if here:
        assert np.array_equal(target.tokens(here), source.tokens(here))
    return here


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def tiers(path: Path, size: str = "1MiB") -> list[str]:
    return ["memory:128KiB", f"disk:{path}?size={size}"]


async def test_an_order_that_is_another_one_is_damage(tmp_path: Path) -> None:
    """It would be valid, and give a block in a wrong layout."""
    source, hashes = await put_before(*tiers(tmp_path))
    change(tmp_path, "UPDATE blocks SET image_order = image_order + 1")
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(hashes) == 16
        assert await landed(store, source, hashes) == []
        assert store.stats()[tiers(tmp_path)[1]].damaged_blocks == 16


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE blocks SET slot = slot + 4611686018427387904",
        "UPDATE blocks SET slot = 9223372036854775807 - slot",
        "UPDATE blocks SET slot = -1 - slot",
        "UPDATE blocks SET nbytes = 17179869184",
        "UPDATE blocks SET serial = -1",
        "UPDATE blocks SET key = zeroblob(96)",
        """CREATE TABLE others AS SELECT 'no slot' AS slot, key, image_order, nbytes,
           checksum, serial FROM blocks; DROP TABLE blocks;
           ALTER TABLE others RENAME TO blocks""",
    ],
)
async def test_rows_that_make_no_sense_are_no_rows(
    tmp_path: Path, statement: str
) -> None:
    """Where none is left, the tier opens empty, and is one like any other."""
    source, hashes = await put_before(*tiers(tmp_path))
    change(tmp_path, statement)
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await landed(store, source, hashes) == []
        put = await store.put(chain(4, "new"), source.cache, IDS[:4])
        await store.flush()
        assert put.complete
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(chain(4, "new"), source.cache) == 4


def _renamed(index: Path) -> None:
    """Leave a schema that SQLite quotes in its error, and Python cannot decode."""
    data = index.read_bytes()
    assert b"TABLE spaces" in data
    index.write_bytes(data.replace(b"TABLE spaces", b"TABLE\xecspaces"))


def _in_its_place(index: Path) -> None:
    index.unlink()
    index.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda index: os.truncate(index, 5000), "malformed; delete the directory"),
        (lambda index: index.write_bytes(b"x" * 9000), "not a database; delete the"),
        (_renamed, "is damaged: .*; delete the directory, or use another one"),
        (lambda index: change(index.parent, "DROP TABLE tier"), "no such .*; delete"),
        (_in_its_place, "index.sqlite: Is a directory"),
        (lambda index: Path(f"{index}-journal").mkdir(), "see that the disk works"),
    ],
)
async def test_an_index_that_is_none_is_refused_with_a_remedy(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    await put_before(*tiers(tmp_path))
    damage(tmp_path / "index.sqlite")
    with pytest.raises(UsageError, match=said):
        await BlockStore.open(tiers(tmp_path))


@pytest.mark.parametrize("kept", [None, 0.01, 0.1, 0.2])
async def test_a_file_that_was_cut_short_or_is_gone(
    tmp_path: Path, kept: float | None
) -> None:
    source, hashes = await put_before(*tiers(tmp_path), count=64)
    images = tmp_path / "images"
    if kept is None:
        images.unlink()
    else:
        os.truncate(images, int(images.stat().st_size * kept))
    async with BlockStore.open(tiers(tmp_path)) as store:
        # Nothing that is gone counts as kept.
        assert (await store.put(hashes, source.cache, list(range(64)))).complete
        assert await landed(store, source, hashes) == list(range(64))


async def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    async with BlockStore.open(["memory:16KiB", tiers(tmp_path)[1]]) as store:
        await store.put(hashes, source.cache, list(range(64)))
        os.truncate(tmp_path / "images", GRAIN_BYTES)
        outcome = await store.get(hashes, Filled(64).cache, list(range(64)))
        assert not outcome.complete
        assert any("became shorter" in reason for reason in outcome.missing.reasons)


async def test_a_tier_that_was_not_closed_in_order_takes_no_row_at_its_word(
    tmp_path: Path,
) -> None:
    """A put of a damaged block would else be complete, and the block not there."""
    source, hashes = await put_before(*tiers(tmp_path), count=8)
    change(tmp_path, "UPDATE tier SET closed = 0")
    flip(tmp_path, source, 2)
    # One that read nothing knows no more than the one before, and may not say so.
    await (await disk(tmp_path)).close()
    counted: list[int] = []

    def look(call: str) -> None:
        if call == "pwritev":
            counted.append(tier.stats().written_blocks)

    for held in (7, 8):
        tier = await disk(tmp_path, hook=look)
        keys = store_keys(hashes, source)
        async with store_on(tier) as store:
            assert await store.match(hashes) == 8
            assert int((await tier.holds(keys)).sum()) == (0 if held == 7 else 8)
            assert (await store.put(hashes, source.cache, IDS[:8])).complete
            # One was damaged, and written again; the others were only read.
            assert tier.stats().written_blocks == (1 if held == 7 else 0)
            assert tier.stats().damaged_blocks == (1 if held == 7 else 0)
            assert (await tier.holds(keys)).all()
    # A counter only grows: what was only read was never counted.
    assert counted == [0]
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await landed(store, source, hashes) == IDS[:8]


async def test_a_tier_is_noted_as_open_before_it_writes(tmp_path: Path) -> None:
    """Or rows that a killed process has left are taken at their word."""
    await put_before(*tiers(tmp_path / "kv"), count=4)

    def kill(call: str) -> None:
        if call == "pwritev":
            shutil.copytree(tmp_path / "kv", tmp_path / "killed")

    async with store_on(await disk(tmp_path / "kv", hook=kill)) as store:
        new = await store.put(chain(4, "new"), Filled(seed=1).cache, IDS[:4])
        assert new.complete
    for name, in_order in (("kv", 1), ("killed", 0)):
        with closing(sqlite3.connect(tmp_path / name / "index.sqlite")) as db:
            assert db.execute("SELECT closed FROM tier").fetchone() == (in_order,)


@pytest.mark.parametrize("by", ["key", "namespace"])
async def test_what_is_being_written_is_deleted_once_it_is_there(
    tmp_path: Path, by: str
) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(call: str) -> None:
        if call == "pwritev":
            begun.set()
            assert go.wait(30)

    tier = await disk(tmp_path, hook=wait)
    namespace, batch = blocks_of(SPEC, 4)(range(4))
    writing = asyncio.create_task(tier.write(namespace, batch))
    await asyncio.to_thread(begun.wait, 30)
    delete = (
        tier.delete(batch.keys)
        if by == "key"
        else tier.delete_namespace(namespace.digest)
    )
    deleting = asyncio.create_task(delete)
    await asyncio.sleep(0)
    go.set()
    assert (await writing == BlockResult.LANDED).all()
    await deleting
    assert (await tier.find(batch.keys) == ABSENT).all()
    await tier.close()


async def test_a_row_in_doubt_that_was_evicted_is_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is free, what was to take it came to nothing, and the tier is closed."""
    small = blocks_of(SPEC, 17)
    large = blocks_of(replace(SPEC, layers=40), 1)
    tier = await disk(tmp_path, "64KiB&slab=64KiB")
    assert (await tier.write(*small(range(16))) == BlockResult.LANDED).all()
    await tier.close()
    change(tmp_path, "UPDATE tier SET closed = 0")
    (tmp_path / "images").write_bytes(bytes(64 * 1024))
    tier = await disk(tmp_path, "64KiB&slab=64KiB")
    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "dirty", full)
        assert (await tier.write(*large([0])) == BlockResult.FAILED).all()
    await tier.close()
    await expect_whole(tmp_path, small, range(17), found=0)


def full(index: DiskIndex) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    raise error


def blocks_of(spec: KVSpec, count: int) -> Chosen:
    """Some of so many blocks of random bytes, as a tier is given them."""
    namespace = Namespace("kv", spec)
    memory = np.random.default_rng(1).integers(
        0, 256, count * namespace.image_bytes, np.uint8
    )
    keys = as_keys(namespace.digest + one for one in chain(count))
    images = images_in(memory, namespace.image_bytes, count)
    whole = Batch(keys, np.zeros(count, np.uint8), images)
    return lambda which: (namespace, whole.selected(np.array(which)))


async def expect_whole(path: Path, chosen: Chosen, which: range, found: int) -> None:
    """What a tier takes at its word can be read, and is so many blocks."""
    tier = await disk(path, "64KiB&slab=64KiB")
    namespace, batch = chosen(which)
    held = await tier.holds(batch.keys)
    assert int(held.sum()) == found
    into = images_in(
        np.empty(held.size * namespace.image_bytes, np.uint8),
        namespace.image_bytes,
        held.size,
    )
    read = await tier.read(namespace, Batch(batch.keys, batch.orders, into))
    assert (read[held] == BlockResult.LANDED).all()
    await tier.close()


def flip(path: Path, source: Filled, block: int) -> None:
    """Damage one block on the disk."""
    images = path / "images"
    data = bytearray(images.read_bytes())
    at = data.find(source.tensors[0][block].tobytes()[:32])
    assert at > 0
    data[at] ^= 1
    images.write_bytes(data)


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as db:
        db.executescript(statement)


def store_keys(hashes: list[bytes], source: Filled) -> Keys:
    namespace = namespace_of(source.cache.groups["kv"], None)
    return as_keys(namespace.digest + one for one in hashes)


async def test_the_block_that_was_written_last_goes_last(tmp_path: Path) -> None:
    """After a restart as well, and where an older slot has the same block."""
    namespace = Namespace("kv", SPEC)
    keys = as_keys(namespace.digest + one for one in chain(3))
    memory = np.zeros(2 * namespace.image_bytes, np.uint8)
    tier = await disk(tmp_path)
    for some in keys[:1], keys[1:], keys[:1]:
        if (slots := tier.index.find(some)).min() >= 0:
            # Forgotten, and its entry is not written over.
            tier.index.pin(slots)
            tier.index.forget(some, slots)
        images = images_in(memory, namespace.image_bytes, some.size)
        batch = Batch(some, np.zeros(some.size, np.uint8), images)
        await tier.write(namespace, batch)
    await tier.close()
    tier = await disk(tmp_path)
    named = tier.index.victims(namespace.image_bytes, 3)
    # Of those that were written together, the tail of the chain.
    assert named.keys.tolist() == [keys[2], keys[1], keys[0]]
    tier.index.unpin(named.slots)
    await tier.close()


async def test_a_disk_that_is_full_takes_blocks_again_when_it_has_room(
    tmp_path: Path,
) -> None:
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
        # Memory serves all of them, and the disk what it had.
        assert await landed(store, source, hashes) == IDS
        faults.failing.clear()
        assert (await store.put(hashes[:12], source.cache, IDS[:12])).complete
        assert store.report[tier.name] == ""
    async with BlockStore.open(tiers(tmp_path)) as store:
        # Those that memory had until it was closed as well.
        assert await landed(store, source, hashes) == IDS


async def test_a_full_disk_does_not_keep_a_new_model_out_for_ever(
    tmp_path: Path,
) -> None:
    """Nor what other models have there already. The index is what has no room."""
    source, other = Filled(seed=1), Filled(200, replace(SPEC, layers=4), seed=2)
    async with BlockStore.open(tiers(tmp_path)) as store:
        await store.put(chain(8), source.cache, IDS[:8])
        (pages,) = _index_of(store).execute("PRAGMA page_count").fetchone()
        _index_of(store).execute(f"PRAGMA max_page_count={pages}")
        outcome = await store.put(chain(200, "b"), other.cache, list(range(200)))
        assert not outcome.complete
        assert any("df -h and df -i" in r for r in outcome.missing.reasons)
        assert await landed(store, source, chain(8)) == IDS[:8]
        _index_of(store).execute("PRAGMA max_page_count=1000000")
        assert (await store.put(chain(4, "b"), other.cache, IDS[:4])).complete
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(chain(4, "b"), other.cache) == 4
        assert await store.match(chain(8), source.cache) == 8


def _index_of(store: BlockStore) -> sqlite3.Connection:
    db: sqlite3.Connection = inside.tiers(store).below[0].rows._db  # type: ignore[attr-defined]
    return db


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
        # A put would not take it that they are there.
        lost = store_keys(hashes, source)[outcome.missing.ids()]
        assert not (await tier.holds(lost)).any()
        with pytest.raises(OSError, match="flushing failed: Input/output error"):
            await store.flush()
        assert "Input/output error" in store.report[tier.name]
        faults.failing.clear()
        # What could not be read is there, and is read now.
        outcome = await store.get(hashes, target.cache, list(range(64)))
        assert outcome.complete
        assert np.array_equal(target.tokens([*range(64)]), source.tokens([*range(64)]))
        # What a disk has dropped once it does not have, whatever it says now.
        with pytest.raises(OSError, match="flushing failed: Input/output error"):
            await store.flush()
    async with BlockStore.open(tiers(tmp_path)) as store:
        await store.flush()


async def test_a_flush_of_a_full_disk_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the index has not taken it has still, and a file has dropped its pages."""
    faults, source, hashes = Faults(), Filled(seed=1), chain(16)
    tier = await disk(tmp_path, hook=faults)
    async with store_on(tier) as store:
        await store.put(hashes, source.cache, IDS)
        with monkeypatch.context() as patch:
            patch.setattr(DiskIndex, "sync", full)
            with pytest.raises(OSError, match="flushing failed: No space"):
                await store.flush()
        await store.flush()
        faults.failing["sync"] = errno.ENOSPC
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                await store.flush()
            faults.failing.clear()


async def test_without_a_thread_a_block_is_refused_and_later_taken(
    tmp_path: Path,
) -> None:
    source, hashes = Filled(seed=1), chain(16)
    await put_before(*tiers(tmp_path))
    async with BlockStore.open(tiers(tmp_path)) as store:
        other = chain(16, "other")
        stack_bytes = threading.stack_size(1 << 47)  # more than there are addresses
        try:
            # The thread that has opened the tier has ended.
            put = await store.put(other, source.cache, IDS)
            assert "no thread can be started" in "".join(put.missing.reasons)
            with pytest.raises(OSError, match="no thread can be started"):
                await store.flush()
        finally:
            threading.stack_size(stack_bytes)
        assert (await store.put(other, source.cache, IDS)).complete
        await store.flush()
        assert await landed(store, source, other) == IDS
        assert await landed(store, source, hashes) == IDS


async def test_a_write_waits_for_slots_that_are_being_read(tmp_path: Path) -> None:
    small, reading, go = blocks_of(SPEC, 24), threading.Event(), threading.Event()

    def wait(call: str) -> None:
        if call == "preadv":
            reading.set()
            assert go.wait(30)

    tier = await disk(tmp_path, "64KiB&slab=64KiB", hook=wait)
    assert (await tier.write(*small(range(8))) == BlockResult.LANDED).all()
    getting = asyncio.create_task(tier.read(*small(range(8))))
    await asyncio.to_thread(reading.wait, 30)
    writing = asyncio.create_task(tier.write(*small(range(8, 24))))
    await until(lambda: tier.stats().blocks == 16)
    go.set()
    assert (await getting == BlockResult.LANDED).all()
    assert (await writing == BlockResult.LANDED).all()
    assert (await tier.holds(small(range(8, 24))[1].keys)).all()
    await tier.close()


class Cached(File):
    """A file whose bytes are read where the kernel has them, and nowhere else."""

    def preadv(self, views: Views, offset: int) -> int:
        raise AssertionError("the kernel has these bytes")


async def test_what_the_kernel_has_is_read_by_no_thread(tmp_path: Path) -> None:
    small = blocks_of(SPEC, 2)
    address = TierAddress.parse(f"disk:{tmp_path}?size=1MiB")
    tier = await DiskTier.open(address, file_type=Cached)
    assert (await tier.write(*small([0, 1])) == BlockResult.LANDED).all()
    with closing(File(tmp_path / "images")) as file:
        try:
            file.preadv_at_once([memoryview(bytearray(1))], 0)
        except OSError:
            await tier.close()
            pytest.skip("this file system or kernel has no RWF_NOWAIT")
    namespace, batch = small([0, 1])
    into = np.zeros(2 * namespace.image_bytes, np.uint8)
    reading = Batch(batch.keys, batch.orders, images_in(into, namespace.image_bytes, 2))
    results = await tier.read(namespace, reading)
    assert (results == BlockResult.LANDED).all()
    assert image_sums(reading.images).tolist() == image_sums(batch.images).tolist()
    await tier.close()


async def test_what_a_write_finds_makes_no_room_for_the_rest_of_it(
    tmp_path: Path,
) -> None:
    small = blocks_of(SPEC, 28)
    tier = await disk(tmp_path, "64KiB&slab=64KiB")
    assert (await tier.write(*small(range(16))) == BlockResult.LANDED).all()
    _, batch = more = small([*range(8), *range(16, 28)])
    results = await tier.write(*more)
    assert results.tolist() == [BlockResult.LANDED] * 16 + [BlockResult.REFUSED] * 4
    assert (await tier.holds(batch.keys)).tolist() == [True] * 16 + [False] * 4
    await tier.close()


@pytest.mark.parametrize("sync", ["flush", "put"])
async def test_a_put_is_synced_if_it_is_to_be(tmp_path: Path, sync: str) -> None:
    faults, source, hashes = Faults(), Filled(seed=1), chain(16)
    tier = await disk(tmp_path, f"1MiB&sync={sync}", hook=faults)
    async with store_on(tier) as store:
        before = faults.calls.count("sync")
        assert (await store.put(hashes, source.cache, IDS)).complete
        assert (faults.calls.count("sync") > before) is (sync == "put")
        faults.failing["sync"] = errno.EIO
        outcome = await store.put(chain(4, "b"), source.cache, IDS[:4])
        assert outcome.complete is (sync == "flush")
        faults.failing.clear()


async def test_a_disk_without_room_is_said_at_once(tmp_path: Path) -> None:
    """What the open has created is removed: it would refuse the size that fits."""
    folder, faults = tmp_path / "new" / "kv", Faults()
    faults.failing["allocate"] = errno.ENOSPC
    with pytest.raises(
        UsageError, match=r"has no room for 1 MiB and .*: [\d.]+ .iB are free; set"
    ):
        await disk(folder, hook=faults)
    assert not files(tmp_path)
    await (await disk(folder, "64KiB", hook=Faults())).close()
    with pytest.raises(UsageError, match="no room"):
        await disk(folder, hook=faults)
    assert files(folder) == {"images", "index.sqlite"}


@pytest.mark.parametrize("what", ["removed", "replaced", "its index removed"])
async def test_a_directory_that_goes_while_it_is_open_keeps_nothing(
    tmp_path: Path, what: str
) -> None:
    """So nothing is acknowledged; what is there can be read as long as it is open."""
    folder = tmp_path / "kv"
    source, hashes = await put_before(*tiers(folder))
    async with BlockStore.open(tiers(folder)) as store:
        if what == "removed":
            shutil.rmtree(folder)
        elif what == "replaced":
            folder.rename(tmp_path / "elsewhere")
            folder.mkdir()
        else:
            (folder / "index.sqlite").unlink()
        put = await store.put(chain(4, "b"), source.cache, IDS[:4])
        (reason,) = put.missing.reasons
        assert f"{folder} was removed or replaced while it was open" in reason
        with pytest.raises(OSError, match=r"4 blocks are in memory only: .* replaced"):
            await store.flush()
        assert await landed(store, source, hashes) == IDS
    async with BlockStore.open(tiers(folder)) as store:
        assert await store.match(hashes, source.cache) == 0
        assert (await store.put(hashes, source.cache, IDS)).complete


async def test_a_cancelled_open_lets_go_of_the_directory(tmp_path: Path) -> None:
    """The thread that opens it is finished first, and has it by then."""
    begun, go = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "allocate":
            begun.set()
            go.wait(10)

    opening = asyncio.create_task(disk(tmp_path, hook=wait))
    await asyncio.to_thread(begun.wait, 10)
    opening.cancel()
    await asyncio.sleep(0)
    assert not opening.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not files(tmp_path)
    await (await disk(tmp_path)).close()


async def test_a_file_that_cannot_be_closed_is_a_reason(tmp_path: Path) -> None:
    class Stuck(File):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    address = TierAddress.parse(f"disk:{tmp_path}?size=1MiB")
    tier = await DiskTier.open(address, file_type=Stuck)
    await tier.close()
    assert "Input/output error" in tier.error
    await (await disk(tmp_path)).close()


async def test_a_smaller_and_a_larger_size(tmp_path: Path) -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    for size, least, most in (("1MiB", 64, 64), ("192KiB", 1, 63), ("2MiB", 1, 63)):
        async with BlockStore.open(tiers(tmp_path, size)) as store:
            if size == "1MiB":
                await store.put(hashes, source.cache, list(range(64)))
            assert least <= len(await landed(store, source, hashes)) <= most
    with pytest.raises(UsageError, match="its slabs have 64 KiB"):
        await BlockStore.open(tiers(tmp_path, "32KiB"))


async def test_spaces_that_cannot_be_read_are_only_words(tmp_path: Path) -> None:
    source, hashes = await put_before(*tiers(tmp_path), count=4)
    change(tmp_path, "UPDATE spaces SET described = x'ff'")
    async with BlockStore.open(tiers(tmp_path)) as store:
        assert await store.match(hashes, source.cache) == 4
        assert await landed(store, source, hashes) == IDS[:4]
        # What was got is known again, also to whoever evicts it from memory.
        assert await store.match(hashes) == 4


# --- a process that is killed ---------------------------------------------------------


# It flushes one chain, acknowledges another one, and waits to be killed.
_KILLED = """\
import asyncio, sys
from kvwire_store import BlockStore
from tests.support.caches import Filled, chain

async def main(path):
    source, ids = Filled(seed=1).cache, list(range(16))
    tiers = ["memory:64KiB", f"disk:{path}?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        assert (await store.put(chain(16, "flushed"), source, ids)).complete
        await store.flush()
        assert (await store.put(chain(16, "put"), source, ids)).complete
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


def _zeroed(log: bytes) -> bytes:
    return log[:-4096] + bytes(4096)


def _half(log: bytes) -> bytes:
    return log[: len(log) // 2]


def _longer(log: bytes) -> bytes:
    return log + log[-512:]


@pytest.mark.parametrize(
    "tear",
    [None, _zeroed, _half, _longer, lambda log: log[:-1], lambda _: b""],
    ids=["whole", "zeroed", "half", "longer", "a byte short", "gone"],
)
async def test_what_was_flushed_is_there_after_a_kill(
    tmp_path: Path, tear: Callable[[bytes], bytes] | None
) -> None:
    """With any end of the log; and what was acknowledged, if the log is whole."""
    async with beside("-c", _KILLED, str(tmp_path), kind=Beside) as child:
        assert await child.line() == "ready"
        child.signal(signal.SIGKILL)
        await child.wait()
    log = tmp_path / "index.sqlite-wal"
    if tear is not None:
        log.write_bytes(tear(log.read_bytes()))
    source, ids = Filled(seed=1), list(range(16))
    async with BlockStore.open(["memory:64KiB", f"disk:{tmp_path}?size=1MiB"]) as store:
        for name, sure in (("flushed", True), ("put", tear is None)):
            target = Filled(16)
            got = await store.get(chain(16, name), target.cache, ids)
            assert got.complete or not sure
            here = got.landed.ids().tolist()
            assert np.array_equal(target.tokens(here), source.tokens(here))
            # And it takes them again.
            assert (await store.put(chain(16, name), source.cache, ids)).complete


# --- calls that a sandbox or a file system refuses ------------------------------------


REFUSED = (errno.EPERM, errno.ENOSYS)


@pytest.fixture
def refusing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Refuse calls to a function of a module, as it is parametrized."""
    module, name, number = request.param

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    may_share.cache_clear()
    monkeypatch.setattr(module, name, refuse)
    yield
    monkeypatch.undo()
    may_share.cache_clear()


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    "refusing", [(os, "memfd_create", number) for number in REFUSED], indirect=True
)
async def test_memory_needs_no_memfd(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open([f"kvwire://{server.address}"]) as client,
    ):
        await client.put([b"h" * 32], Memory().cache, [0])
        got = await client.get([b"h" * 32], Memory().cache, [1])
        assert got.complete
    (said,) = [r.getMessage() for r in caplog.records if "memfd" in r.getMessage()]
    assert "peers of this host get copies" in said


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    ("refusing", "remedy"),
    [
        ((module, name, number), remedy)
        for module, name, remedy in (
            (fcntl, "flock", "flock: .*; .*allow flock in .*-o flock"),
            (os, "posix_fallocate", "fallocate: .*; .*allow fallocate in"),
        )
        for number in REFUSED
    ],
    indirect=["refusing"],
)
async def test_a_call_that_a_disk_needs_is_named_with_its_remedy(
    remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=remedy):
        await BlockStore.open(["memory:1MiB", f"disk:{tmp_path}?size=2MiB"])
