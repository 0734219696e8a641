"""The process with a store: what it moves is compared, and comes from its tier."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvwire.cli.bench.side import Bench, BenchError, Drive, driven
from kvwire.cli.bench.store import (
    DISK,
    FLUSHED_PUT,
    GET,
    LOOKUPS,
    MATCH,
    MATCHES,
    ONE,
    PUT,
    StoreBlocks,
    StoreWork,
    can_drop,
    compare,
    drop,
    filesystem,
    work_of,
)
from kvwire.kv.blocks import Ids
from kvwire.limits import MIB
from kvwire.store.index import Index
from kvwire.store.keys import Keys
from tests.support import inside


def work(verb: str, tier: str = DISK) -> StoreWork:
    return work_of(tier, verb, "small", 4 * MIB)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[StoreBlocks]:
    """With a disk tier."""
    async with AsyncExitStack() as opened:
        yield StoreBlocks(Bench({"tier": DISK, "place": str(tmp_path)}), opened)


@asynccontextmanager
async def measured(blocks: StoreBlocks) -> AsyncIterator[Drive]:
    """Ask for rounds of a store."""
    async with driven(Bench({}), blocks.rounds) as (_, ask):
        yield ask


@pytest.mark.parametrize("verb", [PUT, FLUSHED_PUT, GET, ONE, *MATCHES])
async def test_every_round_can_follow_every_other(disk: StoreBlocks, verb: str) -> None:
    async with measured(disk) as ask:
        for done in (work(PUT), work(verb), work(verb), work(GET)):
            seconds = (await ask(done, checks=done.verb == PUT)).seconds
            looked = dict.fromkeys(MATCHES, LOOKUPS)
            expected = {ONE: done.count, **looked}.get(done.verb, 1)
            assert len(seconds) == expected
            assert min(seconds) > 0


async def test_what_is_matched_is_never_in_the_memory_in_front(
    disk: StoreBlocks,
) -> None:
    done = work(MATCH)
    find, found = Index.find, set[int]()

    def watched(index: Index, keys: Keys) -> Ids:
        slots = find(index, keys)
        if index is memory.index:
            found.add(int((slots >= 0).sum()))
        return slots

    async with measured(disk) as ask:
        await ask(done, checks=True)
        memory = inside.tiers(disk.stocks[done.nbytes].store).memory
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Index, "find", watched)
            for _ in range(3):
                await ask(done)
    assert found == {0}


async def test_bytes_that_differ_are_found(disk: StoreBlocks) -> None:
    done = work(GET)
    await disk.ready(done)
    await disk.move(done)
    await disk.verify(done)
    stock = disk.stocks[done.nbytes]
    stock.want.memory[stock.want.blocks[-1] * done.fragment_bytes] ^= 1
    with pytest.raises(RuntimeError, match="other bytes than put had stored"):
        await disk.verify(done)
    # The first block alone is as it should be.
    compare(stock, replace(done, count=1))


async def test_what_comes_from_memory_is_no_measure_of_a_disk(
    disk: StoreBlocks,
) -> None:
    done = work(GET)
    async with measured(disk) as ask:
        await ask(done)
        disk.stocks[done.nbytes].sets.reverse()  # the set in memory now is next
        with pytest.raises(
            BenchError, match=r"\d+ of 64 blocks were read from the measured tier"
        ):
            await ask(done)


async def test_blocks_that_are_missing_are_an_error(disk: StoreBlocks) -> None:
    done = work(GET)
    await disk.ready(done)
    disk.stocks[done.nbytes].sets = [[bytes(32)] * done.set_blocks] * 2
    with pytest.raises(RuntimeError, match="64 blocks are missing: it is not in"):
        await disk.move(done)


# --- files without their pages in memory ----------------------------------------------

pages = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux says which pages are in memory"
)


@pages
def test_a_tmpfs_keeps_its_pages(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm here")
    assert not can_drop(shared)
    assert list(tmp_path.iterdir()) == []


@pages
def test_pages_that_stay_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, data = tmp_path / "file", os.urandom(1 * MIB)
    file.write_bytes(data)
    if can_drop(tmp_path):
        drop(file)
        assert file.read_bytes() == data
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    with pytest.raises((RuntimeError, OSError)):
        drop(file)
    assert not can_drop(tmp_path)
    monkeypatch.delattr(os, "posix_fadvise")
    assert not can_drop(tmp_path)


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    """Of two at one place the later one hides the other."""
    inner, mounts = tmp_path / "kv store", tmp_path / "mounts"
    inner.mkdir()
    assert "not name" in filesystem(tmp_path, tmp_path / "missing")
    mounts.write_text("\n")
    assert "unknown" in filesystem(tmp_path, mounts)
    escaped = str(inner).replace(" ", r"\040")
    found = [
        f"/dev/nvme0n1 {escaped} xfs rw",
        "/dev/vda / ext3 rw",
        "/dev/vda / ext4 rw",
        f"none {escaped}er tmpfs rw",
    ]
    mounts.write_text("\n".join(found) + "\n")
    assert filesystem(inner, mounts) == "xfs on /dev/nvme0n1"
    assert filesystem(tmp_path, mounts) == "ext4 on /dev/vda"
