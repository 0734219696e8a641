"""Fragments as rows of one table, and whether that is the way to move them.

A library's own gather (``index_select``) moves equal rows of a table. Fragments become
that: the table begins at the lowest address and has one row for every *step*, the
largest number of bytes that divides all their lengths and all distances between them.
The table may span memory that is not ours: only the rows that are named are touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.fragments import Fragments

# To queue one copy takes the host some microseconds, in which PCIe moves 100 KB. More
# copies than this in a chunk cost more than one gather and one copy.
RUNS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class FragmentRows:
    """Describes fragments as rows of a table.

    Attributes:
        base: The address of row 0.
        row_bytes: Bytes of a row.
        count: Rows in the table's span.
        index: Shape (n,), int64: the rows of the fragments, in their order.
    """

    base: int
    row_bytes: int
    count: int
    index: npt.NDArray[np.int64]


def as_rows(fragments: Fragments) -> FragmentRows:
    """See fragments, at least one, as rows of one table."""
    addresses, lengths = fragments.addresses, fragments.lengths
    base = addresses.min()
    offsets = addresses - base
    step = np.gcd(np.gcd.reduce(lengths), np.gcd.reduce(offsets))
    first = (offsets // step).astype(np.int64)
    rows = (lengths // step).astype(np.int64)
    if (rows == 1).all():
        index = first
    else:
        # Row k of the stream is the k-th row of its fragment, counted from its first.
        begins = np.cumsum(rows) - rows
        index = np.arange(rows.sum()) + np.repeat(first - begins, rows)
    return FragmentRows(int(base), int(step), int(index.max()) + 1, index)
