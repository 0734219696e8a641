"""Fragments are a byte stream: slicing, merging and shifting are those of the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments
from kvwire.types import Device, MemoryKind
from tests.support.depth import examples

DEVICE = Device(MemoryKind.CUDA, 1)
pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), max_size=8)


def make(pairs: list[tuple[int, int]]) -> Fragments:
    addresses = np.array([address for address, _ in pairs], np.uint64)
    lengths = np.array([length for _, length in pairs], np.uint64)
    return Fragments(addresses, lengths, owner="owner", writable=True, device=DEVICE)


def stream(fragments: Fragments) -> list[int]:
    """The address of every byte, one after the other."""
    pairs = zip(fragments.addresses.tolist(), fragments.lengths.tolist(), strict=True)
    return [address + n for address, length in pairs for n in range(length)]


@given(pieces, st.data())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_slices_merges_and_shifts_are_those_of_the_bytes(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    fragments = make(pairs)
    expected = stream(fragments)
    assert fragments.nbytes == len(expected)
    assert fragments.starts[-1] == len(expected)
    offset = data.draw(st.integers(0, len(expected)))
    length = data.draw(st.integers(0, len(expected) - offset))
    part = fragments.slice(offset, length)
    assert stream(part) == expected[offset : offset + length]
    merged = fragments.merged()
    assert stream(merged) == expected
    ends = merged.addresses + merged.lengths
    assert not (ends[:-1] == merged.addresses[1:]).any()
    for distance in (7, -60):
        far = make([(address + 60, length) for address, length in pairs])
        shifted = far.shifted(distance)
        assert stream(shifted) == [address + 60 + distance for address in expected]
    for made in (part, merged, fragments.shifted(1), fragments.slice(0, 0)):
        assert made.owner == "owner"
        assert made.writable
        assert made.device is DEVICE


@given(pieces, st.data())
@settings(max_examples=examples(50), deadline=None, derandomize=True)
def test_a_selection_is_of_whole_fragments(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    whole = make(pairs)
    chosen = data.draw(
        st.lists(st.integers(0, len(pairs) - 1)) if pairs else st.just([])
    )
    part = whole.selected(np.array(chosen, np.int64))
    assert stream(part) == stream(make([pairs[at] for at in chosen]))
    assert (part.owner, part.writable, part.device) == ("owner", True, DEVICE)
    assert part.nbytes == len(stream(part))
    bits = np.isin(np.arange(len(pairs)), chosen)
    ascending = [pair for pair, bit in zip(pairs, bits, strict=True) if bit]
    assert stream(whole.selected(bits)) == stream(make(ascending))


def test_merging_what_does_not_touch_is_free() -> None:
    fragments = make([(0, 2), (5, 2)])
    assert fragments.merged() is fragments
    assert repr(fragments) == "Fragments(2 of 4 bytes)"


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 5), (4, 1), (2, -1)])
def test_ranges_outside_are_refused(offset: int, length: int) -> None:
    with pytest.raises(UsageError, match="is outside the stream of 4 bytes"):
        make([(0, 2), (5, 2)]).slice(offset, length)


def test_arrays_that_are_no_fragments() -> None:
    good = np.array([4, 8], np.uint64)
    wrong: list[tuple[Any, Any, str]] = [
        (good, np.array([4, 8]), "must be uint64"),
        (good.astype(np.int64), good, "must be uint64"),
        (good, good[:1], "1-D and of the same length"),
        (good[None, :], good[None, :], "1-D and of the same length"),
        (good, np.array([4, 0], np.uint64), "a fragment has 0 bytes"),
    ]
    for addresses, lengths, message in wrong:
        with pytest.raises(UsageError, match=message):
            Fragments(addresses, lengths, owner=None, writable=False)
