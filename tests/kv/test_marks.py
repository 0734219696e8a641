"""Chunks of tokens to marks of blocks: each block once, and never too early."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.marks import LayerMarks


class Recorder:
    """An outgoing transfer that remembers what was marked, and checks when."""

    def __init__(self, num_tokens: int, block_tokens: int, layers: int) -> None:
        self.block_tokens = block_tokens
        self.written = np.zeros((layers, num_tokens), np.bool_)
        self.marked = np.zeros((layers, -(-num_tokens // block_tokens)), np.int64)
        self.finished = 0

    def ready(self, *, layers: int, blocks: slice) -> None:
        """Count the mark; every token of a marked block has been written."""
        self.marked[layers, blocks] += 1
        size = self.block_tokens
        tokens = self.written[layers, blocks.start * size : blocks.stop * size]
        assert tokens.size
        assert tokens.all(), f"layer {layers}, blocks {blocks}: marked too early"
        assert not self.finished

    def finish(self) -> None:
        """Count it; there is nothing left to mark."""
        self.finished += 1
        assert (self.marked == 1).all()


@given(
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    block_tokens=st.integers(1, 17),
    beyond=st.integers(0, 20),
    last_layer=st.sampled_from([None, 1]),
)
def test_each_block_is_marked_once_when_it_is_written(
    chunks: list[int], block_tokens: int, beyond: int, last_layer: int | None
) -> None:
    """However a prompt is cut into chunks, also where they go on behind its end.

    With a last layer named, the last mark finishes as well.
    """
    num_tokens = max(1, sum(chunks) - beyond)
    out = Recorder(num_tokens, block_tokens, layers=2)
    marks = LayerMarks(out, num_tokens, block_tokens, last_layer=last_layer)
    ends = list(itertools.accumulate(chunks, initial=0))
    for start, stop in itertools.pairwise(ends):
        for layer in range(2):
            out.written[layer, start:stop] = True
            marks(layer, start, stop)
    assert (out.marked == 1).all()
    assert out.finished == (last_layer is not None)


@pytest.mark.parametrize(("num_tokens", "block_tokens"), [(0, 16), (16, 0), (-1, 16)])
def test_what_cannot_be_marked_is_refused(num_tokens: int, block_tokens: int) -> None:
    out = Recorder(1, 1, layers=1)
    with pytest.raises(UsageError, match=f"num_tokens={num_tokens}"):
        LayerMarks(out, num_tokens, block_tokens)
