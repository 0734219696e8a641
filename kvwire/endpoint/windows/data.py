"""The bytes of a small get, which the owner gathers and the reader copies to blocks.

The bytes are in the order of the granules, and within a granule in the order in which
its pieces are walked. The two sides may cut a granule into pieces of different lengths,
but the order is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvwire.endpoint.windows.map import BlockPlaces
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import columns_of
from kvwire.memory.buffers import mid_page_memory
from kvwire.memory.pieces import copy_pieces


def gathered(parts: Sequence[tuple[BlockPlaces, Ids]], nbytes: int) -> memoryview:
    """Return a copy of granules, given per group as offsets from its block 0."""
    data = mid_page_memory(nbytes)
    line: int = data.__array_interface__["data"][0]
    for place, offsets in parts:
        line += move_granules(place, offsets, line, gather=True)
    return data.data


def move_granules(place: BlockPlaces, offsets: Ids, line: int, *, gather: bool) -> int:
    """Copy granules to or from a contiguous range; return the number of bytes."""
    addresses, run = place.in_order(offsets)
    total = run * addresses.size
    lengths, starts = columns_of(addresses.size, run)
    side_by_side = starts[:-1] + np.uint64(line)
    if gather:
        copy_pieces(addresses, side_by_side, lengths, total)
    else:
        copy_pieces(side_by_side, addresses, lengths, total)
    return total
