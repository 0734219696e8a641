"""Pages of bytes, from threads without a loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire_store.pages import PageStore

KEYS = [bytes([number]) * 36 for number in range(4)]


@pytest.fixture
def store() -> Iterator[PageStore]:
    made = PageStore(["memory:1MiB"], name="m")
    yield made
    made.close()


def test_pages_come_back_byte_for_byte(store: PageStore) -> None:
    rows = np.arange(6 * 40, dtype=np.int32).reshape(6, 5, 8)
    pages = store.pages(rows)
    assert store.put(KEYS[:3], pages, [4, 0, 2]).result() == [True] * 3
    assert store.present(KEYS[::-1], pages).result() == [False, True, True, True]
    other = np.zeros_like(rows)
    got = store.get([KEYS[2], KEYS[3], KEYS[0]], store.pages(other), [5, 1, 3])
    assert got.result() == [True, False, True]
    assert (other[5] == rows[2]).all()
    assert (other[3] == rows[4]).all()
    assert not other[[0, 1, 2, 4]].any()


def test_pages_of_another_length_or_name_are_others(store: PageStore) -> None:
    rows = np.ones((2, 64), np.uint8)
    assert store.put(KEYS[:1], store.pages(rows), [1]).result() == [True]
    shorter = store.pages(np.zeros((2, 32), np.uint8))
    assert store.present(KEYS[:1], shorter).result() == [False]


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 8), ">f4" if sys.byteorder == "little" else "<f4"),
        np.ma.array(np.zeros((2, 8), np.float32), mask=True),
        np.zeros((2, 8), [("a", "u1"), ("b", "u1")]),
    ],
    ids=["byte order", "mask", "fields"],
)
def test_memory_that_is_not_its_values_makes_no_pages(
    store: PageStore, rows: Any
) -> None:
    with pytest.raises(UsageError, match=r"pages: .*(order|masked|fields)"):
        store.pages(rows)


def test_they_outlive_the_process(tmp_path: Path) -> None:
    rows = np.arange(128, dtype=np.uint8).reshape(2, 64)
    tiers = ["memory:1MiB", f"disk:{tmp_path}?size=1MiB"]
    for name, there in (("a", False), ("a", True), ("b", False)):
        store = PageStore(tiers, name=name)
        pages = store.pages(rows)
        assert store.present(KEYS[:2], pages).result() == [there] * 2
        store.put(KEYS[:2], pages, [0, 1]).result()
        store.close()


def test_what_has_no_room_is_refused_or_said_once(
    store: PageStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Some engines say how large a page is before there is one, and some do not."""
    pages = store.pages(np.zeros((2, 2 << 20), np.uint8))
    with pytest.raises(UsageError, match="a block of 2097152 bytes has no room"):
        store.require_room(pages)
    with caplog.at_level(logging.WARNING, "kvwire"):
        for _ in range(2):
            assert store.put(KEYS[:1], pages, [0]).result() == [False]
    # The store has a line of its own about its tier.
    (said,) = (
        one for one in caplog.messages if one.startswith("blocks were not saved")
    )
    assert "blocks were not saved: a block of 2097152 bytes" in said


def test_a_second_end_is_none(store: PageStore) -> None:
    store.close()
    assert "closed" in repr(store)


def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    with pytest.raises(UsageError, match="8GiB"):
        PageStore(["8GiB"])
