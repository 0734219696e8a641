"""Images of blocks in memory, in any slots, and their checksums."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvwire.kv.fragments import Array, Fragments
from kvwire.memory.copy import copy
from kvwire_store.keys import Keys, Orders

Sums = npt.NDArray[np.uint64]


def images_in(memory: npt.NDArray[np.uint8], nbytes: int, count: int) -> Fragments:
    """Return contiguous memory for ``count`` images of ``nbytes``."""
    assert count * nbytes <= memory.size
    begin = memory.__array_interface__["data"][0]
    starts = np.arange(0, count * nbytes, nbytes, dtype=np.uint64)
    return images_at(starts + np.uint64(begin), nbytes, memory)


def images_at(
    addresses: npt.NDArray[np.uint64], nbytes: int, owner: npt.NDArray[np.uint8]
) -> Fragments:
    """Return the images of ``nbytes`` at these addresses in an array."""
    lengths, starts = rows(addresses.size, nbytes)
    return Fragments(
        addresses,
        lengths,
        owner=owner,
        writable=owner.flags.writeable,
        starts=starts,
    )


# A store's calls have few sizes, and these cached arrays are never written to.
@lru_cache(32)
def rows(count: int, nbytes: int) -> tuple[Array, Array]:
    """Return the lengths of ``count`` images, and the start of each in a stream."""
    starts = np.arange(0, count * nbytes + 1, nbytes, dtype=np.uint64)
    lengths = starts[1:] - starts[:-1]
    lengths.flags.writeable = starts.flags.writeable = False
    return lengths, starts


def views_of(images: Fragments) -> list[memoryview]:
    """Return the memory of each image; each image must be one fragment."""
    lengths = images.lengths.tolist()
    # Usually all have one length, and so one type.
    types = {length: ctypes.c_char * length for length in set(lengths)}
    return [
        memoryview(types[length].from_address(at)).cast("B")
        for at, length in zip(images.addresses.tolist(), lengths, strict=True)
    ]


def line_of(images: Fragments) -> memoryview:
    """Return images as contiguous memory: the images' own memory, or a copy."""
    payload = payload_of(images)
    if isinstance(payload, memoryview):
        return payload
    gathered = memoryview(bytearray(payload.nbytes))
    copy(payload, gathered)
    return gathered


def payload_of(images: Fragments) -> memoryview | Fragments:
    """Return images as the memory of one message."""
    pieces = images if images.lengths.size == 1 else images.merged()
    if pieces.lengths.size > 1 or not pieces.nbytes:
        return pieces
    only = ctypes.c_char * pieces.nbytes
    return memoryview(only.from_address(pieces.addresses.item(0))).cast("B")


def image_sums(images: Fragments) -> Sums:
    """Return the checksum of each image: xxh3, 64 bits of it."""
    sums = map(xxhash.xxh3_64_intdigest, views_of(images))
    return np.fromiter(sums, np.uint64, len(images))


def named_sums(keys: Keys, orders: Orders) -> Sums:
    """Return the checksum of each image's key and order, to combine with its own.

    So a wrong key or order is detected just as a wrong byte is.
    """
    named = zip(keys.tolist(), orders.tolist(), strict=True)
    sums = (xxhash.xxh3_64_intdigest(key, seed=order) for key, order in named)
    return np.fromiter(sums, np.uint64, keys.size)
