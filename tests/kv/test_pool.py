"""The block pool against a naive model that searches lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvwire.errors import UsageError
from kvwire.kv.pool import BlockPool
from tests.support.depth import examples

CALLS = ("allocate", "free", "touch", "cache", "evict", "lookup")
NAMES = [bytes([n]) * 32 for n in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Every call on the pool and on the model; they have to say and hold the same."""

    @initialize(size=st.integers(1, 7))
    def create(self, size: int) -> None:
        self.removed: list[bytes] = []
        self.pool = BlockPool(size, 4, on_removed=self.removed.extend)
        self.held = dict.fromkeys(range(size), 0)
        self.names: dict[int, bytes] = {}
        self.free_list = list(range(size))

    # One rule for all: of several, Hypothesis leaves some out for a whole run.
    @rule(data=st.data(), call=st.sampled_from(CALLS))
    def step(self, data: Any, call: str) -> None:
        before = set(self.names.values())
        self.removed.clear()
        getattr(self, call)(data)
        assert sorted(self.removed) == sorted(before - set(self.names.values()))

    def allocate(self, data: Any) -> None:
        count = data.draw(st.integers(0, len(self.free_list) + 1))
        if count > len(self.free_list):
            with pytest.raises(UsageError, match=f"allocate\\({count}\\)"):
                self.pool.allocate(count)
            return
        expected = self.free_list[:count]
        assert self.pool.allocate(count) == expected
        self.free_list = self.free_list[count:]
        for block in expected:
            self.held[block] = 1
            self.names.pop(block, None)

    def free(self, data: Any) -> None:
        blocks = data.draw(self._some(self._held()))
        if any(not self.held[block] for block in blocks):
            with pytest.raises(UsageError, match="is not held"):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                self._to_free_list(block)

    def touch(self, data: Any) -> None:
        blocks = data.draw(self._some([*self._held(), *self.names]))
        if any(not self.held[b] and b not in self.names for b in blocks):
            with pytest.raises(UsageError, match="is free and has no cached content"):
                self.pool.touch(blocks)
            return
        self.pool.touch(blocks)
        for block in blocks:
            if not self.held[block]:
                self.free_list.remove(block)
            self.held[block] += 1

    def cache(self, data: Any) -> None:
        blocks = data.draw(self._some(self._held()))
        some = st.lists(
            st.sampled_from(NAMES), min_size=len(blocks), max_size=len(blocks)
        )
        names = data.draw(some)
        pairs = list(zip(blocks, names, strict=True))
        refused = any(not self.held[b] for b in blocks) or any(
            b in self.names and self.names[b] != name for b, name in pairs
        )
        if refused:
            with pytest.raises(UsageError, match=r"is not held|already has the hash"):
                self.pool.cache(blocks, names)
            return
        self.pool.cache(blocks, names)
        for block, name in pairs:
            if name not in self.names.values():
                self.names[block] = name

    def evict(self, data: Any) -> None:
        blocks = data.draw(self._some([*self._held(), *self.names]))
        self.pool.evict(blocks)
        for block in blocks:
            if self.names.pop(block, None) and not self.held[block]:
                self.free_list.remove(block)
                self.free_list.insert(0, block)

    def lookup(self, data: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(NAMES), max_size=6))
        expected = []
        for name in names:
            if name not in self.names.values():
                break
            expected += [b for b, known in self.names.items() if known == name]
        assert self.pool.lookup(names) == expected

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_blocks == len(self.free_list)
        places = {name: [block] for block, name in self.names.items()}
        for name in NAMES:
            assert self.pool.lookup([name]) == places.get(name, [])

    def _held(self) -> list[int]:
        return [block for block, count in self.held.items() if count]

    def _some(self, usual: list[int]) -> st.SearchStrategy[list[int]]:
        """Any blocks, and mostly only such as the call is for."""
        every = st.lists(st.sampled_from(sorted(self.held)), unique=True)
        if not usual:
            return every
        right = st.lists(st.sampled_from(sorted(set(usual))), unique=True, min_size=1)
        return right | right | right | every

    def _to_free_list(self, block: int) -> None:
        """Without content first, with content last."""
        if block in self.names:
            self.free_list.append(block)
        else:
            self.free_list.insert(0, block)

    def teardown(self) -> None:
        """What is free can all be taken, in the model's order."""
        if hasattr(self, "pool"):
            assert self.pool.allocate(len(self.free_list)) == self.free_list


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None, derandomize=True
)


def test_wrong_calls_change_nothing() -> None:
    made = BlockPool(3, 4)
    blocks = made.allocate(2)
    pool: Any = made
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: pool.free([0, 3]), "block 3 does not exist; the pool has 0 to 2"),
        (lambda: pool.free([-1]), "block -1 does not exist; the pool has 0 to 2"),
        (lambda: pool.free([0, 0]), "block 0 appears twice"),
        (lambda: pool.free([0, 2]), "block 2 is not held"),
        (lambda: pool.touch([0, 2]), "block 2 is free and has no cached content"),
        (lambda: pool.cache([0], []), "0 hashes for 1 blocks"),
        (lambda: pool.evict([1, 1]), "block 1 appears twice"),
        (lambda: pool.free(np.array([1, 1])), "block 1 appears twice"),
        (lambda: pool.allocate(1.0), r"allocate\(1.0\)"),
        (lambda: pool.blocks_for(-1), r"blocks_for\(-1\)"),
        (lambda: pool.blocks_for("4"), r"blocks_for\('4'\)"),
        (lambda: pool.allocate(-1), r"allocate\(-1\)"),
        (lambda: pool.allocate(2), "1 of 3 blocks are free"),
    ]
    for call, message in wrong:
        with pytest.raises(UsageError, match=message):
            call()
        assert pool.free_blocks == 1
    pool.free(blocks)
    with pytest.raises(UsageError, match="block 0 is not held"):
        pool.free([0])
    pool.free([])
    assert pool.free_blocks == 3


@pytest.mark.parametrize(
    ("num_blocks", "block_tokens"),
    [(0, 4), (-1, 4), (4, 0), (4, 10**6), (True, 4), (4, True), ("4", 4), (4, 2.5)],
)
def test_sizes_out_of_range_are_refused(num_blocks: Any, block_tokens: Any) -> None:
    with pytest.raises(UsageError, match="BlockPool: "):
        BlockPool(num_blocks, block_tokens)


def test_sizes_of_any_whole_type() -> None:
    pool = BlockPool(np.int64(4), np.int32(16))  # type: ignore[arg-type]
    assert (type(pool.num_blocks), type(pool.block_tokens)) == (int, int)
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_blocks_for_tokens() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_unsigned_numbers_do_not_wrap() -> None:
    """NumPy's minus does, and lengths of prompts often come from an array."""
    pool: Any = BlockPool(4, 16)
    assert [pool.blocks_for(n) for n in np.array([0, 1, 17], np.uint32)] == [0, 1, 2]
    held = pool.allocate(2)
    pool.cache(held, NAMES[:2])
    pool.free(held)
    assert sorted(pool.allocate(np.uint32(4))) == [0, 1, 2, 3]
