"""The oracle names where words come from, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire_certify import oracle

SLOTS = 4
WORDS = 8


@pytest.fixture
def sides() -> tuple[oracle.WatchedMemory, oracle.WatchedMemory]:
    memories = [np.zeros(SLOTS * WORDS, np.uint64) for _ in range(2)]
    return oracle.WatchedMemory(1, memories[0], SLOTS), oracle.WatchedMemory(
        2, memories[1], SLOTS
    )


@pytest.mark.parametrize(
    "origin", [(1, 1, 0), (2, 3, 4), (15, (1 << 28) - 1, (1 << 32) - 1)]
)
def test_a_word_says_where_it_came_from(origin: tuple[int, int, int]) -> None:
    writer, life, place = origin
    (word,) = oracle.stamp(writer, life, np.array([place]))
    assert oracle.origin(int(word)) == origin


def test_each_byte_of_a_word_differs_from_that_of_the_next_life() -> None:
    places = np.arange(1000)
    lives = [oracle.stamp(1, life, places).view(np.uint8) for life in (7, 8)]
    same = (lives[0] == lives[1]).mean(axis=None)
    assert same < 0.01, "a torn byte would often be taken for the right one"


def expected_of(source: oracle.WatchedMemory) -> oracle.Words:
    content = source.content([1, 2])
    assert content is not None
    return content.copy()


def test_what_landed_is_judged(
    sides: tuple[oracle.WatchedMemory, oracle.WatchedMemory],
) -> None:
    left, right = sides
    expected = expected_of(right)
    blank = left.found([0, 1])
    right.write([1, 2])
    stale = right.found([1, 2])

    def judged(words: oracle.Words) -> str:
        wrong = oracle.landed(words, expected, blank, right, [1, 2])
        return "" if wrong is None else wrong.rule

    first = np.arange(2 * WORDS) < 3
    assert not judged(expected)
    assert judged(np.where(first, blank, expected)) == "hole"
    assert judged(stale) == "stale"
    assert judged(np.where(first, stale, expected)) == "torn"
    within = expected.copy()
    within.view(np.uint8)[:11] = stale.view(np.uint8)[:11]
    assert judged(within) == "torn"
    assert judged(expected[::-1].copy()) == "misplaced"
    assert judged(np.where(first, right.found([0, 3]), expected)) == "foreign"
    assert judged(np.where(first, expected ^ np.uint64(1), expected)) == "foreign"


def test_what_is_watched(
    sides: tuple[oracle.WatchedMemory, oracle.WatchedMemory],
) -> None:
    left, right = sides
    assert left.watch() is None
    left.lend([1])
    left.words[1][3] = 5
    assert left.watch() is None, "it is lent"
    left.write([1], "a cancel")
    left.words[1][3] = right.words[0][3]
    wrong = left.watch()
    assert wrong is not None
    assert wrong.rule == "late-write"
    assert "8 bytes of slot 1 of side 1 changed after a cancel" in wrong.text
    assert "of side 2 at word 3" in wrong.text


def test_a_put_that_failed_may_have_written_a_part(
    sides: tuple[oracle.WatchedMemory, oracle.WatchedMemory],
) -> None:
    left, right = sides
    right.allow([0], left.found([2]))
    right.words[0][:3] = left.words[2][:3]
    right.words[0].view(np.uint8)[24:27] = left.words[2].view(np.uint8)[24:27]
    assert right.watch() is None
    assert right.content([0]) is None, "nobody knows which part"
    left.write([2])
    right.words[0][5] = left.words[2][5]
    wrong = right.watch()
    assert wrong is not None
    assert wrong.rule == "late-read"
