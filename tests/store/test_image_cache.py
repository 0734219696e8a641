"""Images anywhere in memory as a cache: each block is its image."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import KVSpec
from kvwire.kv.canonical import Canonical
from kvwire.kv.fragments import Fragments
from kvwire.kv.mapping import GroupMap
from kvwire.kv.spec import DType
from kvwire.store.image_cache import ImageCache, images_in
from kvwire.store.namespace import ORDERS, Namespace
from tests.store.caches import SPEC

NBYTES = SPEC.block_bytes


def at(memory: np.ndarray, offsets: list[int], nbytes: int) -> Fragments:
    """Images that begin at some offsets."""
    begin = int(memory.ctypes.data)
    addresses = np.array([begin + offset for offset in offsets], np.uint64)
    lengths = np.full(len(offsets), nbytes, np.uint64)
    return Fragments(addresses, lengths, owner=memory, writable=True)


def walked(images: ImageCache, spec: KVSpec, order: int) -> Fragments:
    """Where the blocks lie, in the order of their images."""
    (group,) = images.cache.groups.values()
    walk = Canonical(
        group=group.name,
        order=("block", *ORDERS[order]),
        layers=spec.layer_indices,
        heads=spec.heads,
        components=spec.components,
        head_dim=spec.head_dim,
        item_bytes=spec.item_bytes,
        tokens=images.ids.size * spec.block_tokens,
        granule_tokens=spec.block_tokens,
        granules=images.ids.size,
    )
    ids = images.cache.block_lists({group.name: images.ids})[group.name]
    wanted = np.ones(images.ids.size, np.bool_)
    listed = GroupMap(walk, group, ids, wanted)
    return listed.fragments(walk.layers, slice(0, images.ids.size))


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=20, unique=True),
    st.sampled_from([NBYTES, NBYTES + 64, 4096]),
    st.integers(0, len(ORDERS) - 1),
)
def test_each_block_is_its_image(places: list[int], gap: int, order: int) -> None:
    """Whatever the order, the distances and the sequence of the images."""
    memory = np.empty(501 * 4096, np.uint8)
    wanted = at(memory, [place * gap for place in places], NBYTES)
    found = walked(ImageCache(Namespace("g", SPEC), order, wanted), SPEC, order)
    assert np.array_equal(found.addresses, wanted.merged().addresses)
    assert np.array_equal(found.lengths, wanted.merged().lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32", "int8"])
def test_every_element_type(dtype: DType) -> None:
    spec = KVSpec(
        layers=1, kv_heads=1, head_dim=8, block_tokens=2, dtype=dtype, components=1
    )
    memory = np.empty(1000, np.uint8)
    room = images_in(memory, spec.block_bytes, 3)
    found = walked(ImageCache(Namespace("kv", spec), 0, room), spec, 0)
    assert found.nbytes == 3 * spec.block_bytes
    assert int(found.addresses[0]) == memory.ctypes.data


def test_room_in_a_berth_is_bounded_by_it() -> None:
    with pytest.raises(AssertionError):
        images_in(np.empty(100, np.uint8), 51, 2)


def test_the_owner_is_held_until_it_is_released() -> None:
    memory = np.empty(4 * NBYTES, np.uint8)
    gone = weakref.ref(memory)
    room = images_in(memory, NBYTES, 4)
    images = ImageCache(Namespace("kv", SPEC), 0, room.selected(np.array([1, 3])))
    del memory, room
    assert gone() is not None
    images.release()
    assert gone() is None
