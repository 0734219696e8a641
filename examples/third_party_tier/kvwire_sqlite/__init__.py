"""Blocks in one SQLite file: ``sqlite:/path/blocks.db``, for any number of processes.

It is an example of a tier in another distribution. This module only moves values;
heads, checksums, codecs, and recovery after a failure come from ``KeyValueTier``.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from kvwire_store.spi import (
    HEAD_BYTES,
    Batch,
    BlockResult,
    BlockResults,
    Head,
    Keys,
    KeyValueTier,
    TierAddress,
    packed,
)

T = TypeVar("T")


class SqliteTier(KeyValueTier):
    """Keeps each block as a row. Its address is ``sqlite:PATH?prefix=NAME``."""

    durable: bool = True
    asks: bool = True
    faults: ClassVar[tuple[type[Exception], ...]] = (OSError, sqlite3.Error)

    def __init__(self, address: TierAddress) -> None:
        address.require("prefix", "timeout", "codec")
        super().__init__(address)
        self._path = address.place

    @property
    def taking(self) -> bool:
        return not self.reason

    async def connect(self) -> None:
        """Create the table; the file is opened again for each call."""

        def make(rows: sqlite3.Connection) -> None:
            rows.execute("pragma journal_mode = wal")
            rows.execute(
                "create table if not exists kv (name text primary key, v blob)"
            )

        await asyncio.to_thread(self._with_rows, make)

    async def heads(self, keys: Keys) -> list[Head]:
        found = await self._rows_of(keys, f"substr(v, 1, {HEAD_BYTES})")
        if found is None:
            return [BlockResult.FAILED] * keys.size
        return [BlockResult.MISSING if raw is None else raw for raw in found]

    async def put(self, batch: Batch) -> BlockResults:
        values = await asyncio.to_thread(packed, batch)
        rows = list(zip(self._names(batch.keys), values, strict=True))
        insert = "insert or replace into kv values (?, ?)"
        done = await self._ask(lambda kv: kv.executemany(insert, rows).rowcount)
        result = BlockResult.FAILED if done is None else BlockResult.LANDED
        return np.full(batch.keys.size, result, np.uint8)

    async def get_into(self, batch: Batch) -> BlockResults:
        found = await self._rows_of(batch.keys, "v")
        if found is None:
            return np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        results = np.full(batch.keys.size, BlockResult.MISSING, np.uint8)
        which = np.array([at for at, raw in enumerate(found) if raw is not None], int)
        raws = [memoryview(raw) for raw in found if raw is not None]
        await self.unpack(batch, which, raws, results)
        return results

    async def remove(self, keys: Keys) -> npt.NDArray[np.bool_]:
        rows = [(name,) for name in self._names(keys)]
        delete = "delete from kv where name = ?"
        done = await self._ask(lambda kv: kv.executemany(delete, rows).rowcount)
        return np.full(keys.size, done is not None, np.bool_)

    async def remove_folder(self, folder: str) -> None:
        delete = "delete from kv where substr(name, 1, ?) = ?"
        rows = (len(folder), folder)
        if await self._ask(lambda kv: kv.execute(delete, rows).rowcount) is None:
            raise OSError(f"{self.name}: {self.error}")

    # --- SQLite -----------------------------------------------------------------------

    def _names(self, keys: Keys) -> list[str]:
        return list(map(self.value_name, keys.tolist()))

    async def _rows_of(self, keys: Keys, what: str) -> list[bytes | None] | None:
        """Return one value per key; None if the file cannot be read."""

        def look(kv: sqlite3.Connection) -> list[bytes | None]:
            select = f"select {what} from kv where name = ?"  # noqa: S608 - of this file
            found = (kv.execute(select, (name,)) for name in self._names(keys))
            return [next(rows, (None,))[0] for rows in found]

        return await self._ask(look)

    async def _ask(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run a function on the database, on a thread; None if that fails."""
        if self.reason:
            return None
        try:
            return await asyncio.to_thread(self._with_rows, work)
        except self.faults as exc:
            self.lost(exc)
            return None

    def _with_rows(self, work: Callable[[sqlite3.Connection], T]) -> T:
        opened = sqlite3.connect(self._path, timeout=self._timeout_s)
        with closing(opened), opened:
            return work(opened)
