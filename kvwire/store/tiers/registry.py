"""The kinds of tiers there are below memory, by how their addresses begin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from kvwire.errors import UsageError
from kvwire.store.address import TierAddress
from kvwire.store.tenants import Tenants
from kvwire.store.tiers.base import Tier
from kvwire.store.tiers.disk import DiskTier
from kvwire.store.tiers.object import ObjectTier
from kvwire.store.tiers.remote import RemoteTier

ELSEWHERE: Final = frozenset({"kvwire", "object"})
"""Kinds that may be the only tier: others have the blocks as well."""
PASSAGE: Final = "memory:256MiB"
"""What blocks pass through where there is no memory tier: a few batches each way."""

_KINDS: Final[dict[str, Callable[[TierAddress, Tenants], Awaitable[Tier]]]] = {
    "disk": DiskTier.open,
    # Those that keep blocks elsewhere bound nobody: who is there does.
    "kvwire": lambda address, _: RemoteTier.open(address),
    "object": lambda address, _: ObjectTier.open(address),
}


async def open_tier(address: TierAddress, tenants: Tenants) -> Tier:
    """Open one tier, which tenants share.

    Raises:
        UsageError: There is no such kind, or the tier cannot be opened, and why.

    Cancel safety: nothing stays open.
    """
    kind = _KINDS.get(address.scheme)
    if kind is None:
        known = ", ".join(("memory", *_KINDS))
        raise UsageError(
            f"tier {address.text!r}: no kind {address.scheme!r}; there is {known}"
        )
    return await kind(address, tenants)
