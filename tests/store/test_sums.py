"""Checksums of images, and of what is said of them."""

from __future__ import annotations

import ctypes

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.limits import MIB
from kvwire.store.images import images_in, views_of
from kvwire.store.index import as_keys
from kvwire.store.sums import image_sums, named_sums


@given(st.integers(1, 5), st.integers(1, 3 * MIB // 2))
@settings(max_examples=25)
def test_the_checksum_of_each_image(count: int, nbytes: int) -> None:
    """Whether many of them fit in a turn or one is longer than it."""
    rng = np.random.default_rng(nbytes)
    memory = rng.integers(0, 256, count * nbytes, np.uint8)
    images = images_in(memory, nbytes, count)
    sums = image_sums(images)
    for number, view in enumerate(views_of(images)):
        begin = memory.ctypes.data + number * nbytes
        image = ctypes.string_at(begin, nbytes)
        assert view == image
        assert sums[number] == xxhash.xxh3_64_intdigest(image)


def test_another_key_or_order_has_another_checksum() -> None:
    keys = as_keys([b"k" * 48, b"k" * 47 + b"l", b"k" * 48])
    sums = named_sums(keys, np.array([0, 0, 1], np.uint8))
    assert len(set(sums.tolist())) == 3
    assert named_sums(keys[:1], np.zeros(1, np.uint8)).tolist() == sums[:1].tolist()
