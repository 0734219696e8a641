"""The missing blocks of a transfer, as a mapping over arrays."""

from __future__ import annotations

import numpy as np

from kvwire.kv.missing import MissingBlocks, MissingOfGroup, join_missing


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
    assert repr(found) == "MissingBlocks(2 blocks; lost; never sent)"


def test_a_join_misses_what_any_share_misses() -> None:
    """The first share's reason holds, the layers add up over pipeline stages."""
    low = missing([7, 3], ["low 7", "low 3"], layers=range(2))
    high = missing([3, 5], ["high 3", "high 5"], layers=range(2, 4))
    joined = join_missing([low, high])
    assert dict(joined) == {("a", 3): "low 3", ("a", 5): "high 5", ("a", 7): "low 7"}
    assert [joined.layers(("a", n)) for n in (3, 5, 7)] == [(0, 2), (2,), (0,)]
