"""Generations of blocks: given once, renewed for ever; compiled and not."""

from __future__ import annotations

import platform
import sys
import threading

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.memory.arena import SharedMapping
from kvwire.memory.compiled import compiled_function
from kvwire.memory.generations import Generations
from tests.support.compiled import need_compiled, without_compiled

COUNT = 40


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "python":
        without_compiled(monkeypatch)
    else:
        need_compiled()
    return name


def test_a_renewed_block_has_a_generation_that_nobody_was_given() -> None:
    table = Generations(COUNT)
    ids = np.arange(COUNT)
    seen = set(table.values.tolist())
    assert len(seen) == COUNT
    for _ in range(100):  # several pools of random numbers
        table.renew(ids)
        new = set(table.current(ids).tolist())
        assert len(new) == COUNT
        assert not new & seen
        seen |= new
    table.close()


def test_only_the_named_blocks_are_renewed() -> None:
    table = Generations(COUNT)
    ids = np.arange(COUNT)
    before = table.current(ids)
    chosen = np.array([39, 0, 7])
    table.renew(chosen)
    same = table.same(ids, before)
    assert set(ids[~same].tolist()) == set(chosen.tolist())
    assert table.same(chosen, table.current(chosen)).all()
    assert not table.same(chosen[::-1], table.current(chosen))[[0, 2]].any()
    table.renew(ids[::2])  # not side by side
    assert table.same(ids, before).tolist() == [
        i % 2 == 1 and i not in (39, 0, 7) for i in range(COUNT)
    ]
    table.close()


def test_more_blocks_than_a_pool_of_random_numbers_has() -> None:
    table = Generations(3000)
    ids = np.arange(3000)
    before = table.current(ids)
    table.renew(ids)
    assert len({*before.tolist(), *table.current(ids).tolist()}) == 6000
    table.close()


@pytest.mark.parametrize("beyond", [COUNT, -1, 2**62, -(2**63)])
def test_ids_beyond_the_table(beyond: int) -> None:
    table = Generations(COUNT)
    ids = np.array([5, beyond, 6])
    before = table.current(np.array([5, 6]))
    tickets = np.array([before[0], 1, before[1]], np.uint64)
    assert table.same(ids, tickets).tolist() == [True, False, True]
    with pytest.raises(UsageError, match="1 of 3 ids are outside 0 to 39"):
        table.renew(ids)
    assert not table.same(np.array([5, 6]), before).any()
    table.close()


def test_nothing_is_valid_after_close() -> None:
    """For whoever has mapped the table, too."""
    table = Generations(COUNT)
    ids = np.arange(COUNT)
    before = table.current(ids)
    if sys.platform != "linux":
        table.close()
        assert not table.same(ids, before).any()
        return
    assert table.arena is not None
    mapping = SharedMapping(table.arena.fileno(), 4096 + 8 * COUNT, writable=False)
    view = mapping.array(table.address - table.arena.address, table.nbytes)
    mapped = view.view(np.uint64)
    assert np.array_equal(mapped, before)
    table.close()
    assert table.arena.closed
    assert not (mapped == before).any()
    assert not table.same(ids, before).any()
    table.close()
    del mapped, view
    mapping.close()


def test_the_values_are_read_only() -> None:
    table = Generations(COUNT)
    with pytest.raises(ValueError, match="read-only"):
        table.values[0] = 1
    table.close()


def test_threads_draw_no_number_twice() -> None:
    table = Generations(4)
    drawn: list[list[int]] = [[], [], [], []]

    def run(block: int) -> None:
        ids = np.array([block])
        for _ in range(3000):
            table.renew(ids)
            drawn[block].append(table.current(ids).item())

    threads = [threading.Thread(target=run, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for numbers in drawn for number in numbers}) == 12_000
    table.close()


def test_processors_without_order_need_the_compiled_functions(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    if way == "compiled":
        Generations(1).close()
        return
    with pytest.raises(BackendUnavailable, match="on aarch64 they need kvwire's comp"):
        Generations(1)


def test_a_library_of_another_version_counts_as_none() -> None:
    assert compiled_function("kvwire_a_later_function") is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_columns_of_other_lengths_are_not_read(count: int) -> None:
    """With -O as well: a compiled function would read beyond the shorter one."""
    table = Generations(4)
    ids, numbers = np.array([1, 2]), np.zeros(count, np.uint64)
    with pytest.raises(ValueError, match="of 2 blocks"):
        table.renew(ids, numbers)
    with pytest.raises(ValueError, match="of 2 blocks"):
        table.same(ids, numbers)
    table.close()
