"""Measures embedded engines as the index of a disk tier, and as index and data.

    pip install lmdb rocksdict
    python -m tests.store.engines DIRECTORY

An index maps a slot to an entry of 80 bytes: key, order, length, checksum. See
docs/adr/0017-an-engine-under-the-disk-tier.md.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvwire import KVSpec
from kvwire.store.address import TierAddress
from kvwire.store.index import as_keys
from kvwire.store.namespace import Namespace
from kvwire.store.tiers.disk import DiskTier
from kvwire.store.tiers.disk_index import DiskRows
from kvwire.store.tiers.file import File

ENTRIES = 1_000_000
BATCH = 100
RUN = 20
SYNCED = 100
ENTRY = 80
BLOCK = 64 * 1024
BLOCKS = 4096
BATCH_BLOCKS = 16
KILLS = 10

Pairs = list[tuple[int, bytes]]


class Engine(ABC):
    """A map of numbers to bytes that survives the end of its process."""

    @abstractmethod
    def __init__(self, path: Path, *, synced: bool) -> None: ...

    @abstractmethod
    def put(self, rows: Pairs) -> None:
        """Write rows, all or none."""

    @abstractmethod
    def get(self, slots: Iterable[int]) -> list[Any]:
        """Rows by their numbers."""

    @abstractmethod
    def scan(self) -> int:
        """Read every row; how many there are."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class Sqlite(Engine):
    """SQLite with a write-ahead log, for one process."""

    def __init__(self, path: Path, *, synced: bool) -> None:
        self._db = sqlite3.connect(path / "index.sqlite", isolation_level=None)
        for pragma in (
            "locking_mode=EXCLUSIVE",
            "journal_mode=WAL",
            f"synchronous={'FULL' if synced else 'NORMAL'}",
            "cache_size=-65536",
            "wal_autocheckpoint=16384",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS e(slot INTEGER PRIMARY KEY, entry BLOB)"
        )

    def put(self, rows: Pairs) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO e VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    def get(self, slots: Iterable[int]) -> list[Any]:
        one = "SELECT entry FROM e WHERE slot = ?"
        return [self._db.execute(one, (slot,)).fetchone() for slot in slots]

    def scan(self) -> int:
        return len(self._db.execute("SELECT slot, entry FROM e").fetchall())

    def close(self) -> None:
        self._db.close()


class Lmdb(Engine):
    """LMDB; without a sync a power cut may damage all of it."""

    def __init__(self, path: Path, *, synced: bool) -> None:
        import lmdb

        size = 4 << 30
        self._env = lmdb.open(str(path / "lmdb"), map_size=size, sync=synced)

    def put(self, rows: Pairs) -> None:
        with self._env.begin(write=True) as txn:
            pairs = ((struct.pack(">Q", slot), entry) for slot, entry in rows)
            txn.cursor().putmulti(pairs)

    def get(self, slots: Iterable[int]) -> list[Any]:
        with self._env.begin() as txn:
            return [txn.get(struct.pack(">Q", slot)) for slot in slots]

    def scan(self) -> int:
        with self._env.begin() as txn:
            return len(list(txn.cursor()))

    def close(self) -> None:
        self._env.close()


class Rocks(Engine):
    """RocksDB with a write-ahead log."""

    def __init__(self, path: Path, *, synced: bool) -> None:
        import rocksdict

        self._module = rocksdict
        self._db = rocksdict.Rdict(
            str(path / "rocks"), rocksdict.Options(raw_mode=True)
        )
        how = rocksdict.WriteOptions()
        how.sync = synced
        self._how = how

    def put(self, rows: Pairs) -> None:
        batch = self._module.WriteBatch(raw_mode=True)
        for slot, entry in rows:
            batch.put(struct.pack(">Q", slot), entry)
        self._db.write(batch, write_opt=self._how)

    def get(self, slots: Iterable[int]) -> list[Any]:
        return list(self._db.get([struct.pack(">Q", slot) for slot in slots]) or ())

    def scan(self) -> int:
        return len(list(self._db.items()))

    def close(self) -> None:
        self._db.close()


class Slots(Engine):
    """Entries of 128 bytes written in place, as the first format of the tier had."""

    def __init__(self, path: Path, *, synced: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT
        self._fd = os.open(path / "slots", flags)
        self._synced = synced
        if os.fstat(self._fd).st_size == 0:
            os.posix_fallocate(self._fd, 0, ENTRIES * 128)

    def put(self, rows: Pairs) -> None:
        for slot, entry in rows:
            body = entry.ljust(120, b"\0")
            summed = body + xxhash.xxh3_64_digest(body)
            os.pwrite(self._fd, summed, slot * 128)
        if self._synced:
            os.fdatasync(self._fd)

    def get(self, slots: Iterable[int]) -> list[Any]:
        return [os.pread(self._fd, 128, slot * 128) for slot in slots]

    def scan(self) -> int:
        raw = np.fromfile(f"/proc/self/fd/{self._fd}", np.uint8).reshape(-1, 128)
        return len([row.tobytes() for row in raw if row[0]])

    def close(self) -> None:
        os.close(self._fd)


ENGINES: dict[str, type[Engine]] = {
    "sqlite": Sqlite,
    "lmdb": Lmdb,
    "rocksdb": Rocks,
    "in place": Slots,
}

DATA = ("sqlite", "lmdb", "rocksdb", "file and sqlite")


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def disk_mib(path: Path) -> float:
    """MiB that a directory takes."""
    blocks = sum(file.stat().st_blocks for file in path.rglob("*") if file.is_file())
    return blocks * 512 / 2**20


def load(name: str, path: Path) -> None:
    """Fill an index in commits of some random rows, and time them."""
    # Blocks that were put together are evicted together, mostly.
    runs = list(range(0, ENTRIES, RUN))
    random.Random(1).shuffle(runs)
    slots = [first + at for first in runs for at in range(RUN)]
    engine = ENGINES[name](path, synced=False)
    entry, took = os.urandom(ENTRY), []
    for first in range(0, ENTRIES, BATCH):
        rows = [(slot, entry) for slot in sorted(slots[first : first + BATCH])]
        began = time.perf_counter()
        engine.put(rows)
        took.append(time.perf_counter() - began)
    engine.close()
    engine = ENGINES[name](path, synced=True)
    synced = []
    for first in range(0, SYNCED * BATCH, BATCH):
        rows = [(slot, entry) for slot in slots[first : first + BATCH]]
        began = time.perf_counter()
        engine.put(rows)
        synced.append(time.perf_counter() - began)
    engine.close()
    ms = [1e3 * float(x) for x in (np.median(took), np.max(took), np.median(synced))]
    print(
        f"{name}: {BATCH} rows in {ms[0]:.2f} ms, at most {ms[1]:.0f}; synced "
        f"{ms[2]:.1f} ms; {sum(took):.1f} s for all; {disk_mib(path):.0f} MiB on disk",
        flush=True,
    )


def restart(name: str, path: Path) -> None:
    """Open a full index and read all of it; look up some rows."""
    before, began = resident(), time.perf_counter()
    engine = ENGINES[name](path, synced=False)
    opened = time.perf_counter() - began
    count = engine.scan()
    scanned = time.perf_counter() - began
    slots = random.Random(2).sample(range(ENTRIES), 1000)
    engine.get(slots)
    began = time.perf_counter()
    engine.get(slots)
    looked = time.perf_counter() - began
    print(
        f"{name}: opened in {opened * 1e3:.0f} ms, {count} rows read in "
        f"{scanned:.2f} s; 1000 looked up in {looked * 1e3:.2f} ms; "
        f"{resident() - before:.0f} MiB more",
        flush=True,
    )
    engine.close()


def data(name: str, path: Path) -> None:
    """Put blocks and get them, as values of the engine or in a file beside it."""
    rng = np.random.default_rng(1)
    block = rng.integers(0, 256, BLOCK, np.uint8).tobytes()
    inside = name != "file and sqlite"
    engine = ENGINES[name if inside else "sqlite"](path, synced=False)
    if not inside:
        fd = os.open(path / "images", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, BLOCKS * BLOCK)
    for turn in ("put", "put again"):
        began = time.perf_counter()
        for first in range(0, BLOCKS, BATCH_BLOCKS):
            slots = range(first, first + BATCH_BLOCKS)
            if inside:
                engine.put([(slot, block) for slot in slots])
            else:
                os.pwritev(fd, [block] * BATCH_BLOCKS, first * BLOCK)
                engine.put([(slot, block[:ENTRY]) for slot in slots])
        rate = BLOCKS * BLOCK / (time.perf_counter() - began) / 1e9
        print(f"{name}: {turn} {rate:.2f} GB/s", end=", ")
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    buffer = bytearray(BLOCK)
    began = time.perf_counter()
    for slot in order:
        if inside:
            (found,) = engine.get([slot])
            buffer[:] = found[0] if isinstance(found, tuple) else found
        else:
            os.preadv(fd, [buffer], slot * BLOCK)
    rate = BLOCKS * BLOCK / (time.perf_counter() - began) / 1e9
    print(f"get {rate:.2f} GB/s; {disk_mib(path):.0f} MiB on disk", flush=True)
    engine.close()


def child(name: str, path: Path) -> None:
    """Commit numbered batches until somebody kills this process."""
    engine = ENGINES[name](path, synced=False)
    number = 0
    while number * BATCH < ENTRIES:
        rows = [(number * BATCH + at, struct.pack("<Q", 1) * 10) for at in range(BATCH)]
        engine.put(rows)
        number += 1
        os.write(1, b"+")


def kills(name: str, path: Path) -> None:
    """Kill children at random times; rows of theirs that are lost."""
    lost = 0
    for seed in range(KILLS):
        place = path / str(seed)
        place.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.store.engines", "child", name]
        command.append(str(place))
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            acked = len(running.stdout.read(random.Random(seed).randint(1, 400)))
            running.send_signal(signal.SIGKILL)
            acked += len(running.stdout.read())
        engine = ENGINES[name](place, synced=False)
        lost += max(0, acked * BATCH - engine.scan())
        engine.close()
    print(f"{name}: {KILLS} kills, {lost} acknowledged rows lost", flush=True)


class Sparse(File):
    """A file without room of its own: nothing is written to it here."""

    def allocate(self, offset: int, nbytes: int) -> None:
        """See File."""
        os.truncate(self.path, offset + nbytes)


def tier(name: str, path: Path) -> None:
    """Open a disk tier of a million blocks, and look for a thousand."""
    asyncio.run(_tier(path))


async def _tier(path: Path) -> None:
    text = f"disk:{path}?size={ENTRIES * 4 // 1024}MiB&slab=4MiB"
    address = TierAddress.parse(text)
    namespace = Namespace(
        "kv", KVSpec(layers=1, kv_heads=1, head_dim=64, block_tokens=16)
    )
    made = await DiskTier.open(address, file_type=Sparse)
    numbers = np.arange(made.stats().size_bytes // 4096)
    keys = as_keys(namespace.digest + n.to_bytes(32, "big") for n in numbers.tolist())
    blank = np.zeros(keys.size, np.uint8)
    nbytes, sums = np.full(keys.size, namespace.image_bytes), numbers.astype(np.uint64)
    rows = DiskRows(numbers, keys, blank, nbytes, sums, numbers)
    made._rows.record(namespace, rows)
    await made.close()
    before, began = resident(), time.process_time()
    opened = await DiskTier.open(address, file_type=Sparse)
    took, more = time.process_time() - began, resident() - before
    began = time.perf_counter()
    found = await opened.find(keys[:1000])
    looked = time.perf_counter() - began
    assert (found == 0).all()
    print(
        f"tier: {opened.stats().blocks} blocks in {took:.1f} s of CPU, {more:.0f} MiB; "
        f"1000 found in {looked * 1e3:.2f} ms",
        flush=True,
    )
    await opened.close()


STEPS = {
    "load": load,
    "restart": restart,
    "data": data,
    "kills": kills,
    "child": child,
    "tier": tier,
}


def main() -> None:
    """Measure everything, each in a process of its own."""
    if sys.argv[1] in STEPS:
        path = Path(sys.argv[3])
        path.mkdir(parents=True, exist_ok=True)
        STEPS[sys.argv[1]](sys.argv[2], path)
        return
    base = Path(sys.argv[1])
    for step in ("load", "restart", "kills", "data"):
        for name in DATA if step == "data" else ENGINES:
            path = base / (step if step in ("data", "kills") else "index") / name
            command = [sys.executable, "-m", "tests.store.engines", step, name, path]
            subprocess.run(command, check=True)
    tier("", base / "tier")
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
