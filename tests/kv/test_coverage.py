"""Claims against an array of booleans, which says the same more slowly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvwire.kv.coverage import Coverage

LAYERS, BLOCKS = 5, 7


def _ranges(size: int) -> st.SearchStrategy[range]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return ends.map(lambda pair: range(min(pair), max(pair)))


@given(st.lists(st.tuples(_ranges(LAYERS), _ranges(BLOCKS)), max_size=12))
def test_any_marks_in_any_order(marks: list[tuple[range, range]]) -> None:
    """What is taken, complete, untouched, and the first gap."""
    claims = Coverage(LAYERS, BLOCKS)
    cells = np.zeros((LAYERS, BLOCKS), np.bool_)
    for layers, blocks in marks:
        part = cells[layers.start : layers.stop, blocks.start : blocks.stop]
        assert claims.overlaps(layers, blocks) == bool(part.any())
        assert claims.claim(layers, blocks) == (not part.any())
        if not part.any():
            part[:] = True
        assert claims.complete == bool(cells.all())
        assert claims.untouched == int((~cells.any(axis=1)).sum())
        if not cells.all():
            gap = tuple(int(index) for index in np.argwhere(~cells)[0])
            assert claims.first_gap() == gap
