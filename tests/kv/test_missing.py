"""The missing blocks of a transfer, as a mapping over arrays."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.errors import UsageError
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


def test_only_reasons_that_a_block_has_are_named() -> None:
    """What else could have happened is no reason for anything."""
    texts = ["lost", "never sent", "damaged"]
    assert missing([7], texts).reasons == ("lost",)
    assert repr(missing([7], texts)) == "MissingBlocks(1 blocks; lost)"
    assert repr(missing([], texts)) == "MissingBlocks(0 blocks)"
    assert join_missing([missing([], texts), missing([4], texts)]).reasons == ("lost",)


def test_a_block_that_is_not_missing_has_no_reason() -> None:
    """Ids of other groups are other blocks (R31)."""
    found = missing([7, 3], ["lost", "never sent"])
    for block in (("a", 4), ("b", 7), ("a", -1), ("a", 10**30)):
        assert block not in found
        with pytest.raises(KeyError):
            found[block]
    with pytest.raises(KeyError):
        found.layers(("a", 4))
    with pytest.raises(UsageError, match="no group 'b'; there is a"):
        found.ids("b")


def test_a_join_misses_what_any_share_misses() -> None:
    """The first share's reason holds, the layers add up over pipeline stages."""
    low = missing([7, 3], ["low 7", "low 3"], layers=range(2))
    high = missing([3, 5], ["high 3", "high 5"], layers=range(2, 4))
    joined = join_missing([low, high])
    assert dict(joined) == {("a", 3): "low 3", ("a", 5): "high 5", ("a", 7): "low 7"}
    assert [joined.layers(("a", n)) for n in (3, 5, 7)] == [(0, 2), (2,), (0,)]
