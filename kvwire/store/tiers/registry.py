"""The kinds of tiers there are below memory, by how their addresses begin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvwire.errors import UsageError
from kvwire.kv.codecs.base import BlockCodec
from kvwire.kv.codecs.registry import codec_named
from kvwire.store.address import TierAddress
from kvwire.store.tenants import Tenants
from kvwire.store.tiers.base import Tier
from kvwire.store.tiers.coded import CodedTier
from kvwire.store.tiers.disk import DiskTier
from kvwire.store.tiers.object import ObjectTier
from kvwire.store.tiers.remote import RemoteTier
from kvwire.store.tiers.sharded import ShardedTier

REDIS: Final = ("redis", "rediss", "valkey", "valkeys")
ELSEWHERE: Final = frozenset({"kvwire", "object", "mooncake", *REDIS})
"""Kinds that may be the only tier: others have the blocks as well."""
PASSAGE: Final = "memory:256MiB"
"""What blocks pass through where there is no memory tier: a few batches each way."""

_KINDS: Final[dict[str, Callable[[TierAddress, Tenants], Awaitable[Tier]]]] = {
    "disk": DiskTier.open,
    # Those that keep blocks elsewhere bound nobody: who is there does.
    "kvwire": lambda address, _: _servers(address).open(address),
    "object": lambda address, _: ObjectTier.open(address),
    "mooncake": lambda address, _: _open_mooncake(address),
    **dict.fromkeys(REDIS, lambda address, _: _open_redis(address)),
}


_CODED: Final[Mapping[str, bool]] = {"disk": True, "object": False}
"""Kinds that keep entries of codecs, and whether in slots."""
_NOT_CODED: Final[Mapping[str, str]] = {
    "memory": "blocks are copied to caches from here; put coded ones into a tier below "
    "it, which may be in memory: disk:/dev/shm/DIRECTORY?size=SIZE&codec=NAME",
    "kvwire": "the server's own tiers may have one: kvwire store serve",
    **dict.fromkeys(
        (*REDIS, "mooncake"), "values are images; put coded ones into disk or object"
    ),
}


def _servers(address: TierAddress) -> type[RemoteTier | ShardedTier]:
    """Return what a place names: one server by its address, or many by a selector."""
    by_selector = "=" in address.place or "directory" in address.options
    return ShardedTier if by_selector else RemoteTier


async def _open_redis(address: TierAddress) -> Tier:
    from kvwire.store.tiers.redis import RedisTier  # noqa: PLC0415 - an extra

    return await RedisTier.open(address)


async def _open_mooncake(address: TierAddress) -> Tier:
    from kvwire.store.tiers.mooncake import MooncakeTier  # noqa: PLC0415 - an extra

    return await MooncakeTier.open(address)


async def open_tier(address: TierAddress, tenants: Tenants) -> Tier:
    """Open one tier, which tenants share.

    Cancel safety: nothing stays open.
    """
    codec = codec_of(address)
    if codec is not None:
        codec.require()
    kind = _KINDS.get(address.scheme)
    if kind is None:
        known = ", ".join(("memory", *_KINDS))
        raise UsageError(
            f"tier {address.text!r}: no kind {address.scheme!r}; there is {known}"
        )
    options = {k: v for k, v in address.options.items() if k != "codec"}
    tier = await kind(replace(address, options=options), tenants)
    if address.scheme not in _CODED:
        return tier
    return CodedTier(tier, codec, slotted=_CODED[address.scheme])


def codec_of(address: TierAddress) -> BlockCodec | None:
    """Return the codec that blocks are put with; None for none."""
    name = address.options.get("codec")
    if name is None:
        return None
    if address.scheme in _NOT_CODED:
        raise UsageError(
            f"tier {address.text!r}: no codec here; {_NOT_CODED[address.scheme]}"
        )
    try:
        return codec_named(name)
    except UsageError as exc:
        raise UsageError(f"tier {address.text!r}: {exc}") from None


def require_one_loss(addresses: Sequence[TierAddress]) -> None:
    """Refuse a store some of whose tiers lose bits, or in different ways.

    Blocks go from one tier to another, so what one has lost the others would have as
    if it were exact.
    """
    codecs = {address.text: codec_of(address) for address in addresses}
    lossy = {
        text: codec.name if codec is not None and codec.lossy else ""
        for text, codec in codecs.items()
    }
    if len(set(lossy.values())) > 1:
        listed = ", ".join(f"{t} has {n or 'none'}" for t, n in lossy.items())
        raise UsageError(
            f"tiers: blocks go from one to another, so all below memory need the same "
            f"codec where one loses bits; {listed}"
        )
