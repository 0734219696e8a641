"""Operations on stored blocks besides put and get: delete, verbs, statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvwire.aio import (
    AsyncWith,
    LoopThread,
    run_to_completion,
    yields_before_raising,
)
from kvwire.errors import ClosedOK, UsageError, wrong_type
from kvwire.kv.paged import PagedCache, computed_once
from kvwire_store.keys import Keys
from kvwire_store.namespace import Namespace, namespace_of
from kvwire_store.operations.group_request import Hashes, by_group, keys_of
from kvwire_store.operations.verbs import carry_out
from kvwire_store.placement import Placement, Verb, VerbKind, joined
from kvwire_store.tier_stack import TierStack
from kvwire_store.tiers.base import TenantStats, uses_of

HashTokens = int | Mapping[str, int] | None


class StoreManagement(AsyncWith):
    """Methods that delete, prefetch, pin and count blocks; the store inherits them."""

    _name: str
    _tiers: TierStack
    _closed: bool
    _thread: LoopThread
    # The running operations; a close waits for them.
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

        It waits until running reads and writes of these blocks have ended.

        Args:
            hashes: See :meth:`put`.
            cache: A cache of the kind that the blocks belong to.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Raises:
            UsageError: The hashes are invalid, or there is no such tenant.
            OSError: A tier still has some of the blocks, or may have; the text gives
                the reason.
            ClosedOK: The store is closed.

        Cancel safety: the tiers first finish their running work, so that no block put
        later is deleted; it may be called again.
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
            cache: Delete only blocks for such a cache. By default all blocks known to
                this store are deleted: those it had when it was opened, and those put
                or got since.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Returns:
            The number of blocks deleted from memory and disks. Other tiers delete their
            blocks without counting them.

        Raises:
            UsageError: There is no such tenant.
            OSError, ClosedOK: As for :meth:`delete`.

        Cancel safety: as for that method.
        """
        self._check("BlockStore.delete_all", cache, optional=True)
        known = self._tiers.of_tenant(tenant)
        if cache is not None:
            known = list(self._namespaces(cache, hash_tokens, tenant).values())
        deleted = 0
        with self._under_way():
            for namespace in known:
                deleting = self._tiers.delete_namespace(namespace.digest)
                deleted += await run_to_completion(deleting)
        return deleted

    @yields_before_raising
    async def prefetch(
        self,
        hashes: Hashes,
        cache: PagedCache | None = None,
        *,
        tier: str = "memory",
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> Placement:
        """Copy blocks into a higher tier before a get needs them.

        A block that is already there, or is being read or written, costs nothing.
        Blocks are copied from the head of the chain on, up to the number that the
        tenant may move at once.

        Args:
            hashes: See :meth:`put`.
            cache: A cache of the kind that the blocks belong to. By default, the blocks
                of all caches that this store knows, such as all shards of a model; then
                each hash gets the worst of their states.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.
            tier: The tier's address, or its kind if there is only one tier of that
                kind. A store server copies the blocks into its own memory.

        Returns:
            The result of each block.

        Raises:
            UsageError: The hashes are invalid, or there is no such tenant or tier.
            ClosedOK: The store is closed.

        Cancel safety: running reads and writes finish first; no block is lost.
        """
        return await self._carry_out(
            "BlockStore.prefetch",
            Verb(VerbKind.PREFETCH, tier),
            hashes,
            cache,
            hash_tokens,
            tenant,
        )

    @yields_before_raising
    async def pin(
        self,
        hashes: Hashes,
        cache: PagedCache | None = None,
        *,
        ttl_s: float | None = None,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> Placement:
        """Protect blocks from eviction, for a time or until :meth:`unpin`.

        The blocks are pinned in each tier that has them: on a disk also across
        restarts, in memory until the store closes. A tenant may pin half of its quota,
        or its even share of a quarter of a tier, if that is less. The limit is used up
        from the head of the chain on; blocks beyond it are *clipped*. A pin does not
        protect a block from being deleted, from expiring, or from removal after damage.

        Args:
            hashes: See :meth:`put`.
            cache: See :meth:`prefetch`.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.
            ttl_s: Seconds after which the pin ends by itself; None for never. If a
                block is pinned several times, the latest end counts.

        Returns:
            The result of each block.

        Raises:
            UsageError: The hashes or ``ttl_s`` are invalid, or there is no such tenant.
            ClosedOK: The store is closed.

        Cancel safety: safe, it may be called again.
        """
        return await self._carry_out(
            "BlockStore.pin", Verb.pin(ttl_s), hashes, cache, hash_tokens, tenant
        )

    @yields_before_raising
    async def unpin(
        self,
        hashes: Hashes,
        cache: PagedCache | None = None,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> Placement:
        """Allow blocks to be evicted again; ends all pins. See :meth:`pin`.

        Args:
            hashes: See :meth:`put`.
            cache: See :meth:`prefetch`.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Returns:
            The result of each block.

        Raises:
            UsageError: The hashes are invalid, or there is no such tenant.
            ClosedOK: The store is closed.

        Cancel safety: safe, it may be called again.
        """
        return await self._carry_out(
            "BlockStore.unpin", Verb(VerbKind.UNPIN), hashes, cache, hash_tokens, tenant
        )

    def tenant_stats(self) -> dict[str, TenantStats]:
        """Return each tenant's blocks and counts, by name; "" is for no tenant."""
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

    async def _carry_out(
        self,
        call: str,
        verb: Verb,
        hashes: Hashes,
        cache: PagedCache | None,
        hash_tokens: HashTokens,
        tenant: str,
    ) -> Placement:
        """Execute a verb on the blocks of each group."""
        self._check(call, cache, optional=True)
        namespaces: dict[str, list[Namespace]] = {}
        if cache is not None:
            for name, one in self._namespaces(cache, hash_tokens, tenant).items():
                namespaces[name] = [one]
        else:
            for one in self._tiers.of_tenant(tenant):
                namespaces.setdefault(one.group, []).append(one)
        groups = tuple(namespaces) or ("",)
        parts: dict[str, Placement] = {}
        with self._under_way():
            for name, listed in by_group(hashes, groups).items():
                known = namespaces.get(name, [])
                parts[name] = await carry_out(self._tiers, verb, known, listed)
        return joined(parts)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Make a close wait for the end of this block."""
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
        if type(tenant) is not str or tenant:
            self._tiers.tenants.require(tenant)
        groups = cache.groups
        if hash_tokens is None:
            return computed_once(
                cache,
                ("namespaces", tenant),
                lambda: {
                    name: namespace_of(group, None, tenant)
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
            name: namespace_of(group, tokens.get(name), tenant)
            for name, group in groups.items()
        }

    def _known_namespaces(self, hashes: Hashes, tenant: str) -> dict[str, Namespace]:
        """Return the known namespaces for hashes without a cache."""
        if type(tenant) is not str or tenant:
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
                    f"match: this store has blocks of group {group!r} from caches "
                    f"with different {fields}; pass cache= to choose"
                )
            found[group] = namespace
        return found

    def _keys(
        self, hashes: Hashes, namespaces: Mapping[str, Namespace]
    ) -> dict[str, Keys]:
        """Return the keys of some hashes, by group."""
        listed = by_group(hashes, tuple(namespaces))
        return {name: keys_of(some, namespaces[name]) for name, some in listed.items()}
