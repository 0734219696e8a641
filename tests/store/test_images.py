"""Images in memory: where they lie, and as one message."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.kv.fragments import Fragments
from kvwire.limits import EAGER_BYTES_MAX
from kvwire.store.images import images_in, message_of, payload_of, views_of


def test_images_lie_one_behind_the_other() -> None:
    memory = np.arange(300).astype(np.uint8)
    views = views_of(images_in(memory, 100, 3))
    assert b"".join(views) == memory.tobytes()
    views[1][0] = 255
    assert memory[100] == 255


def test_more_images_than_fit_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        images_in(np.empty(100, np.uint8), 51, 2)


def test_images_side_by_side_are_one_view() -> None:
    memory = np.arange(300).astype(np.uint8)
    images = images_in(memory, 100, 3)
    payload = payload_of(images)
    assert isinstance(payload, memoryview)
    assert payload == memory.data
    apart = payload_of(images.selected(np.array([0, 2])))
    assert isinstance(apart, Fragments)
    assert b"".join(views_of(apart)) == memory[:100].tobytes() + memory[200:].tobytes()


def test_small_images_apart_are_gathered_to_be_sent() -> None:
    memory = np.arange(300).astype(np.uint8)
    apart = images_in(memory, 100, 3).selected(np.array([2, 0]))
    sent = message_of(apart)
    assert isinstance(sent, memoryview)
    assert bytes(sent) == memory[200:].tobytes() + memory[:100].tobytes()
    large = images_in(np.empty(3 * EAGER_BYTES_MAX, np.uint8), EAGER_BYTES_MAX, 3)
    assert isinstance(message_of(large.selected(np.array([0, 2]))), Fragments)
