"""Rows of a table name the bytes of the fragments they are of, in the same order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.memory.device.rows import as_rows


def fragments(pairs: list[tuple[int, int]], unit: int) -> Fragments:
    addresses = np.array([address * unit for address, _ in pairs], np.uint64)
    lengths = np.array([length * unit for _, length in pairs], np.uint64)
    return Fragments(addresses, lengths, owner=None, writable=True)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1),
    unit=st.sampled_from([1, 2, 3, 16, 24]),
)
def test_rows_are_the_fragments(pairs: list[tuple[int, int]], unit: int) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 100 * unit, np.uint8)
    given = fragments(pairs, unit)
    rows = as_rows(given)
    expected = [memory[a * unit : (a + n) * unit] for a, n in pairs]
    assert rows.row_bytes % unit == 0
    assert rows.index.size * rows.row_bytes == given.nbytes
    # What a library's gather does: rows of a table that begins at the base.
    table = memory[rows.base :][: rows.count * rows.row_bytes]
    gathered = table.reshape(rows.count, rows.row_bytes)[rows.index]
    assert gathered.tobytes() == np.concatenate(expected).tobytes()


def test_equal_fragments_are_one_row_each() -> None:
    """Blocks of a cache: no more rows than fragments."""
    rows = as_rows(fragments([(5, 1), (2, 1), (9, 1)], unit=4096))
    assert (rows.row_bytes, rows.index.tolist()) == (4096, [3, 0, 7])


def test_the_span_ends_with_the_last_fragment() -> None:
    """Nothing behind it is even named."""
    given = fragments([(0, 2), (7, 3)], unit=8)
    rows = as_rows(given)
    assert rows.base + rows.count * rows.row_bytes == 10 * 8
