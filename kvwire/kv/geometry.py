"""The descriptions of cache and block lists that two sides exchange before a transfer.

Both sides compute the canonical order from the two descriptions. So a description
contains everything that the order depends on, but neither addresses nor block ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

import msgspec
import numpy as np

from kvwire import limits
from kvwire.errors import UsageError
from kvwire.kv.blocks import BlockSet, Ids
from kvwire.kv.layout import AXES
from kvwire.kv.paged import PagedCache, computed_once
from kvwire.kv.spec import KVSpec
from kvwire.types import whole

Tokens: TypeAlias = "int | Mapping[str, int] | None"
"""Valid tokens in the block lists: of all groups, {group: tokens}, or None.

None means that every block is full.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGeometry:
    """One side's part of a transfer in one cache group."""

    name: str
    spec: KVSpec
    order: tuple[str, ...]
    blocks: int
    tokens: int | None = None

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if sorted(self.order) != sorted(AXES):
            raise UsageError(f"{where}: order {self.order!r} is not one of {AXES}")
        if not 0 <= self.blocks <= limits.KV_BLOCKS_MAX:
            raise UsageError(
                f"{where}: {self.blocks} blocks; 0 to {limits.KV_BLOCKS_MAX} are "
                "allowed"
            )
        if self.tokens is None:
            return
        needed = -(-self.tokens // self.spec.block_tokens)
        if self.tokens < 0 or needed != self.blocks:
            raise UsageError(
                f"{where}: tokens={self.tokens} is {needed} blocks of "
                f"{self.spec.block_tokens} tokens, but the list has {self.blocks}"
            )

    @property
    def capacity(self) -> int:
        """Return the number of valid tokens: by default, as many as the blocks hold."""
        if self.tokens is not None:
            return self.tokens
        return self.blocks * self.spec.block_tokens


@dataclass(frozen=True)
class Geometry:
    """One side's part of a transfer, for all groups.

    Equal descriptions are the same object, even if they were made or decoded
    repeatedly, so that values derived from them are computed once.
    """

    groups: tuple[GroupGeometry, ...]

    @cached_property
    def encoded(self) -> tuple[object, ...]:
        """Return the description as nested tuples of texts and numbers."""
        return tuple(
            (g.name, g.spec.to_pairs(), " ".join(g.order), g.blocks, g.tokens)
            for g in self.groups
        )

    @cached_property
    def packed(self) -> msgspec.Raw:
        """Return the description as MessagePack."""
        return msgspec.Raw(msgspec.msgpack.encode(self.encoded))

    @cached_property
    def capacities(self) -> Mapping[str, int]:
        """Return the number of valid tokens of each group."""
        return {group.name: group.capacity for group in self.groups}

    @cached_property
    def no_blocks(self) -> BlockSet:
        """Return none of the blocks of each group."""
        return BlockSet({group.name: np.empty(0, np.int64) for group in self.groups})

    @classmethod
    def decode(cls, fields: object) -> Geometry:
        """Read a description that a peer made with :attr:`encoded`.

        Raises:
            UsageError: It is malformed, or a value is out of range.
        """
        if not isinstance(fields, tuple | list):
            raise UsageError("geometry: not a list of groups")
        if not 1 <= len(fields) <= limits.KV_GROUPS_MAX:
            raise UsageError(
                f"geometry: {len(fields)} groups; 1 to {limits.KV_GROUPS_MAX} are "
                "allowed"
            )
        return cls(tuple(_decode_group(group) for group in fields))


def describe(
    cache: PagedCache, lists: Mapping[str, Ids], tokens: Tokens = None
) -> Geometry:
    """Describe this side's part of a transfer."""
    if tokens is not None and type(tokens) is not int:
        tokens = checked_tokens(tokens, cache)
    key = tuple(tokens.items()) if isinstance(tokens, Mapping) else tokens
    sizes = tuple(map(len, map(lists.__getitem__, cache.groups)))

    def compute() -> Geometry:
        groups = zip(cache.groups.items(), sizes, strict=True)
        return Geometry(
            tuple(
                GroupGeometry(
                    name=name,
                    spec=group.spec,
                    order=group.order,
                    blocks=blocks,
                    tokens=tokens.get(name) if isinstance(tokens, Mapping) else tokens,
                )
                for (name, group), blocks in groups
            )
        )

    return computed_once(cache, ("described", sizes, key), compute)


def checked_tokens(
    tokens: int | Mapping[str, int], cache: PagedCache
) -> int | dict[str, int]:
    """Return ``tokens`` as plain integers: 4, 4.0 and NumPy's 4 become the same key.

    Raises:
        UsageError: A value is not a whole number, or a group is unknown.
    """
    if type(tokens) is int:
        return tokens
    if not isinstance(tokens, Mapping):
        return _checked_count(tokens, next(iter(cache.groups)))
    unknown = sorted(map(str, tokens.keys() - cache.groups.keys()))
    if unknown:
        raise UsageError(
            f"tokens: unknown group {', '.join(unknown)}; the groups are "
            f"{', '.join(cache.groups)}"
        )
    given: Mapping[str, int | None] = tokens
    return {
        name: _checked_count(count, name)
        for name, count in given.items()
        if count is not None
    }


def _checked_count(tokens: object, group: str) -> int:
    count = whole(tokens)
    if count is None:
        raise UsageError(f"group {group!r}: tokens={tokens!r}: pass a number of tokens")
    return count


# Few models have more groups, and a peer's descriptions of many groups take a hundred
# times the memory.
_FEW_GROUPS: Final = 4
_LARGE_MAX: Final = 64


def geometry_of(fields: tuple[object, ...]) -> Geometry:
    """Return the cached result of :meth:`Geometry.decode`."""
    return _small(fields) if len(fields) <= _FEW_GROUPS else _large(fields)


_small = lru_cache(limits.KV_TEMPLATES_MAX)(Geometry.decode)
_large = lru_cache(_LARGE_MAX)(Geometry.decode)


_spec_of = lru_cache(_LARGE_MAX)(KVSpec.from_pairs)


def _decode_group(fields: object) -> GroupGeometry:
    if not isinstance(fields, tuple | list) or len(fields) < 5:
        raise UsageError(
            "geometry: a group must be (name, spec, order, blocks, tokens)"
        )
    name, pairs, order, blocks, tokens = fields[:5]
    if not isinstance(name, str) or not 1 <= len(name) <= limits.NAME_CHARS_MAX:
        raise UsageError("geometry: a group's name is not a short string")
    if not isinstance(order, str) or len(order) > limits.NAME_CHARS_MAX:
        raise UsageError(f"geometry: the order of group {name!r} is not a short string")
    if type(blocks) is not int or type(tokens) not in (int, type(None)):
        raise UsageError(f"geometry: the counts of group {name!r} are not numbers")
    return GroupGeometry(
        name=name,
        spec=_spec_of(pairs) if type(pairs) is tuple else KVSpec.from_pairs(pairs),
        order=tuple(order.split()),
        blocks=blocks,
        tokens=tokens,
    )
