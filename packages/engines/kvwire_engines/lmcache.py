"""A store as the L2 cache of LMCache.

LMCache loads it by the path of this module::

    {"type": "plugin", "module_path": "kvwire_engines.lmcache",
     "class_name": "KvwireL2Adapter",
     "adapter_params": {"tiers": ["memory:1GiB", "kvwire://10.0.0.5:7500"]}}

A failed store is reported as a failure, and an object that was not stored is never
found. Nothing is locked: an object evicted between lookup and load is a 0 in the load's
bitmap, and LMCache computes it again.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from kvwire.config import checked_values
from kvwire.errors import UsageError, nearest
from kvwire.extras import needed_by
from kvwire.kv.paged import PagedCache
from kvwire_store.pages import PageStore
from kvwire_store.store import Write
from kvwire_store.weights import weights_name

with needed_by("KvwireL2Adapter", command="pip install lmcache"):
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

logger: logging.Logger = logging.getLogger("kvwire.store")


class KvwireL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # it is not typed
    """Keeps LMCache's objects in a store; LMCache documents each method."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        chosen = _chosen(params)
        self._weights = _Weights(chosen.fingerprint)
        self._store = PageStore(chosen.tiers, write=chosen.write, name=chosen.name)
        self._stored, self._found, self._loaded = (
            create_event_notifier() for _ in range(3)
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stores: dict[int, Any] = {}
        self._bitmaps: dict[int, Any] = {}

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._found.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        sizes = [int(one.get_size()) for one in objects]
        puts = [
            self._store.put([name], self._page(one), [0]) if name else _not_there()
            for name, one in zip(map(self._name, keys), objects, strict=True)
        ]

        def stored(kept: list[bool]) -> None:
            # After this report the objects belong to LMCache again. Its listeners may
            # raise, so they are called last.
            there = list(itertools.compress(sizes, kept))
            with self._lock:
                self._stores[number] = L2StoreResult(all(kept), sum(there))
            self._stored.notify()
            objects.clear()
            self._notify_keys_stored(list(itertools.compress(keys, kept)), there)

        objects = list(objects)  # kept until nothing reads them
        _when_all(puts, stored)
        return number

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            over = self._stores
            self._stores = {}
        return over

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look up objects in the store by key and length."""
        number = next(self._numbers)
        asked = []
        for key in keys:
            layout = group_layout_descs[key.object_group_id]
            nbytes = sum(
                math.prod(shape) * dtype.itemsize
                for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
            )
            page = self._store.pages(np.empty((1, nbytes), np.uint8))
            name = self._name(key)
            asked.append(self._store.present([name], page) if name else _not_there())
        _when_all(asked, lambda here: self._complete(number, here, self._found))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._bitmaps.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: lookups take no locks."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        gets = [
            self._store.get([name], self._page(one), [0]) if name else _not_there()
            for name, one in zip(map(self._name, keys), objects, strict=True)
        ]

        def loaded(here: list[bool]) -> None:
            self._complete(number, here, self._loaded)
            objects.clear()
            self._notify_keys_accessed(list(itertools.compress(keys, here)))

        objects = list(objects)  # kept until nothing writes to them
        _when_all(gets, loaded)
        return number

    def query_load_result(self, task_id: int) -> Any:
        return self.query_lookup_and_lock_result(task_id)

    def close(self) -> None:
        """Finish running work, then close the store and the notifiers."""
        self._store.close()
        for notifier in (self._stored, self._found, self._loaded):
            notifier.close()

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": type(self).__name__, "store": repr(self)}

    def _name(self, key: Any) -> bytes:
        """Return the store's key for an object; b"" if its weights have no name."""
        weights = self._weights.name(key.model_name)
        named = (key.model_name, weights, key.kv_rank, key.object_group_id)
        text = repr((*named, key.cache_salt)).encode()
        return hashlib.sha256(text + bytes(key.chunk_hash)).digest() if weights else b""

    def _page(self, one: Any) -> PagedCache:
        memory = (ctypes.c_char * int(one.get_size())).from_address(int(one.data_ptr))
        return self._store.pages(np.frombuffer(memoryview(memory), np.uint8)[None])

    def _complete(self, number: int, here: list[bool], notifier: Any) -> None:
        bitmap = Bitmap(len(here))
        for index in np.flatnonzero(here).tolist():
            bitmap.set(index)
        with self._lock:
            self._bitmaps[number] = bitmap
        notifier.notify()


class _Params(msgspec.Struct, frozen=True):
    tiers: list[str]
    write: Write = "through"
    name: str = ""
    fingerprint: str = ""


def _chosen(params: Mapping[str, Any]) -> _Params:
    """Read ``adapter_params``."""
    known = _Params.__struct_fields__
    for name in params.keys() - set(known):
        hint = nearest(name, known)
        raise UsageError(f"adapter_params: unknown key {name!r}; {hint}")
    return checked_values(params, _Params, {}, "adapter_params")


class _Weights:
    """Names the weights of models; LMCache sends a model's name with each object."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._known: dict[str, str] = {}

    def name(self, model: str) -> str:
        """Return the name for a model's weights; "" if there is none, logged once."""
        if model not in self._known:
            # bounded by the models of one server
            self._known[model] = self._fingerprint or self._of_files(model)
        return self._known[model]

    def _of_files(self, model: str) -> str:
        try:
            return weights_name(model)
        except UsageError as exc:
            logger.error(
                "KV of this model is not stored: adapter_params: %s; set "
                '"fingerprint" to a text that names the weights, the same in all '
                "processes that share KV",
                exc,
            )
            return ""


def _not_there() -> Future[list[bool]]:
    """Return the result "not stored", for an object whose weights have no name."""
    over: Future[list[bool]] = Future()
    over.set_result([False])
    return over


def _when_all(
    ends: Sequence[Future[list[bool]]], then: Callable[[list[bool]], None]
) -> None:
    """Call `then` once all futures are done; a failed one counts as not stored."""
    lock = threading.Lock()
    left = [len(ends)]

    def ended(_: object) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        then([end.exception() is None and end.result()[0] for end in ends])

    if not ends:
        then([])
    for end in ends:
        end.add_done_callback(ended)
