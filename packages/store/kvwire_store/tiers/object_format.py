"""The head in front of an image in an object: the block's key, order and checksums.

An object is 128 bytes of head and the image. The head has the whole key, so that an
object which was copied, renamed or written by another program is not taken for another
block; the length, the order and the checksum of the image; and a checksum of its own.
All numbers are little-endian.
"""

from __future__ import annotations

import itertools
import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvwire.kv.fragments import Fragments
from kvwire.memory.copy import copy
from kvwire_store.images import image_sums
from kvwire_store.keys import Key
from kvwire_store.limits import STORE_HASH_BYTES_MAX
from kvwire_store.namespace import DIGEST_BYTES, ORDERS
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults

HEAD_BYTES: Final = 128

_MAGIC: Final = b"kvwobj\0\1"
_KEY_BYTES_MAX: Final = DIGEST_BYTES + STORE_HASH_BYTES_MAX
_HEAD: Final = struct.Struct(f"<8sBB6xQQ{_KEY_BYTES_MAX}s8x")
_SUM: Final = struct.Struct("<Q")

assert _HEAD.size + _SUM.size == HEAD_BYTES


class ObjectHead(NamedTuple):
    """The head of one object."""

    key: Key
    order: int
    nbytes: int
    image_sum: int

    def to_bytes(self) -> bytes:
        """Return the head as bytes, which precede the image."""
        head = _HEAD.pack(
            _MAGIC, len(self.key), self.order, self.nbytes, self.image_sum, self.key
        )
        return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))

    @classmethod
    def read(cls, raw: memoryview) -> ObjectHead | None:
        """Return the head at the begin of some bytes; None if it is not valid."""
        if raw.nbytes < HEAD_BYTES:
            return None
        head = raw[: _HEAD.size]
        (total,) = _SUM.unpack(raw[_HEAD.size : HEAD_BYTES])
        magic, length, order, nbytes, image_sum, key = _HEAD.unpack(head)
        whole = magic == _MAGIC and total == xxhash.xxh3_64_intdigest(head)
        if not whole or length > _KEY_BYTES_MAX or order >= len(ORDERS):
            return None
        return cls(key[:length], order, nbytes, image_sum)


def path_of(key: Key) -> str:
    """Return the path of a block: a folder for its namespace, and its hash."""
    return f"{key[:DIGEST_BYTES].hex()}/{key[DIGEST_BYTES:].hex()}"


def packed(batch: Batch) -> list[npt.NDArray[np.uint8]]:
    """Return the objects of a batch as bytes. On a thread."""
    lengths = batch.images.lengths
    ends = (lengths.astype(np.int64) + HEAD_BYTES).cumsum().tolist()
    memory = np.empty(batch.images.nbytes + HEAD_BYTES * batch.keys.size, np.uint8)
    found = [memory[a:b] for a, b in itertools.pairwise([0, *ends])]
    rows = [one.data for one in found]
    copy(batch.images, _behind_heads(rows, lengths))
    columns = (batch.keys, batch.orders, lengths, image_sums(batch.images))
    listed = (column.tolist() for column in columns)
    for row, *fields in zip(rows, *listed, strict=True):
        row[:HEAD_BYTES] = ObjectHead(*fields).to_bytes()
    return found


def read_objects(batch: Batch, raws: list[memoryview]) -> BlockResults:
    """Copy images out of objects, and set the order of each. On a thread.

    Returns:
        LANDED, or DAMAGED for an object that is not the block that the batch names; its
        image and its order are then undefined.
    """
    results = np.full(batch.keys.size, BlockResult.DAMAGED, np.uint8)
    sums = np.zeros(batch.keys.size, np.uint64)
    behind = np.array([raw.nbytes for raw in raws], np.int64) - HEAD_BYTES
    batch, fit = batch.stored(behind)
    for at, raw in enumerate(raws):
        head = ObjectHead.read(raw)
        if head is None or not fit[at] or head.nbytes != behind[at]:
            continue
        if head.key == batch.keys[at]:
            results[at] = BlockResult.LANDED
            sums[at] = head.image_sum
            batch.orders[at] = head.order
    whole = np.flatnonzero(results == BlockResult.LANDED)
    if whole.size:
        images = batch.images.selected(whole)
        objects = _behind_heads([raws[at] for at in whole], images.lengths)
        copy(objects, images)
        results[whole[image_sums(images) != sums[whole]]] = BlockResult.DAMAGED
    return results


def _behind_heads(
    objects: list[memoryview], lengths: npt.NDArray[np.uint64]
) -> Fragments:
    """Return the memory of the images, each behind the head of its object."""
    arrays = [np.frombuffer(one, np.uint8) for one in objects]
    begins = [array.ctypes.data + HEAD_BYTES for array in arrays]
    return Fragments(
        np.array(begins, np.uint64),
        lengths,
        owner=arrays,
        writable=not objects[0].readonly,
    )
