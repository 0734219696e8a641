"""Blocks of which every byte says whose it is, in caches of several sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from kvwire import KVSpec, PagedCache
from kvwire_certify.oracle import Words, stamp
from kvwire_store.namespace import Namespace

# One page, one page and a bit, two pages, three.
HEAD_DIMS = (256, 296, 512, 768)
# Kind 4 is kind 0 of another tenant: of the same hashes, and with other bytes.
TENANTS = ("", "a", "b")
_TOKENS = 8


class Block(NamedTuple):
    """One block of the model: which kind of cache it is of, and which one it is."""

    kind: int
    number: int

    @property
    def hash(self) -> bytes:
        named = self.kind % len(HEAD_DIMS), self.number
        return hashlib.sha256(repr(named).encode()).digest()

    @property
    def key(self) -> bytes:
        return namespace_of_kind(self.kind).digest + self.hash


def tenant_of(kind: int) -> str:
    return TENANTS[kind // len(HEAD_DIMS)]


def spec_of(kind: int) -> KVSpec:
    kind %= len(HEAD_DIMS)
    return KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=HEAD_DIMS[kind],
        block_tokens=_TOKENS,
        dtype="uint8",
        fingerprint=f"kind {kind}",
    )


@cache
def namespace_of_kind(kind: int) -> Namespace:
    return Namespace("kv", spec_of(kind), tenant_of(kind))


@dataclass
class Cache:
    """A cache of one kind, seen as a row of words for each block."""

    kind: int
    rows: Words

    @classmethod
    def empty(cls, kind: int, blocks: int) -> Cache:
        return cls(kind, np.zeros((blocks, spec_of(kind).block_bytes // 8), np.uint64))

    @classmethod
    def of(cls, kind: int, blocks: Iterable[Block]) -> Cache:
        numbers = np.array([block.number for block in blocks], np.uint64)
        return cls(kind, contents(kind, numbers))

    @property
    def paged(self) -> PagedCache:
        shape = (len(self.rows), 2, _TOKENS, 1, spec_of(self.kind).head_dim)
        return PagedCache(spec_of(self.kind), [self.rows.view(np.uint8).reshape(shape)])


def contents(kind: int, numbers: Words) -> Words:
    """What the blocks of some numbers hold: no word is in two of them, or twice."""
    words = np.arange(spec_of(kind).block_bytes // 8)
    return stamp(kind + 1, numbers[:, None], words)
