"""Keys of blocks, and arrays with an entry for each key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits, Ids
from kvwire_store.namespace import ABSENT

Key: TypeAlias = bytes
"""The digest of a block's namespace, and its hash."""
Keys: TypeAlias = npt.NDArray[np.object_]
Times: TypeAlias = npt.NDArray[np.float64]
"""When each block was put, in seconds since 1970."""
Orders: TypeAlias = npt.NDArray[np.uint8]
"""The order of each image; see :mod:`kvwire_store.namespace`."""
NO_SLOT: Final = -1
"""Stands for a slot: the block is not there."""


def as_keys(keys: Iterable[Key]) -> Keys:
    """Return the keys as an array, which can be indexed with an array."""
    return np.array(list(keys), np.object_)


def all_found(slots: Ids) -> bool:
    """Return whether each block has a slot; faster than by arrays."""
    return NO_SLOT not in slots.tolist()


def absent(count: int) -> Orders:
    """Return the orders of blocks that are not there."""
    orders: Orders = np.empty(count, np.uint8)
    orders.fill(ABSENT)  # np.full is a function of Python
    return orders


def once(keys: Keys) -> Bits:
    """Return for each key whether it is its first occurrence."""
    listed = keys.tolist()
    places = dict(zip(reversed(listed), range(keys.size)[::-1], strict=True))
    first: npt.NDArray[np.bool_] = np.zeros(keys.size, np.bool_)
    first[list(places.values())] = True
    return first


class IndexedSlots(NamedTuple):
    """Blocks and their slots."""

    keys: Keys
    slots: Ids

    @classmethod
    def joined(cls, *parts: IndexedSlots) -> IndexedSlots:
        """Return the blocks of several parts."""
        none = as_keys(())
        return cls(
            np.concatenate((none, *(part.keys for part in parts))),
            np.concatenate((np.empty(0, np.int64), *(part.slots for part in parts))),
        )
