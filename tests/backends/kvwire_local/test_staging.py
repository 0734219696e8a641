"""The staging ring: no two payloads overlap, and room comes back in order."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvwire.memory.copy import MID_PAGE_BYTES
from kvwire_local.staging import Staging

_RING = 1 << 16


def payload(number: int, nbytes: int) -> memoryview:
    return np.full(nbytes, number % 251 + 1, np.uint8).data


@given(st.lists(st.one_of(st.none(), st.integers(1, _RING)), max_size=60))
def test_placed_payloads_keep_their_bytes(steps: list[int | None]) -> None:
    """None gives the oldest room back; a number is a payload of so many bytes."""
    ring = Staging(_RING)
    placed: deque[tuple[int, int, int]] = deque()
    try:
        for number, step in enumerate(steps):
            if step is None:
                if placed:
                    placed.popleft()
                    ring.give_back()
                continue
            begin = ring.place(payload(number, step))
            if begin is not None:
                placed.append((number, begin, step))
            elif not placed:
                raise AssertionError("an empty ring has no room")
            for which, at, nbytes in placed:
                assert_holds(ring, at, payload(which, nbytes))
    finally:
        ring.close()


def assert_holds(ring: Staging, begin: int, expected: memoryview) -> None:
    first = begin - MID_PAGE_BYTES
    assert ring._view[first : first + len(expected)] == expected


def test_a_longer_payload_waits_for_a_larger_ring() -> None:
    ring = Staging(_RING)
    assert ring.place(payload(1, 100)) == MID_PAGE_BYTES
    first = ring.arena
    assert ring.place(payload(2, _RING + 1)) is None
    ring.give_back()
    assert ring.place(payload(2, _RING + 1)) == MID_PAGE_BYTES
    assert ring.arena is not first
    assert first is not None
    assert first.closed
    ring.close()
    assert ring.arena is None
    ring.close()
