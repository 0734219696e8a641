"""Checksums of images."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.store.images import views_of
from kvwire.store.index import Keys, Orders

Sums = npt.NDArray[np.uint64]

# Images are hashed in pieces of so many bytes, and then other threads have a turn.
_TURN_BYTES: Final = 1 * MIB


def image_sums(images: Fragments) -> Sums:
    """Return the checksum of each image: xxh3, 64 bits of it."""
    views, sums = views_of(images), np.zeros(len(images), np.uint64)
    step = max(1, _TURN_BYTES // views[0].nbytes)
    for first in range(0, len(views), step):
        part = slice(first, first + step)
        sums[part] = list(map(xxhash.xxh3_64_intdigest, views[part]))
        time.sleep(0)
    return sums


def named_sums(keys: Keys, orders: Orders) -> Sums:
    """Return the checksum of each image's name, to combine with its own.

    A key or an order that is not the image's is then as wrong as a byte of it.
    """
    named = zip(keys.tolist(), orders.tolist(), strict=True)
    sums = (xxhash.xxh3_64_intdigest(key, seed=order) for key, order in named)
    return np.fromiter(sums, np.uint64, keys.size)
