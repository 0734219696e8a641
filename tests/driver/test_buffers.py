"""The memory behind buffer numbers: kept until it has drained, and not longer."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from kvwire.driver.buffers import BufferTable


def test_lent_memory_is_kept_alive_until_it_has_drained() -> None:
    table = BufferTable()
    memory = np.zeros(64, np.uint8)
    alive = weakref.ref(memory)
    buffer = table.lend(memory.data)
    del memory
    table.holds.take(buffer)
    table.holds.retire(buffer)
    table.collect()
    gc.collect()
    assert alive() is not None
    assert len(table) == 1

    table.holds.drop(buffer)
    table.collect()
    gc.collect()
    assert alive() is None
    assert len(table) == 0


def test_those_who_wait_are_told_once_each() -> None:
    table = BufferTable()
    buffer = table.lend(memoryview(bytearray(4)))
    told: list[str] = []
    table.on_drained(buffer, lambda: told.append("first"))
    table.on_drained(buffer, lambda: told.append("second"))
    table.collect()
    assert told == []
    table.holds.retire(buffer)
    table.collect()
    table.collect()
    assert told == ["first", "second"]


def test_who_asks_late_is_told_at_once() -> None:
    table = BufferTable()
    buffer = table.lend(memoryview(bytearray(4)))
    table.take_back(buffer)
    told: list[int] = []
    table.on_drained(buffer, lambda: told.append(1))
    assert told == [1]


def test_who_is_told_may_lend_and_take_back() -> None:
    """A drained buffer is often the reason to use the next."""
    table = BufferTable()
    first = table.lend(memoryview(bytearray(4)))
    second: list[int] = []

    def again() -> None:
        buffer = table.lend(memoryview(bytearray(4)))
        table.take_back(buffer)
        table.on_drained(buffer, lambda: second.append(1))

    table.on_drained(first, again)
    table.take_back(first)
    assert second == [1]
    assert len(table) == 0
