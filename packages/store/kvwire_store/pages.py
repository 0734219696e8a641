"""A store of byte pages, for engines that have their own keys for cached content.

The offloading tiers of an engine move pages of one length between its memory and the
level below, from threads without an event loop. To the store, a page is a block of
bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire import Engine, KVSpec, PagedCache
from kvwire.config import Config
from kvwire.kv.blocks import DEFAULT_GROUP, BlockIds, among
from kvwire.kv.layout import AxisOrder
from kvwire.kv.tensors import check_array
from kvwire_store.request import StoreRequest
from kvwire_store.store import BlockStore, Write

logger: logging.Logger = logging.getLogger("kvwire.store")

# How many distinct reasons are logged for one engine.
_REASONS_MAX: Final = 100


class PageStore:
    """Keeps pages under keys; callable from any thread."""

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        write: Write = "through",
        name: str = "",
    ) -> None:
        self._name = name
        self._closed = False
        self._unsaved = Unsaved()
        self._engine, self._store = open_store("pages", tiers, write)

    def __repr__(self) -> str:
        return f"<PageStore {self._store!r}>"

    def pages(self, memory: Any) -> PagedCache:
        """View memory of shape (pages, ...) as pages."""
        array: npt.NDArray[Any] = np.asanyarray(memory)
        check_array(array, "pages")
        bytes_ = array.reshape(len(array), -1).view(np.uint8)
        spec = KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=bytes_.shape[1],
            block_tokens=1,
            dtype="uint8",
            components=1,
            fingerprint=self._name,
            kind="state",
        )
        return PagedCache(spec, [bytes_], AxisOrder("block dim"))

    def require_room(self, pages: PagedCache) -> None:
        """Refuse pages that do not fit every tier; see :class:`BlockStore`."""
        require_room(self._engine, self._store, pages)

    def present(self, keys: Sequence[bytes], pages: PagedCache) -> Future[list[bool]]:
        """Return a future: for each key, whether a page of this length is stored."""
        return self._engine.start(self._store.present(keys, pages))

    def put(
        self, keys: Sequence[bytes], pages: PagedCache, ids: BlockIds
    ) -> Future[list[bool]]:
        """Store pages.

        Returns a future: for each page, whether it was stored. Once the future is done,
        nothing reads the caller's memory any more.
        """
        put = self._store.put
        return self._engine.start(self._landed(put, keys, pages, ids))

    def get(
        self, keys: Sequence[bytes], pages: PagedCache, ids: BlockIds
    ) -> Future[list[bool]]:
        """Read pages into memory.

        Returns a future with, for each page, whether all of it was read. Once it is
        done, nothing writes to the caller's memory any more.
        """
        get = self._store.get
        return self._engine.start(self._landed(get, keys, pages, ids))

    def delete_all(self, pages: PagedCache) -> Future[int]:
        """Delete every page of this length in all tiers; the future has the count."""
        return self._engine.start(self._store.delete_all(pages))

    def close(self) -> None:
        """Close the store once running work has ended. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        self._engine.run(self._store.close())
        self._engine.close()

    async def _landed(
        self, move: Callable[..., StoreRequest], *what: Any
    ) -> list[bool]:
        request = move(*what)
        outcome = await request
        await request.drained()
        if move == self._store.put:
            self._unsaved.note(request)
        ids = outcome.lists[DEFAULT_GROUP]
        found: list[bool] = among(ids, outcome.landed.ids()).tolist()
        return found


class Unsaved:
    """Logs each reason for unsaved blocks once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, request: StoreRequest) -> None:
        """Log the reasons of a finished put that did not save all blocks."""
        outcome = request.outcome
        for reason in outcome.missing.reasons if outcome else ():
            if reason not in self._logged and len(self._logged) < _REASONS_MAX:
                self._logged.add(reason)
                logger.warning("blocks were not saved: %s", reason)


def open_store(
    name: str, tiers: Sequence[str], write: Write
) -> tuple[Engine, BlockStore]:
    """Open a store on a new engine, which is closed if opening fails."""

    async def opened() -> BlockStore:
        return await BlockStore.open(tiers, write=write)

    engine = Engine(Config(name=name))
    try:
        return engine, engine.run(opened())
    except BaseException:
        engine.close()
        raise


def require_room(engine: Engine, store: BlockStore, cache: PagedCache) -> None:
    """Raise UsageError if a cache's block does not fit a tier of the store."""

    async def check() -> None:
        store.require_room(cache)

    engine.run(check())
