"""Memory to measure with: what is written, and what must not be."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.cli.doctor.arena import Arena
from kvwire.memory.copy import copy


def test_fragments_lie_apart_and_make_up_the_total() -> None:
    arena = Arena(64, 16)
    assert arena.fragments.nbytes == 64
    assert np.diff(arena.fragments.addresses.astype(np.int64)).tolist() == [32] * 3


def test_a_seed_determines_the_bytes_whatever_the_fragments() -> None:
    digests = set()
    for size in (16, 32):
        arena = Arena(64, size)
        arena.fill(7)
        digests.add(arena.digest())
    arena.fill(8)
    assert arena.digest() not in digests
    assert len(digests) == 1


def test_bytes_that_arrived_are_seen_and_cleared_ones_too() -> None:
    there, here = Arena(64, 16), Arena(64, 16)
    there.fill(1)
    copy(there.fragments, here.fragments)
    assert here.digest() == there.digest()
    assert here.gaps_untouched
    here.clear()
    assert here.digest() != there.digest()


@pytest.mark.parametrize("size", [16, 64])
def test_a_byte_beside_a_fragment_is_seen(size: int) -> None:
    arena = Arena(64, size)
    whole = arena.fragments.owner
    assert isinstance(whole, np.ndarray)
    whole.reshape(-1)[size] ^= 1
    assert not arena.gaps_untouched
