"""One cache group's part of a call: keys, and the places of images in the cache.

A block's image is its bytes in one order of the axes, without gaps. A cache holds the
same bytes in several pieces, depending on its layout; :meth:`GroupRequest.fragments`
lists them in the image's order. So a copy goes from one list of fragments to another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from kvwire.errors import UsageError, wrong_type
from kvwire.kv.blocks import BlockLists, Ids
from kvwire.kv.canonical import Canonical
from kvwire.kv.fragments import Fragments
from kvwire.kv.mapping import GroupMap, Steps
from kvwire.kv.paged import CacheGroup, PagedCache, computed_once
from kvwire_store.keys import Keys, Orders
from kvwire_store.limits import STORE_HASH_BYTES_MAX
from kvwire_store.namespace import ABSENT, ORDERS, Namespace, order_of

Hashes = Sequence[bytes] | Mapping[str, Sequence[bytes]]
"""One hash for each block, of each group of a grouped cache."""


class BlockRequest(ABC):
    """Blocks to move, and their places. Subclassed.

    Attributes:
        namespace: The blocks' namespace.
        keys: Their keys.
        repeats: Whether any key is listed twice.
        order: The order of their images in a put.
    """

    __slots__ = ("keys", "namespace", "order", "repeats")

    def __init__(self, namespace: Namespace, keys: Keys, order: int) -> None:
        self.namespace: Namespace = namespace
        self.keys: Keys = keys
        self.repeats: bool = keys.size > 1 and len(set(keys.tolist())) < keys.size
        self.order: int = order

    @abstractmethod
    def fragments(self, positions: Ids, order: int) -> Fragments:
        """Return the memory of some blocks' images, with the axes in ``order``."""

    def all_fragments(self, order: int) -> Fragments:
        """Return the memory of all images."""
        return self.fragments(np.arange(self.keys.size), order)


class ImageRequest(BlockRequest):
    """Whole images, in any order."""

    __slots__ = ("_images", "orders")

    def __init__(
        self, namespace: Namespace, keys: Keys, images: Fragments, order: int = 0
    ) -> None:
        super().__init__(namespace, keys, order)
        self.orders: Orders = np.empty(keys.size, np.uint8)
        self.orders.fill(ABSENT)
        self._images = images

    def fragments(self, positions: Ids, order: int) -> Fragments:
        """Return the images of some blocks, all in one order."""
        self.orders[positions] = order
        all_of_them = positions.size == self.keys.size
        return self._images if all_of_them else self._images.selected(positions)


class NamedRequest(BlockRequest):
    """Blocks that stay in the store, without a caller's memory."""

    __slots__ = ()

    def __init__(self, namespace: Namespace, keys: Keys) -> None:
        super().__init__(namespace, keys, 0)

    def fragments(self, positions: Ids, order: int) -> Fragments:
        """Raise: nobody copies them."""
        raise AssertionError("blocks that stay in the store have no other memory")


class GroupRequest(BlockRequest):
    """The blocks of one group in a put or a get. Immutable."""

    __slots__ = ("_cache", "_ids", "group")

    def __init__(
        self,
        cache: PagedCache,
        name: str,
        ids: Ids,
        hashes: Sequence[bytes],
        namespace: Namespace,
    ) -> None:
        self._cache = cache
        self.group: CacheGroup = cache.groups[name]
        group = self.group
        super().__init__(namespace, keys_of(hashes, namespace), order_of(group.order))
        self._ids = ids
        held = ids.size * group.spec.block_tokens
        named = len(hashes) * namespace.spec.block_tokens
        if held != named:
            raise UsageError(
                f"hashes: {len(hashes)} hashes of group {group.name!r} cover {named} "
                f"tokens, but its {ids.size} blocks hold {held}; pass one hash per "
                "block, or hash_tokens=, and leave out a last block that is not full"
            )

    def fragments(self, positions: Ids, order: int) -> Fragments:
        """Return the places of some blocks' images in the cache."""
        here = self.group.spec.block_tokens
        unit = self.namespace.spec.block_tokens
        if here == unit:
            return self._steps(order, here).blocks(self._ids[positions])
        granule = math.gcd(here, unit)
        steps = self._steps(order, granule)
        # Only blocks between the first and the last of them are examined.
        first = int(positions[0]) * unit // here
        last = -(-(int(positions[-1]) + 1) * unit // here)
        granules = (last - first) * (here // granule)
        per_hash = unit // granule
        start = positions[:, None] * per_hash + np.arange(per_hash)
        wanted = np.zeros(granules, np.bool_)
        wanted[start.ravel() - first * (here // granule)] = True
        walk = steps.walk
        listed = GroupMap(steps, self._ids[first:last], wanted)
        found = listed.fragments(walk.layers, slice(0, granules))
        return found if per_hash == 1 else _woven(found, walk, per_hash)

    def all_fragments(self, order: int) -> Fragments:
        """Return the places of all images in the cache."""
        tokens = self.group.spec.block_tokens
        if tokens == self.namespace.spec.block_tokens:
            return self._steps(order, tokens).blocks(self._ids)
        return super().all_fragments(order)

    def _steps(self, order: int, granule: int) -> Steps:
        """Return the offsets of a granule's elements, relative to its block."""
        group = self.group
        return computed_once(
            self._cache,
            ("image", group.name, order, granule),
            lambda: _steps_of(group, order, granule),
        )


def _steps_of(group: CacheGroup, order: int, granule: int) -> Steps:
    spec = group.spec
    walk = Canonical(
        group=group.name,
        order=("block", *ORDERS[order]),
        layers=spec.layer_indices,
        heads=spec.heads,
        components=spec.components,
        head_dim=spec.head_dim,
        item_bytes=spec.item_bytes,
        tokens=granule,
        granule_tokens=granule,
        granules=1,
    )
    return Steps(walk, group)


def group_requests(
    cache: PagedCache,
    lists: BlockLists,
    hashes: Hashes,
    namespaces: Mapping[str, Namespace],
) -> tuple[GroupRequest, ...]:
    """Return each cache group's part of a call."""
    named = by_group(hashes, tuple(cache.groups))
    if len(named) < len(cache.groups):
        raise UsageError(f"hashes: the groups are {', '.join(cache.groups)}")
    requests: tuple[GroupRequest, ...] = ()
    for name in cache.groups:
        one = GroupRequest(cache, name, lists[name], named[name], namespaces[name])
        requests += (one,)
    return requests


def by_group(hashes: Hashes, groups: tuple[str, ...]) -> Mapping[str, Sequence[bytes]]:
    """Return the hashes by group; without groups, all belong to the only one."""
    # Abstract classes are checked last, since that takes several times as long.
    if not isinstance(hashes, list | tuple):
        if isinstance(hashes, Mapping):
            if hashes.keys() - set(groups):
                raise UsageError(f"hashes: the groups are {', '.join(groups)}")
            return hashes
        if not isinstance(hashes, Sequence):
            raise wrong_type("hashes", hashes, "a list of bytes")
    if len(groups) != 1:
        raise UsageError(f"hashes: pass {{group: hashes}} for {', '.join(groups)}")
    return {groups[0]: hashes}


def keys_of(hashes: Sequence[bytes], namespace: Namespace) -> Keys:
    """Return the keys of some hashes in a namespace."""
    if len(hashes) == 1:  # the same checks in a third of the time
        one = hashes[0]
        if type(one) is bytes and 0 < len(one) <= STORE_HASH_BYTES_MAX:
            return np.array((namespace.digest + one,), np.object_)
    if set(map(type, hashes)) - {bytes}:
        raise UsageError(
            "hashes: each must be bytes, which are the same in every process"
        )
    lengths = set(map(len, hashes))
    if len(lengths) > 1:
        raise UsageError(
            f"hashes: they have lengths of {sorted(lengths)} bytes; all must have the "
            "same length"
        )
    if lengths and not 0 < min(lengths) <= STORE_HASH_BYTES_MAX:
        raise UsageError(
            f"hashes: they have {min(lengths)} bytes; 1 to {STORE_HASH_BYTES_MAX} are "
            "allowed"
        )
    return np.array(list(map(namespace.digest.__add__, hashes)), np.object_)


def _woven(stream: Fragments, walk: Canonical, per_hash: int) -> Fragments:
    """Return the granules of each hash as one image.

    The walk visits one granule after another, but an image has the tokens of all its
    granules along one axis. So each contiguous run of a granule, from the token axis
    inwards, moves to its place among the other granules' runs.
    """
    inner = walk.order[walk.order.index("token") :]
    extents = walk.extents(len(walk.layers), 1)
    run = math.prod(extents[axis] for axis in inner) * walk.item_bytes
    granule = len(walk.layers) * walk.granule_bytes
    runs = np.arange(0, stream.nbytes, run, dtype=np.uint64)
    starts = np.sort(np.concatenate((stream.starts[:-1], runs)))
    starts = starts[np.append(True, starts[1:] != starts[:-1])]
    source = stream.starts.searchsorted(starts, "right") - 1
    addresses = stream.addresses[source] + (starts - stream.starts[source])
    lengths = np.diff(np.append(starts, np.uint64(stream.nbytes)))
    at = starts.astype(np.int64)
    image, inside = np.divmod(at, granule * per_hash)
    number, inside = np.divmod(inside, granule)
    outer, inside = np.divmod(inside, run)
    place = image * (granule * per_hash) + (outer * per_hash + number) * run + inside
    order = np.argsort(place, kind="stable")
    return Fragments(
        addresses[order],
        lengths[order],
        owner=stream.owner,
        writable=stream.writable,
        device=stream.device,
    ).merged()
