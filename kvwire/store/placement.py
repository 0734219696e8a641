"""Rendezvous hashing: which of several nodes a block lies at.

Every client draws the same number for each pair of a block and a node, and the node of
the highest one has the block. So nobody keeps a table. A node that joins takes its
share from all others and nothing else moves; that of one that leaves goes to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from kvwire.kv.blocks import Ids
from kvwire.store.index import Keys

# The finalizer of SplitMix64: each bit of what goes in turns half of what comes out.
_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST: Final = 31


def seed_of(node: str) -> int:
    """Return the number that stands for a node, the same at every client."""
    return xxhash.xxh3_64_intdigest(node.encode())


def placed(keys: Keys, seeds: Sequence[int]) -> Ids:
    """Return for each block the position of its node; there is at least one."""
    digests = map(xxhash.xxh3_64_intdigest, keys.tolist())
    names = np.fromiter(digests, np.uint64, keys.size)
    best, where = np.zeros(keys.size, np.uint64), np.zeros(keys.size, np.int64)
    for number, seed in enumerate(seeds):
        drawn = names ^ np.uint64(seed)
        for shift, factor in _STEPS:
            drawn = (drawn ^ (drawn >> np.uint64(shift))) * np.uint64(factor)
        drawn ^= drawn >> np.uint64(_LAST)
        better = drawn > best
        best[better], where[better] = drawn[better], number
    return where
