"""Seen is a set of numbers that forgets none and costs nothing in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwire.proto.chunk_set import ChunkSet


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40))))
def test_it_is_a_set(steps: list[tuple[bool, int]]) -> None:
    """In any order, with any repetitions, from any start; what was lost is new."""
    seen, model = ChunkSet(), set[int]()
    for lost, number in steps:
        if lost and number in model:
            seen.forget(number)
            model.remove(number)
        else:
            assert seen.note(number) is (number not in model)
            model.add(number)


def test_what_was_lost_is_kept_until_it_comes_again() -> None:
    """And then costs nothing any more."""
    seen = ChunkSet()
    assert all(seen.note(number) for number in range(10))
    assert seen.note(20)
    seen.forget(3)
    seen.forget(20)
    assert (seen._holes, seen._beyond) == ({3}, set())
    assert seen.note(3)
    assert not seen.note(3)
    assert seen.note(20)
    assert not seen._holes


def test_no_memory_in_order() -> None:
    """A size that the peer announces costs nothing; what came out of order is kept."""
    seen = ChunkSet()
    assert all(seen.note(number) for number in range(1000))
    assert not seen._beyond
    assert seen.note(10**12)
    assert seen._beyond == {10**12}
    assert seen.note(1001)
    assert seen.note(1000)
    assert seen._beyond == {10**12}
