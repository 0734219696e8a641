"""The payload checksum does not depend on how the payload lies in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.memory.checksum import checksum
from kvwire.memory.copy import as_fragments
from tests.memory.fragments import fill, scattered


def cut(data: bytes, borders: set[int]) -> Fragments:
    """The same bytes as fragments that lie in any order in memory."""
    edges = [0, *sorted(b for b in borders if 0 < b < len(data)), len(data)]
    fragments, _ = scattered([b - a for a, b in itertools.pairwise(edges)], 1)
    fill(fragments, data)
    return fragments


@given(st.binary(min_size=1, max_size=2000), st.sets(st.integers(1, 1999)))
def test_fragments_have_the_checksum_of_their_bytes(
    data: bytes, borders: set[int]
) -> None:
    assert checksum(cut(data, borders)) == checksum(memoryview(data))


@pytest.mark.parametrize("length", [1, 61, 2047, 2048, 4096, 70_000])
def test_gathered_or_not_it_is_the_same(length: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 700_001, np.uint8).tobytes()
    fragments = cut(data, set(range(0, len(data), length)))
    assert checksum(fragments) == checksum(memoryview(data))


@pytest.mark.parametrize("runs", [1, 3, 7, 8, 9, 30])
def test_of_runs_of_different_lengths(runs: int) -> None:
    data = np.random.default_rng(2).integers(0, 256, 700_001, np.uint8).tobytes()
    edges = np.cumsum([200 + run % 2 for run in range(runs) for _ in range(40)])
    assert checksum(cut(data, set(edges.tolist()))) == checksum(memoryview(data))


@pytest.mark.parametrize("offset", [1, 4095, 4096, 5000])
def test_of_a_chunk_that_begins_and_ends_within_a_fragment(offset: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, 600_000, np.uint8).tobytes()
    fragments = cut(data, set(range(0, len(data), 4096)))
    chunk = memoryview(data)[offset : offset + 400_001]
    assert checksum(fragments.slice(offset, len(chunk))) == checksum(chunk)


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_flipped_bit_changes_it(data: bytes, choice: st.DataObject) -> None:
    bit = choice.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(memoryview(flipped)) != checksum(memoryview(data))


def test_it_is_the_low_half_of_xxh3() -> None:
    data = bytes(range(256)) * 100
    expected = xxhash.xxh3_64_intdigest(data) & 0xFFFF_FFFF
    assert checksum(memoryview(data)) == expected


@pytest.mark.parametrize("kind", ["view", "fragments"])
def test_of_nothing(kind: str) -> None:
    empty = memoryview(b"")
    payload = empty if kind == "view" else as_fragments(empty)
    assert checksum(payload) == xxhash.xxh3_64_intdigest(b"") & 0xFFFF_FFFF
