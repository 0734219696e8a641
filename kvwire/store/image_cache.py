"""Images of blocks, wherever they lie in memory, as a cache that transfers move.

An image is a block whose axes lie in one order, without a gap. So images are a paged
cache of blocks across layers, in a layout of that order, and moving them is a KV
transfer like any other: what the two sides have in other orders, kvwire plans.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from kvwire.store.namespace import ORDERS, Namespace

# Whatever NumPy has no name for may be any integer of its size.
_IN_NUMPY: Final = frozenset({"float16", "float32", "int8", "uint8"})


class ImageCache:
    """Shows images as blocks of a cache.

    Args:
        namespace: What they are blocks of.
        order: The order of every image; see :mod:`kvwire.store.namespace`.
        images: One fragment each, of the length of an image; at least one.

    Attributes:
        cache: It has one group, named as the namespace's.
        ids: The id of each image in it.
    """

    def __init__(self, namespace: Namespace, order: int, images: Fragments) -> None:
        axes = ORDERS[order]
        layout = " ".join(("block", *axes))
        # Only its shape counts: two blocks, so that the axis of blocks lies outside.
        sample = np.empty((2, *_shape(namespace.spec, axes)), _dtype(namespace.spec))
        self.cache: PagedCache = PagedCache.grouped(
            {namespace.group: (namespace.spec, sample, layout)}
        )
        first = images.addresses.min()
        distances = (images.addresses - first).astype(np.int64)
        # Images need not be equally far apart. A block's id is its distance in steps
        # that they all are multiples of: ids between them are of no block, and unused.
        step = int(np.gcd.reduce(distances)) or namespace.image_bytes
        self.ids: Ids = distances // step
        self._owners: list[object] = [images.owner]
        group = self.cache.groups[namespace.group]
        group.bases = group.bases + (int(first) - int(sample.ctypes.data))
        group.strides = {**group.strides, "block": step}
        group.num_blocks = int(self.ids.max()) + 1
        group.owners = (self._owners,)
        group.writable = images.writable

    def release(self) -> None:
        """Let go of the images' owner, of which nothing makes use any more.

        A transfer that is over is in cycles with its parts, so what it refers to would
        otherwise stay until the garbage collector comes by.
        """
        self._owners.clear()


def images_in(memory: npt.NDArray[np.uint8], nbytes: int, count: int) -> Fragments:
    """Return room for so many images of ``nbytes``, one behind the other."""
    begin = int(memory.ctypes.data)
    assert count * nbytes <= memory.size
    return Fragments(
        np.arange(count, dtype=np.uint64) * np.uint64(nbytes) + np.uint64(begin),
        np.full(count, nbytes, np.uint64),
        owner=memory,
        writable=True,
    )


def _shape(spec: KVSpec, axes: tuple[str, ...]) -> tuple[int, ...]:
    extents = {
        "layer": spec.layers,
        "kv": spec.components,
        "token": spec.block_tokens,
        "head": spec.kv_heads,
        "dim": spec.head_dim,
    }
    return tuple(extents[axis] for axis in axes)


def _dtype(spec: KVSpec) -> np.dtype[np.generic]:
    return np.dtype(spec.dtype if spec.dtype in _IN_NUMPY else f"u{spec.item_bytes}")
