"""Pages of bytes in a store, for engines that have their own names for what is in them.

Offloading tiers of engines move pages of one length between their memory and whatever
is below it, from threads without an event loop. To a store a page is a block of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire import BlockStore, Communicator, Engine, KVSpec, PagedCache, StoreRequest
from kvwire.config import Config
from kvwire.kv.blocks import DEFAULT_GROUP, BlockIds, among
from kvwire.kv.layout import AxisOrder
from kvwire.kv.tensors import check_array
from kvwire.store.store import Write


class PageStore:
    """Keeps pages under keys; from any thread."""

    def __init__(
        self, tiers: Sequence[str], *, write: Write = "through", name: str = ""
    ) -> None:
        self._name = name
        self._closed = False
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

    def present(self, keys: Sequence[bytes], pages: PagedCache) -> Future[list[bool]]:
        """Tell which pages are here, of the length of these."""
        return self._engine.start(lambda _: self._store.present(keys, pages))

    def put(
        self, keys: Sequence[bytes], pages: PagedCache, ids: BlockIds
    ) -> Future[list[bool]]:
        """Keep pages; tells which are kept when nothing reads the caller's any more."""
        return self._engine.start(lambda _: _landed(self._store.put, keys, pages, ids))

    def get(
        self, keys: Sequence[bytes], pages: PagedCache, ids: BlockIds
    ) -> Future[list[bool]]:
        """Fill pages; tells which are whole when nothing writes to them any more."""
        return self._engine.start(lambda _: _landed(self._store.get, keys, pages, ids))

    def delete_all(self, pages: PagedCache) -> Future[None]:
        """Forget every page of the length of these, in all tiers."""
        return self._engine.start(lambda _: self._store.delete_all(pages))

    def close(self) -> None:
        """End the store, once what was begun is over. Any number of times."""
        if self._closed:
            return
        self._closed = True
        self._engine.start(lambda _: self._store.close()).result()
        self._engine.close()


def open_store(
    name: str, tiers: Sequence[str], write: Write
) -> tuple[Engine, BlockStore]:
    """Open a store on an engine of its own, which is closed if that fails."""

    async def opened(_: Communicator) -> BlockStore:
        return await BlockStore.open(tiers, write=write)

    engine = Engine(Config(name=name))
    try:
        return engine, engine.start(opened).result()
    except BaseException:
        engine.close()
        raise


async def _landed(move: Callable[..., StoreRequest], *what: Any) -> list[bool]:
    request = move(*what)
    outcome = await request
    await request.drained()
    ids = outcome.lists[DEFAULT_GROUP]
    found: list[bool] = among(ids, outcome.landed.ids()).tolist()
    return found
