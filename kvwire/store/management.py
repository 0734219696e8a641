"""Operations on stored blocks beside put and get: delete, pin, count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvwire.aio import AsyncWith, LoopThread, run_to_completion, yields_before_raising
from kvwire.errors import ClosedOK, UsageError, wrong_type
from kvwire.kv.blocks import Bits
from kvwire.kv.paged import PagedCache, computed_once
from kvwire.store.index import Keys
from kvwire.store.namespace import Namespace, namespace_of
from kvwire.store.operations.group_request import Hashes, by_group, keys_of
from kvwire.store.tier_stack import TierStack
from kvwire.store.tiers.base import TenantStats, uses_of

HashTokens = int | Mapping[str, int] | None


class StoreManagement(AsyncWith):
    """Delete, pin and count the blocks of a store. Subclassed by the store."""

    _name: str
    _tiers: TierStack
    _closed: bool
    _thread: LoopThread
    # What is under way here, and a close waits for.
    _calls: set[asyncio.Future[None]]

    @yields_before_raising
    async def delete(
        self,
        hashes: Hashes,
        cache: PagedCache,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> None:
        """Delete blocks from every tier; no get finds them, not even after a restart.

        It waits for running reads and writes of them.

        Args:
            hashes: See :meth:`put`.
            cache: A cache of the kind that the blocks are for.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Raises:
            UsageError: The hashes are invalid, or there is no such tenant.
            OSError: A tier still has some of them, or may have; the text has the
                reason.
            ClosedOK: The store is closed.

        Cancel safety: running work of the tiers is finished first, so no block is
            deleted that is put later; it may be called again.
        """
        self._check("BlockStore.delete", cache)
        namespaces = self._namespaces(cache, hash_tokens, tenant)
        listed = self._keys(hashes, namespaces)
        with self._under_way():
            for keys in listed.values():
                await run_to_completion(self._tiers.delete(keys))

    @yields_before_raising
    async def delete_all(
        self,
        cache: PagedCache | None = None,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> int:
        """Delete all blocks of a tenant, as :meth:`delete` does.

        Args:
            cache: Limits it to blocks for such a cache. Without it all that this store
                knows are deleted: those it had when it was opened, and those put or got
                since.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Returns:
            The number of blocks that were in memory and on disks. Other tiers delete
            theirs and do not count them.

        Raises:
            UsageError: There is no such tenant.
            OSError: A tier still has some of them, or may have; the text has the
                reason.
            ClosedOK: The store is closed.

        Cancel safety: running work of the tiers is finished first, so no block is
            deleted that is put later; it may be called again.
        """
        self._check("BlockStore.delete_all", cache, optional=True)
        self._tiers.tenants.require(tenant)
        known = [s for s in self._tiers.namespaces.values() if s.tenant == tenant]
        if cache is not None:
            known = list(self._namespaces(cache, hash_tokens, tenant).values())
        deleted = 0
        with self._under_way():
            for namespace in known:
                deleting = self._tiers.delete_namespace(namespace.digest)
                deleted += await run_to_completion(deleting)
        return deleted

    @yields_before_raising
    async def pin(
        self,
        hashes: Sequence[bytes],
        cache: PagedCache,
        *,
        hash_tokens: int | None = None,
        tenant: str = "",
    ) -> int:
        """Protect a chain's blocks from eviction, until :meth:`unpin`.

        They are pinned in each tier that has them: on a disk also across restarts, in
        memory until the close. A tenant may pin half of its quota, and all tenants
        together a quarter of a tier. Deleted, damaged and expired blocks go in spite of
        it.

        Args:
            hashes: See :meth:`put`; for a cache with one group.
            cache: A cache of the kind that the blocks are for.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Returns:
            The number of leading blocks that are pinned now.

        Raises:
            UsageError: The hashes are invalid, or there is no such tenant.
            ClosedOK: The store is closed.

        Cancel safety: safe, it may be called again.
        """
        self._check("BlockStore.pin", cache)
        namespaces = self._namespaces(cache, hash_tokens, tenant)
        (keys,) = self._keys(hashes, namespaces).values()
        with self._under_way():
            return leading(await self._tiers.pin(keys, pinned=True))

    @yields_before_raising
    async def unpin(
        self,
        hashes: Sequence[bytes],
        cache: PagedCache,
        *,
        hash_tokens: int | None = None,
        tenant: str = "",
    ) -> None:
        """Allow blocks to be evicted again; see :meth:`pin`.

        Args:
            hashes: See :meth:`pin`.
            cache: See :meth:`pin`.
            hash_tokens: See :meth:`pin`.
            tenant: See :meth:`pin`.

        Raises:
            UsageError: The hashes are invalid, or there is no such tenant.
            ClosedOK: The store is closed.

        Cancel safety: safe, it may be called again.
        """
        self._check("BlockStore.unpin", cache)
        namespaces = self._namespaces(cache, hash_tokens, tenant)
        (keys,) = self._keys(hashes, namespaces).values()
        with self._under_way():
            await self._tiers.pin(keys, pinned=False)

    def tenant_stats(self) -> dict[str, TenantStats]:
        """Return what each tenant has and does, by name; "" is for no tenant."""
        tiers = self._tiers
        if not len(tiers.tenants):
            return {}
        uses = {self._name: uses_of(tiers.memory.index)}
        uses |= {tier.name: tier.tenant_uses() for tier in tiers.below}
        return {
            tenant.name: TenantStats(
                counters=tiers.by_tenant[number],
                tiers={name: of[number] for name, of in uses.items() if of},
            )
            for number, tenant in enumerate(tiers.tenants.listed)
        }

    # --- for the store ----------------------------------------------------------------

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Let a close wait for the end of this block."""
        over = asyncio.get_running_loop().create_future()
        self._calls.add(over)
        try:
            yield
        finally:
            self._calls.remove(over)
            over.set_result(None)

    def _check(
        self, call: str, cache: PagedCache | None, *, optional: bool = False
    ) -> None:
        """Refuse a call from another thread, on a closed store, or without a cache."""
        self._thread.check(call)
        if self._closed:
            raise ClosedOK("the store is closed")
        if not (isinstance(cache, PagedCache) or (optional and cache is None)):
            raise wrong_type("cache", cache, "a kvwire.PagedCache")

    def _namespaces(
        self, cache: PagedCache, hash_tokens: HashTokens, tenant: str
    ) -> dict[str, Namespace]:
        """Return the namespace of each group of a cache."""
        if tenant:
            self._tiers.tenants.require(tenant)
        groups = cache.groups
        lossy = self._tiers.lossy
        if hash_tokens is None:
            return computed_once(
                cache,
                ("namespaces", tenant, lossy),
                lambda: {
                    name: namespace_of(group, None, tenant, lossy)
                    for name, group in groups.items()
                },
            )
        tokens: Mapping[str, int | None]
        if isinstance(hash_tokens, Mapping):
            tokens = hash_tokens
        else:
            tokens = dict.fromkeys(groups, hash_tokens)
        if tokens.keys() - groups.keys():
            raise UsageError(f"hash_tokens: the groups are {', '.join(groups)}")
        return {
            name: namespace_of(group, tokens.get(name), tenant, lossy)
            for name, group in groups.items()
        }

    def _known_namespaces(self, hashes: Hashes, tenant: str) -> dict[str, Namespace]:
        """Return the known namespaces for hashes without a cache."""
        if tenant:
            self._tiers.tenants.require(tenant)
        found: dict[str, Namespace] = {}
        for namespace in self._tiers.namespaces.values():
            group = namespace.group
            if namespace.tenant != tenant:
                continue
            if isinstance(hashes, Mapping) and group not in hashes:
                continue
            if group in found:
                fields = ", ".join(found[group].differing(namespace))
                raise UsageError(
                    f"match: this store has blocks of group {group!r} for caches that "
                    f"differ in {fields}; pass cache="
                )
            found[group] = namespace
        return found

    def _keys(
        self, hashes: Hashes, namespaces: Mapping[str, Namespace]
    ) -> dict[str, Keys]:
        """Return the keys of some hashes, by group."""
        listed = by_group(hashes, tuple(namespaces))
        return {name: keys_of(some, namespaces[name]) for name, some in listed.items()}


def leading(there: Bits) -> int:
    """Return how many leading blocks are there."""
    return there.size if there.all() else int(there.argmin())
