"""The namespace of a block: the properties that identify it, besides its hash.

A hash names tokens. The tokens' KV also depends on the model, on the shard and the
layers that a cache holds, and on the cache group. A *namespace* is the digest of all
these, and a block's key consists of that digest and its hash. So one store can hold
blocks for several models, shards and groups without ever confusing them.

A block's bytes in the store are its *image*. The order of the bytes, which is an order
of the five axes, is not part of the namespace; it is kept beside each block. Copies are
fastest in a cache's own memory order, because the contiguous pieces are longest. So an
image has the memory order of the cache that it was put from, and a get into a cache
with another order converts it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Final

from kvwire.errors import UsageError
from kvwire.kv.paged import CacheGroup
from kvwire.kv.spec import KVSpec

ORDERS: Final = tuple(itertools.permutations(("layer", "kv", "token", "head", "dim")))
"""All orders of an image, outermost axis first. An order's position is its number,
which never changes, because it is stored on disk."""

ABSENT: Final = 255
"""Stands for an order: there is no such block."""

DIGEST_BYTES: Final = 16

UNKNOWN: Final = 254
"""Stands for an order: nobody has looked up the block."""

assert len(ORDERS) < UNKNOWN


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespace for one cache group of a model, on one shard.

    Attributes:
        group: The group's name.
        spec: The spec of a block; ``block_tokens`` is the number of tokens per hash.
        tenant: The tenant that owns the blocks; "" in a store without tenants.
        digest: 16 bytes, equal exactly if group, spec and tenant are equal.
        image_bytes: Bytes of one block.
    """

    group: str = field(compare=False)
    spec: KVSpec = field(compare=False)
    tenant: str = field(default="", compare=False)
    digest: bytes = field(init=False)
    image_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        named = sha256(repr((self.group, self.spec.to_pairs())).encode())
        digest = of_tenant(named.digest()[:DIGEST_BYTES], self.tenant)
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "image_bytes", self.spec.block_bytes)

    def differing(self, other: Namespace) -> tuple[str, ...]:
        """Return the fields in which two namespaces differ, ``group`` first."""
        here = dict(self.spec.to_pairs())
        there = dict(other.spec.to_pairs())
        fields = tuple(name for name in here if here[name] != there.get(name))
        return fields if self.group == other.group else ("group", *fields)


def of_tenant(digest: bytes, tenant: str) -> bytes:
    """Return the digest of a tenant's namespace, given the digest without a tenant."""
    if not tenant:
        return digest
    return sha256(digest + tenant.encode()).digest()[:DIGEST_BYTES]


def namespace_of(
    group: CacheGroup, hash_tokens: int | None, tenant: str = ""
) -> Namespace:
    """Return the namespace for the blocks of a cache group."""
    tokens = group.spec.block_tokens if hash_tokens is None else hash_tokens
    try:
        return _namespace(group.name, group.spec, tokens, tenant)
    except (UsageError, TypeError):
        raise UsageError(
            f"hash_tokens={hash_tokens!r}: pass the number of tokens that one hash "
            "covers"
        ) from None


# Each store call uses its caches' namespaces, of which there are few.
@lru_cache(256)
def _namespace(name: str, spec: KVSpec, block_tokens: int, tenant: str) -> Namespace:
    if block_tokens != spec.block_tokens:
        spec = replace(spec, block_tokens=block_tokens)
    return Namespace(name, spec, tenant)


@lru_cache(len(ORDERS) * 6)
def order_of(axes: tuple[str, ...]) -> int:
    """Return the image order that makes the longest pieces in a group's memory."""
    return ORDERS.index(tuple(axis for axis in axes if axis != "block"))
