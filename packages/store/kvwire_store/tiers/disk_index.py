"""The index of a disk tier in SQLite: the image in each slot.

A row of ``blocks`` describes one slot of the file of images: the key, the order, the
length, a checksum over these and the image, and when it was written. If the image was
not written, or was overwritten since then, the checksum differs. See docs/adr/21.

The index records whether it was *closed in order*: the mark is cleared before the first
image is written, and set after the last row. Without the mark, rows may name images
that were being overwritten, so each image is verified before it is trusted.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.spec import KVSpec
from kvwire.limits import NAME_CHARS_MAX
from kvwire.spi import DECODE_ERRORS
from kvwire_store.images import Sums
from kvwire_store.keys import Keys, Orders, Times, as_keys
from kvwire_store.limits import (
    STORE_HASH_BYTES_MAX,
    STORE_NAMESPACES_MAX,
    STORE_SLAB_BYTES_MAX,
)
from kvwire_store.namespace import DIGEST_BYTES, ORDERS, Namespace
from kvwire_store.tiers.slabs import GRAIN_BYTES

FORMAT: Final = 3
"""The format's version, for the tables and the file of images."""

_SETTINGS: Final = (
    # Only one process uses it: no lock and no shared memory per transaction.
    "locking_mode=EXCLUSIVE",
    "journal_mode=WAL",
    "wal_autocheckpoint=4096",
    "cache_size=-16384",
    "secure_delete=OFF",
    "synchronous=FULL",
)
_TABLES: Final = (
    "CREATE TABLE tier (slab_bytes INTEGER NOT NULL, closed INTEGER NOT NULL)",
    "CREATE TABLE spaces (digest BLOB PRIMARY KEY, described BLOB NOT NULL)",
    """CREATE TABLE blocks (
        slot INTEGER PRIMARY KEY, key BLOB NOT NULL, image_order INTEGER NOT NULL,
        nbytes INTEGER NOT NULL, checksum INTEGER NOT NULL, serial INTEGER NOT NULL
    )""",
    # A pin applies only to the row with this serial number in this slot, not to later
    # rows. It ends at a time in seconds since 1970; infinity for never.
    """CREATE TABLE pins (
        slot INTEGER PRIMARY KEY, serial INTEGER NOT NULL, until REAL NOT NULL
    )""",
    f"PRAGMA user_version={FORMAT}",
)
_PIN: Final = """
    INSERT OR REPLACE INTO pins SELECT slot, serial, ? FROM blocks
    WHERE slot=? AND key=?
"""
_PINS: Final = """
    SELECT slot, until FROM pins NATURAL JOIN blocks WHERE typeof(until) = 'real'
"""
# In SQLite any text is greater than any number, but a BETWEEN two numbers excludes it.
_ROWS: Final = """
    SELECT slot, key, image_order, nbytes, checksum, serial FROM blocks
    WHERE typeof(slot) = 'integer' AND slot BETWEEN 0 AND ? AND typeof(key) = 'blob'
    AND typeof(nbytes) = 'integer' AND typeof(checksum) = 'integer'
    AND length(key) > ? AND length(key) <= ? AND image_order BETWEEN 0 AND ?
    AND nbytes BETWEEN 1 AND ? AND serial BETWEEN 0 AND ?
"""
_KEY_BYTES: Final = (DIGEST_BYTES, DIGEST_BYTES + STORE_HASH_BYTES_MAX)
_SLOT_MAX: Final = 2**62
_LIMITS: Final = (
    _SLOT_MAX,
    *_KEY_BYTES,
    len(ORDERS) - 1,
    STORE_SLAB_BYTES_MAX,
    2**62,
)
_SLABS: Final = range(GRAIN_BYTES, STORE_SLAB_BYTES_MAX + 1, GRAIN_BYTES)
# How many rows are read at once: each needs several Python objects.
_AT_ONCE: Final = 64 * 1024


class _Described(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A namespace as the index stores it."""

    group: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    pairs: tuple[tuple[str, str], ...]
    tenant: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""


_DESCRIBED: Final = msgspec.json.Decoder(_Described)


class DiskRows(NamedTuple):
    """Rows of the table ``blocks``, each column as an array."""

    slots: Ids
    keys: Keys
    orders: Orders
    nbytes: Ids
    sums: Sums
    serials: Ids

    def selected(self, which: Ids | Bits) -> DiskRows:
        """Return some of the rows, by position or by a mask."""
        return DiskRows._make(column[which] for column in self)


class DiskIndex:
    """The index of one directory, used by one process and one thread at a time.

    Its errors are SQLite's, ``sqlite3.Error``: after one, nothing has been changed, and
    the call may be repeated.

    Attributes:
        slab_bytes: Bytes of a slab of the file of images.
        closed: Whether it was closed in order, and nothing has been written since.
        namespaces: The namespaces of its blocks, by digest; for reports only, since a
            key is enough to find a block.
    """

    def __init__(self, path: Path, slab_bytes: int, *, synced: bool) -> None:
        # Opened by Python first, whose error gives the reason; SQLite's does not.
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600))
        self._synced = synced
        self._db = sqlite3.connect(
            path, timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            self._set_up(path, slab_bytes)
            found = self._db.execute("SELECT slab_bytes, closed FROM tier").fetchone()
            if not found or found[0] not in _SLABS:
                raise sqlite3.DatabaseError("its slab size is missing")
            self.slab_bytes: int = found[0]
            self.closed: bool = bool(found[1])
            self.namespaces: dict[bytes, Namespace] = dict(self._read_namespaces())
        except BaseException:
            self._db.close()
            raise

    def __del__(self) -> None:
        # Of a dropped store, whose File warns; SQLite's object would warn once more.
        if hasattr(self, "_db"):
            self._db.close()

    def rows(self) -> Iterator[DiskRows]:
        """Yield all valid rows, in no order."""
        asked = self._db.execute(_ROWS, _LIMITS)
        while some := asked.fetchmany(_AT_ONCE):
            slots, keys, orders, nbytes, sums, serials = zip(*some, strict=True)
            numbers = np.array((slots, nbytes, sums, serials), np.int64)
            yield DiskRows(
                numbers[0],
                as_keys(keys),
                np.array(orders, np.uint8),
                numbers[1],
                numbers[2].view(np.uint64),
                numbers[3],
            )

    def dirty(self) -> None:
        """Record that writing has begun, so that an end without a close is noticed."""
        if self.closed:
            with self._transaction(synced=True):
                self._db.execute("UPDATE tier SET closed = 0")
            self.closed = False

    def record(self, namespace: Namespace, rows: DiskRows, evicted: Ids) -> None:
        """Write the rows of slots whose images are on the disk.

        In the same transaction the rows of the ``evicted`` slots are removed.
        """
        known = self.namespaces
        new = namespace.digest not in known and len(known) < STORE_NAMESPACES_MAX
        with self._transaction():
            if new:
                words = msgspec.json.encode(
                    _Described(
                        namespace.group, namespace.spec.to_pairs(), namespace.tenant
                    )
                )
                self._db.execute(
                    "INSERT OR REPLACE INTO spaces VALUES (?, ?)",
                    (namespace.digest, words),
                )
            self._db.executemany(
                "DELETE FROM blocks WHERE slot = ?", ((s,) for s in evicted.tolist())
            )
            signed = rows._replace(sums=rows.sums.view(np.int64))
            self._db.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?)",
                zip(*(column.tolist() for column in signed), strict=True),
            )
        if new:
            known[namespace.digest] = namespace

    def erase(self, slots: Iterable[range]) -> None:
        """Remove the rows of some slots."""
        self.dirty()
        with self._transaction():
            self._db.executemany(
                "DELETE FROM blocks WHERE slot >= ? AND slot < ?",
                ((some.start, some.stop) for some in slots),
            )

    def pin(self, keys: Keys, slots: Ids, ends: Times | None) -> None:
        """Mark blocks' rows as pinned until their ends, or unpinned if None."""
        listed = slots.tolist()
        with self._transaction():
            if ends is None:
                gone = ((slot,) for slot in listed)
                self._db.executemany("DELETE FROM pins WHERE slot=?", gone)
            else:
                named = zip(ends.tolist(), listed, keys.tolist(), strict=True)
                self._db.executemany(_PIN, named)

    def pins(self) -> tuple[Ids, Times]:
        """Return the slots with pinned rows, and their end times."""
        found = self._db.execute(_PINS).fetchall()
        slots = np.fromiter((slot for slot, _ in found), np.int64, len(found))
        return slots, np.fromiter((end for _, end in found), np.float64, len(found))

    def sync(self) -> None:
        """Wait until all rows survive a power cut."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self, *, in_order: bool) -> None:
        """Close it.

        Args:
            in_order: Whether every row matches its image, and both are safe on the
                disk.
        """
        try:
            if in_order and not self.closed:
                with self._transaction(synced=True):
                    self._db.execute("UPDATE tier SET closed = 1")
        finally:
            self._db.close()

    # --- inside -----------------------------------------------------------------------

    def _set_up(self, path: Path, slab_bytes: int) -> None:
        """Make the tables, unless they exist; refuse another format."""
        for setting in _SETTINGS:
            self._db.execute(f"PRAGMA {setting}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == FORMAT:
            return
        if version or self._db.execute("SELECT 1 FROM sqlite_master").fetchall():
            raise UsageError(
                f"{path}: it has format {version}, and this version of kvwire reads "
                f"{FORMAT}; choose another directory, or delete this one"
            )
        with self._transaction(synced=True):
            for statement in _TABLES:
                self._db.execute(statement)
            self._db.execute("INSERT INTO tier VALUES (?, 1)", (slab_bytes,))

    @contextlib.contextmanager
    def _transaction(self, *, synced: bool = False) -> Iterator[None]:
        """Apply all changes of the block, or none of them."""
        how = "FULL" if self._synced or synced else "NORMAL"
        self._db.execute(f"PRAGMA synchronous={how}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def _read_namespaces(self) -> Iterator[tuple[bytes, Namespace]]:
        """Yield the stored namespaces that can be read, with their digests."""
        for (words,) in self._db.execute("SELECT described FROM spaces"):
            with contextlib.suppress(UsageError, TypeError, *DECODE_ERRORS):
                described = _DESCRIBED.decode(words)
                spec = KVSpec.from_pairs(described.pairs)
                namespace = Namespace(described.group, spec, described.tenant)
                yield namespace.digest, namespace
