"""Block lists are checked as a whole, and sets of blocks behave as sets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.blocks import (
    BlockSet,
    MissingBlocks,
    MissingOfGroup,
    among,
    block_lists,
    distinct,
    join_missing,
)
from kvwire.kv.marks import LayerMarks
from kvwire.limits import KV_BLOCKS_MAX
from tests.support.depth import examples

ONE = {"kv": 10}
TWO = {"full": 10, "window": 4}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "0 blocks; a transfer takes 1 to"),
        ([1, 10], "block id 10 at position 1 is out of range; .* blocks 0 to 9"),
        ([-1], "block id -1 at position 0"),
        ([2, 5, 2], "block id 2 appears twice, again at position 2"),
        ([[1], [2]], "a flat sequence of block ids, not 2-dimensional int64"),
        ([1.0], "not 1-dimensional float64"),
        ([True], "not 1-dimensional bool"),
        (5, "not 0-dimensional"),
        ([2**63], "out of range"),
        (np.ma.array([1, 2], mask=[False, True]), "a masked array keeps its mask"),
        ({"full": [1]}, "unknown group 'full'; this cache has kv"),
        ({}, "group 'kv' is missing"),
    ],
    ids=str,
)
def test_r18_wrong_lists_are_named(blocks: Any, message: str) -> None:
    """An empty list among them: a mistake, not a transfer that is done at once."""
    with pytest.raises(UsageError, match=f"blocks.*{message}"):
        block_lists(blocks, ONE)


def test_groups_have_to_be_named() -> None:
    with pytest.raises(UsageError, match="has the groups full, window; pass"):
        block_lists([1], TWO)
    with pytest.raises(UsageError, match="group 'window' is missing"):
        block_lists({"full": [1]}, TWO)
    with pytest.raises(UsageError, match="group 'window': block id 4"):
        block_lists({"full": [4], "window": [4]}, TWO)
    with pytest.raises(UsageError, match="0 blocks"):
        block_lists({"full": [], "window": []}, TWO)
    none = block_lists({"full": [], "window": []}, TWO, least=0)
    assert [ids.size for ids in none.values()] == [0, 0]


def test_too_many_blocks() -> None:
    many = np.arange(KV_BLOCKS_MAX)
    why = f"{KV_BLOCKS_MAX + 1} blocks; a transfer takes 1 to {KV_BLOCKS_MAX}"
    with pytest.raises(UsageError, match=why):
        block_lists({"full": many, "window": [1]}, {"full": KV_BLOCKS_MAX, "window": 2})


ids_of_groups = st.dictionaries(
    st.sampled_from("ab"), st.lists(st.integers(0, 9), unique=True)
)


@given(ids_of_groups, ids_of_groups)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_a_block_set_is_a_set(
    first: dict[str, list[int]], second: dict[str, list[int]]
) -> None:
    one, other = (
        BlockSet({name: np.array(ids, np.int64) for name, ids in groups.items()})
        for groups in (first, second)
    )
    plain, plain_other = (
        {(name, n) for name, ids in groups.items() for n in ids}
        for groups in (first, second)
    )
    assert set(one) == plain
    assert len(one) == len(plain)
    assert [block for block in one if block in one] == list(one)
    assert one & other == plain & plain_other
    assert one - other == plain - plain_other
    assert (one <= other) == (plain <= plain_other)
    for block in plain | plain_other:
        assert (block in one) == (block in plain)


@given(st.lists(st.integers(-5, 5)))
def test_distinct_values_are_those_of_a_set(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


@given(st.lists(st.integers(-5, 5)), st.lists(st.integers(-5, 5)))
def test_values_among_others_are_those_of_a_set(
    values: list[int], others: list[int]
) -> None:
    found = among(np.array(values, np.int64), np.array(others, np.int64))
    assert found.tolist() == [value in set(others) for value in values]


def test_positions_and_ids() -> None:
    blocks = BlockSet({"a": np.array([7, 3, 5])})
    assert [blocks.position(("a", n)) for n in (7, 3, 5, 4, 9)] == [0, 1, 2, -1, -1]
    others = 7, ("a",), ("b", 7), ("a", 7, 0), "a7", ("a", None), ("a", "7"), (["a"], 7)
    for other in others:
        assert other not in blocks
    assert blocks.ids("a").tolist() == [7, 3, 5]
    assert blocks.groups == ("a",)
    assert repr(blocks) == "BlockSet(a: 3)"
    with pytest.raises(UsageError, match="unknown group 'b'; the groups are a"):
        blocks.ids("b")
    with pytest.raises(UsageError, match=r"unknown group \['a'\]; the groups are a"):
        blocks.ids(["a"])  # type: ignore[arg-type]


def missing(
    ids: list[int], reasons: list[str], *, layers: range = range(2), group: str = "a"
) -> MissingBlocks:
    """Blocks that each miss the first layer, each for a reason of its own."""
    lost = np.zeros((len(layers), len(ids)), np.bool_)
    lost[0] = True
    codes = np.arange(len(ids), dtype=np.uint16)
    return MissingBlocks(
        {group: MissingOfGroup(np.array(ids, np.int64), codes, layers, lost)}, reasons
    )


def test_each_block_has_its_reason_and_layers() -> None:
    found = missing([7, 3], ["lost", "never sent"], layers=range(4, 6))
    assert dict(found) == {("a", 7): "lost", ("a", 3): "never sent"}
    assert list(found) == [("a", 7), ("a", 3)]
    assert len(found) == 2
    assert found.ids("a").tolist() == [7, 3]
    assert found.layers(("a", 3)) == (4,)
    for other in (5, "a", ("a", 5), ("b", 3), (["a"], 3)):
        with pytest.raises(UsageError, match=r"pass \(group, id\), such as \('a', 5\)"):
            found.layers(other)  # type: ignore[arg-type]
    assert repr(found) == "MissingBlocks(2 blocks; lost; never sent)"


def test_a_join_misses_what_any_share_misses() -> None:
    """The first share's reason holds, the layers add up over pipeline stages."""
    low = missing([7, 3], ["low 7", "low 3"], layers=range(2))
    high = missing([3, 5], ["high 3", "high 5"], layers=range(2, 4))
    joined = join_missing([low, high])
    assert dict(joined) == {("a", 3): "low 3", ("a", 5): "high 5", ("a", 7): "low 7"}
    assert [joined.layers(("a", n)) for n in (3, 5, 7)] == [(0, 2), (2,), (0,)]


# --- chunks of tokens to marks of blocks: each block once, and never too early --------


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


@pytest.mark.parametrize("ids", [range(10), range(2, 9, 3), range(9, -1, -2)])
def test_a_range_is_its_numbers(ids: range) -> None:
    assert block_lists(ids, ONE)["kv"].tolist() == list(ids)


@pytest.mark.parametrize("ids", [range(11), range(-1, 4), range(3, -2, -1)])
def test_a_range_beyond_the_pool_is_refused(ids: range) -> None:
    with pytest.raises(UsageError, match="is out of range"):
        block_lists(ids, ONE)
