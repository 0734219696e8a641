"""A store as L3 of SGLang's HiCache.

SGLang loads it by the path of this module: ``--hicache-storage-backend dynamic``, with
this as ``--hicache-storage-backend-extra-config``::

    {"backend_name": "kvwire", "module_path": "kvwire_engines.sglang",
     "class_name": "KvwireHiCacheStorage", "interface_v1": 1,
     "tiers": ["memory:1GiB", "kvwire://10.0.0.5:7500"]}

A page that was not stored, or only read in part, is reported as such, and SGLang
computes it again. SGLang calls from its own threads, and waits at most a tier's
``timeout``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire_store.pages import PageStore
from kvwire_store.weights import weights_name

with needed_by("KvwireHiCacheStorage", command="pip install sglang"):
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        PoolHitPolicy,
        PoolTransferResult,
    )

_ANCHOR = "kv"
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Pool:
    """A host memory pool's description, with the name that marks its pages."""

    host: Any  # SGLang's own pool
    named: str  # identifies a page's content, apart from tokens: model, ranks, layout
    nbytes: int  # bytes of a page

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the store's keys for page hashes."""
        return [
            hashlib.sha256(f"{self.named} {one}".encode()).digest() for one in hashes
        ]

    def offsets(self, hashes: Sequence[str], indices: Any) -> list[int] | None:
        """Return each page's offset; None if the indices do not fit the pages."""
        tokens = getattr(self.host, "page_size", 1) or 1
        if indices is None or indices.numel() != len(hashes) * tokens:
            return None
        offsets: list[int] = indices[::tokens].tolist()
        return offsets


class KvwireHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # it is not typed
    """Keeps SGLang's pages in a store; SGLang documents each method."""

    def __init__(self, storage_config: Any, arguments: Any = None) -> None:
        extra = storage_config.extra_config or {}
        if "tiers" not in extra:
            raise UsageError("extra_config: add \"tiers\", such as ['memory:1GiB']")
        self._config = storage_config
        self._weights = extra.get("fingerprint") or _weights(storage_config.model_name)
        self._pools: dict[str, _Pool] = {}
        model = f"sglang {storage_config.model_name}"
        self._store: PageStore | None = PageStore(
            extra["tiers"], write=extra.get("write", "through"), name=model
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, _ANCHOR)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return sum(takewhile(bool, self._present(_ANCHOR, keys)))

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> Any:
        (found,) = self.batch_get([key], [target_location])
        return found

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        memory, landed = self._get(self._pools[_ANCHOR], keys)
        found: list[Any] = []
        for target, page, here in zip(target_locations, memory, landed, strict=True):
            if here:
                target.view(torch.uint8).copy_(torch.from_numpy(page))
            found.append(target if here else None)
        return found

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(self._put(self._pools[_ANCHOR], keys, values))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._fill(_ANCHOR, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._keep(_ANCHOR, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._fill(str(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(
        self, transfers: list[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            one.name: self._keep(str(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Count the leading pages that are stored; refuse compressed blocks."""
        most = self.batch_exists(keys)
        hits = {_ANCHOR: most} if most else {}
        usable = range(1, most + 1)
        restorable = list(usable)
        for one in pool_transfers or []:
            here = self._present(str(one.name), keys[:most])
            if one.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = most
            elif one.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(one.keys or ()))
            else:
                raise UsageError(
                    f"{one.name}: {one.hit_policy} is not supported by kvwire"
                )
            fine = {end for end in usable if all(here[max(0, end - window) : end])}
            if fine:
                hits[one.name] = max(fine)
            restorable = [end for end in restorable if end in fine]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def clear(self) -> bool:
        """Delete this model's pages, also the ones that other engines stored."""
        assert self._store is not None
        for pool in self._pools.values():
            self._store.delete_all(_page(self._store, pool.nbytes)).result()
        return True

    def close(self) -> None:
        """Close the store once running work has ended. May be called repeatedly."""
        store = self._store
        self._store = None
        if store is not None:
            store.close()

    # --- inside -----------------------------------------------------------------------

    def _register(self, host: Any, name: str) -> None:
        page = host.get_dummy_flat_data_page()
        config = self._config
        ranks = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"]
        ranks += ["dcp_rank", "dcp_size", "logical_page_size"]
        # MLA's KV is the same on each rank, but a state beside it is not.
        if not config.is_mla_model or name == "mamba":
            ranks += ["tp_rank", "tp_size"]
        shard = {rank: getattr(config, rank) for rank in ranks}
        layout = getattr(host, "layout", ""), getattr(host, "page_size", 1), page.dtype
        named = f"{config.model_name} {self._weights} {name} {shard} {layout}"
        pool = _Pool(host, named, page.numel() * page.element_size())
        assert self._store is not None
        self._store.require_room(_page(self._store, pool.nbytes))
        self._pools[name] = pool

    def _present(self, name: str, hashes: Sequence[str]) -> list[bool]:
        if not hashes or (store := self._store) is None:
            return [False] * len(hashes)
        pool = self._pools[name]
        return store.present(pool.keys(hashes), _page(store, pool.nbytes)).result()

    def _fill(self, name: str, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Read pages into a pool; return for each one whether it is complete."""
        pool = self._pools[name]
        offsets = pool.offsets(hashes, indices)
        if offsets is None:
            return [False] * len(hashes)
        memory, landed = self._get(pool, hashes)
        dtype = pool.host.get_dummy_flat_data_page().dtype
        for offset, page, here in zip(offsets, memory, landed, strict=True):
            if here:
                flat = torch.from_numpy(page).view(dtype)
                pool.host.set_from_flat_data_page(offset, flat)
        return landed

    def _keep(self, name: str, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Store a pool's pages; return for each one whether it was stored."""
        pool = self._pools[name]
        offsets = pool.offsets(hashes, indices)
        if offsets is None:
            return [False] * len(hashes)
        return self._put(pool, hashes, map(pool.host.get_data_page, offsets))

    def _get(self, pool: _Pool, hashes: Sequence[str]) -> tuple[Bytes, list[bool]]:
        memory = np.empty((len(hashes), pool.nbytes), np.uint8)
        if not hashes or (store := self._store) is None:
            return memory, [False] * len(hashes)
        pages = store.pages(memory)
        return memory, store.get(pool.keys(hashes), pages, range(len(hashes))).result()

    def _put(self, pool: _Pool, hashes: Sequence[str], values: Any) -> list[bool]:
        if not hashes or (store := self._store) is None:
            return [False] * len(hashes)
        flat = [value.flatten().view(torch.uint8) for value in values]
        pages = store.pages(torch.stack(flat).numpy())
        return store.put(pool.keys(hashes), pages, range(len(hashes))).result()


def _weights(model: str) -> str:
    """Return a name for the weights of the model that SGLang serves as `model`."""
    try:
        return weights_name(model or "")
    except UsageError as exc:
        raise UsageError(
            f'extra_config: {exc}; set "fingerprint" to a text that names the weights, '
            f"the same on all engines that share KV"
        ) from None


def _page(store: PageStore, nbytes: int) -> Any:
    """Return a page for calls that need only its length."""
    return store.pages(np.empty((1, nbytes), np.uint8))
