"""Shares are even, and what joins or leaves moves its own share and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.store.index import as_keys
from kvwire.store.placement import placed, seed_of
from tests.store.caches import chain


@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_a_node_that_joins_takes_only_its_share(nodes: int) -> None:
    keys = as_keys(chain(4000))
    seeds = [seed_of(f"tcp://10.0.0.{number}:7500") for number in range(nodes + 1)]
    before, after = placed(keys, seeds[:-1]), placed(keys, seeds)
    moved = before != after
    assert (after[moved] == nodes).all()
    share = 4000 / (nodes + 1)
    counts = np.bincount(after, minlength=nodes + 1)
    # Five standard deviations of a share.
    assert (abs(counts - share) < 5 * share**0.5).all()


def test_the_order_of_nodes_does_not_matter() -> None:
    keys = as_keys([b"", b"a", *chain(100)])
    seeds = np.array([seed_of(name) for name in "abc"], object)
    turned = placed(keys, seeds[::-1].tolist())
    assert (seeds[placed(keys, seeds.tolist())] == seeds[::-1][turned]).all()
