"""The kinds of tiers below memory, by the scheme of their addresses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Final

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.extras import PlugInError, plug_in
from kvwire_store.address import TierAddress
from kvwire_store.codecs import planes
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.base import Tier
from kvwire_store.tiers.coded import REDIS, is_coded
from kvwire_store.tiers.disk import DiskTier
from kvwire_store.tiers.object import ObjectTier
from kvwire_store.tiers.remote import RemoteTier
from kvwire_store.tiers.sharded import ShardedTier

ELSEWHERE: Final = frozenset({"kvwire", "object", *REDIS})
"""Kinds that may be the only tier, because other processes have their blocks too."""
GROUP: Final = "kvwire_store.tiers"
"""The entry-point group for kinds from other distributions; names are schemes."""
PASSAGE: Final = "memory:256MiB?keep=no"
"""The memory that blocks pass through if there is no memory tier: a few batches."""


async def _open_kvwire(address: TierAddress) -> Tier:
    """Open one server by its address, or many by a selector."""
    if "=" in address.place or "directory" in address.options:
        return await ShardedTier.open(address)
    return await RemoteTier.open(address)


async def _open_redis(address: TierAddress) -> Tier:
    from kvwire_store.tiers.redis import RedisTier  # noqa: PLC0415 - an extra

    return await RedisTier.open(address)


# Kinds whose blocks another program keeps: that program limits tenants, not this store.
_KINDS: Final[dict[str, Callable[[TierAddress], Awaitable[Tier]]]] = {
    "kvwire": _open_kvwire,
    "object": ObjectTier.open,
    **dict.fromkeys(REDIS, _open_redis),
}


async def open_tier(address: TierAddress, tenants: Tenants) -> Tier:
    """Open one tier, with the tenants that share it.

    Cancel safety: nothing stays open.
    """
    try:
        return await _open(address, tenants)
    except ModuleNotFoundError as exc:
        raise BackendUnavailable(f"tier {address.text!r}: {exc}") from exc


async def _open(address: TierAddress, tenants: Tenants) -> Tier:
    if is_coded(address):
        planes.require()
    if address.scheme == "disk":
        return await DiskTier.open(address, tenants)
    if address.scheme in _KINDS:
        return await _KINDS[address.scheme](address)
    scheme = address.scheme
    try:
        cls = plug_in(GROUP, scheme, Tier)
    except PlugInError as exc:
        raise BackendUnavailable(f"tier {address.text!r}{exc}") from exc
    if cls is None:
        others = sorted(set(metadata.entry_points(group=GROUP).names))
        known = ", ".join(("memory", "disk", *_KINDS, *others))
        raise UsageError(
            f"tier {address.text!r}: unknown kind {scheme!r}; the kinds are {known}"
        )
    tier: Tier = await cls.open(address)
    return tier
