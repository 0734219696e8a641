"""Images in memory: where they lie, as one message, and their checksums."""

from __future__ import annotations

import ctypes

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire_store.images import (
    image_sums,
    images_in,
    line_of,
    named_sums,
    payload_of,
    views_of,
)
from kvwire_store.keys import as_keys


def test_images_side_by_side_are_one_view() -> None:
    memory = np.arange(300).astype(np.uint8)
    images = images_in(memory, 100, 3)
    payload = payload_of(images)
    assert isinstance(payload, memoryview)
    assert payload == memory.data
    apart = payload_of(images.selected(np.array([0, 2])))
    assert isinstance(apart, Fragments)
    assert b"".join(views_of(apart)) == memory[:100].tobytes() + memory[200:].tobytes()


def test_a_copy_of_images_wherever_they_are() -> None:
    memory = np.arange(300).astype(np.uint8)
    images = images_in(memory, 100, 3)
    apart = images.selected(np.array([2, 0]))
    assert line_of(apart) == memory[200:].tobytes() + memory[:100].tobytes()
    assert line_of(images) == memory.tobytes()
    assert not line_of(images.selected(np.zeros(3, np.bool_)))


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
